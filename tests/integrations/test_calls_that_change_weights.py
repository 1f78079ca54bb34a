# SPDX-License-Identifier: Apache-2.0
"""Every call of vLLM's worker that could be one that changes weights was looked at. A new one fails here by name.

The calls are read from the installed vLLM's source text, which is not imported: any of them can come by
`collective_rpc`.
"""

import ast
import importlib.util
from enum import Enum, auto
from pathlib import Path

import pytest

from omni_core.integrations.vllm.changed_weights import ChangedWeightsMixin
from omni_core.integrations.vllm.releases.engine_contract import CHANGED_WEIGHTS, FactKind

WORKERS = {
    "v1/worker/worker_base.py": "WorkerBase",
    "v1/worker/gpu_worker.py": "Worker",
    "v1/worker/cpu_worker.py": "CPUWorker",
}
WORDS = ("weight", "lora", "adapter", "sleep", "wake", "discard", "checkpoint", "restore", "model", "parameter")
"""A method is looked at if its name has one of these in it."""


class Heard(Enum):
    """How the cache hears of what a call changes."""

    OVERRIDDEN = auto()
    """The mixin has a method of this name, which tells the cache."""
    NEED_NOT = auto()
    """It changes no weights and no adapter; the table says why."""


CALLS = {
    "reload_weights": (Heard.OVERRIDDEN, "loads all weights again"),
    "start_weight_update": (Heard.OVERRIDDEN, "says that the updates are of the model"),
    "start_draft_weight_update": (Heard.OVERRIDDEN, "says that the updates are of the draft model"),
    "update_weights": (Heard.OVERRIDDEN, "loads some weights"),
    "finish_weight_update": (Heard.OVERRIDDEN, "may load the last of them"),
    "reset_weights": (Heard.OVERRIDDEN, "makes every weight zero"),
    "sleep": (Heard.OVERRIDDEN, "level 2 throws the weights away"),
    "discard": (Heard.OVERRIDDEN, "throws away what has these tags, which may be the weights"),
    "wake_up": (Heard.OVERRIDDEN, "brings back memory without the weights that were in it"),
    "add_lora": (Heard.OVERRIDDEN, "may read an adapter"),
    "remove_lora": (Heard.OVERRIDDEN, "another adapter may come under this id"),
    "load_model": (Heard.NEED_NOT, "runs before there is a cache"),
    "update_max_model_len": (Heard.NEED_NOT, "changes a limit, at start"),
    "compile_or_warm_up_model": (Heard.NEED_NOT, "reads the weights"),
    "get_model": (Heard.NEED_NOT, "hands the model out; who writes to it tells the cache by omni_core_bump"),
    "get_draft_model": (Heard.NEED_NOT, "no stored row depends on the draft model"),
    "get_model_inspection": (Heard.NEED_NOT, "describes the model"),
    "apply_model": (Heard.NEED_NOT, "runs a caller's function, who tells the cache by omni_core_bump"),
    "execute_model": (Heard.NEED_NOT, "runs a step; adapters that it reads: test_changed_adapters.py"),
    "sample_tokens": (Heard.NEED_NOT, "ends a step"),
    "supports_draft_weight_updates": (Heard.NEED_NOT, "answers a question"),
    "compute_weight_checksums": (Heard.NEED_NOT, "reads the weights"),
    "init_weight_transfer_engine": (Heard.NEED_NOT, "connects to a trainer, and takes nothing from it yet"),
    "shutdown_weight_transfer_engine": (Heard.NEED_NOT, "ends that; refused in the middle of an update"),
    "list_loras": (Heard.NEED_NOT, "answers a question"),
    "pin_lora": (Heard.NEED_NOT, "keeps an adapter that is loaded"),
    "checkpoint_prepare": (Heard.NEED_NOT, "gives connections between ranks up"),
    "checkpoint_restore": (Heard.NEED_NOT, "makes them again"),
    "sleep_mode_backend": (Heard.NEED_NOT, "a property: whatever sleep and wake_up go through"),
    "save_sharded_state": (Heard.NEED_NOT, "writes the weights to files"),
    "save_tensorized_model": (Heard.NEED_NOT, "writes the weights to files"),
}


def methods(source, class_name):
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name]
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def to_be_looked_at(names):
    return {name for name in names if not name.startswith("_") and any(word in name for word in WORDS)}


@pytest.fixture(scope="module")
def calls():
    """The public methods of vLLM's workers whose names have to do with weights."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    package = Path(spec.submodule_search_locations[0])
    return {
        name
        for module, class_name in WORKERS.items()
        for name in to_be_looked_at(methods((package / module).read_text(), class_name))
    }


def test_every_call_whose_name_speaks_of_weights_was_looked_at(calls):
    assert calls - CALLS.keys() == set(), "does it change weights? If so, override it in ChangedWeightsMixin"


def test_the_calls_that_change_weights_are_the_ones_that_tell_the_cache():
    overridden = {name for name, (heard, _) in CALLS.items() if heard is Heard.OVERRIDDEN}
    assert overridden == {name for name in vars(ChangedWeightsMixin) if not name.startswith("_") and name in CALLS}
    assert overridden <= {fact.name for fact in CHANGED_WEIGHTS if fact.kind is FactKind.CALL}


def test_a_new_call_would_be_found():
    source = "class Worker:\n def quantize_weights(self): ...\n def _zero_weights(self): ...\n def rank(self): ..."
    assert to_be_looked_at(methods(source, "Worker")) == {"quantize_weights"}
