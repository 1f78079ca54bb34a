# SPDX-License-Identifier: Apache-2.0
"""The only place, with `runners/`, that knows where a vLLM version keeps things. Which ones: `engine_releases.py`.

The other modules of this package use plain attribute access on the names that `engine_contract.py` lists; whatever has
to be looked for, differs between versions, or reaches through several of vLLM's objects, stands here, one function per
fact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.errors import StageNotFoundError
from omni_core.integrations.vllm.releases.installed_engine import engine_version
from omni_core.settings.errors import SettingsError

STAGE_OUTPUTS_METHOD = "take_stage_outputs"
"""The method under which a model hands out what it computed beside its hidden state."""


_KINDS = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SinkFullAttentionSpec": "sink_full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local_attention",
    "MambaSpec": "mamba",
    "EncoderOnlyAttentionSpec": "encoder_only_attention",
    "CrossAttentionSpec": "cross_attention",
}
"""vLLM's later words for the classes of 0.18."""
_UNKNOWN_KIND = "unknown"


class StageOutputsModel(Protocol):
    """A model with outputs beside its hidden state."""

    def take_stage_outputs(self) -> Mapping[str, Any]:
        """The further outputs of the last forward. Called once after each forward of a real step, on the engine thread.

        A tensor with one row per token (padding rows at the end may be left out) is stored and joined like the hidden
        state; a list with one element per request of the batch gives each request its element; anything else is handed
        whole to every request of the step. The latter two are not stored: of a step whose delivery was put off they do
        not come later, as rows do. Profile and dummy runs also forward, and nothing is taken after them: keep
        the last forward's outputs only. Set them outside of a compiled region.
        """
        ...


def adopt_engine_logging() -> None:
    """Let records of `omni_core` loggers reach vLLM's handlers at vLLM's level.

    vLLM configures its own logger only; without this, everything below a warning would be lost.
    """
    logging.getLogger("omni_core").parent = logging.getLogger("vllm")


def is_output_rank() -> bool:
    """Whether the engine uses this rank's outputs: last pipeline rank, tensor- and context-parallel rank 0.

    `MultiprocExecutor._get_output_rank` names the same rank. To be asked once the distributed groups exist.
    """
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    return bool(
        get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0 and get_pcp_group().rank_in_group == 0
    )


def is_last_pipeline_rank() -> bool:
    """Whether this rank computes the model's last layers. To be asked once the distributed groups exist."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


def carry_layers_over_pipeline(model: Any, named: str) -> None:
    """Let a later pipeline rank's buffers take the layers that earlier ranks send. After the layers were set.

    vLLM does so from 0.30 on, for its second model runner only (`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`); the
    buffers are the same ones.

    Raises:
        SettingsError: neither this vLLM nor the model sends layers from one pipeline rank to the next; `named` begins
            its text.
    """
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
            reserve_aux_intermediate_tensor_slots,
            verify_supports_aux_hidden_states_over_pp,
        )
    except ImportError:
        raise SettingsError(
            f"{named}: vLLM {engine_version()} does not send layers from one pipeline rank to the next (0.30 does); "
            "use pipeline_parallel_size=1, or leave layers out"
        ) from None
    try:
        verify_supports_aux_hidden_states_over_pp(model, "captured layers")
    except ValueError as error:
        raise SettingsError(f"{named}: {error}; use pipeline_parallel_size=1, or leave layers out") from None
    reserve_aux_intermediate_tensor_slots(model)


def attention_group_kinds(kv_cache_config: Any) -> tuple[str, ...]:
    """The kind of each KV-cache group, such as `full_attention`, in vLLM's own words."""
    from vllm.v1 import kv_cache_interface

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not hasattr(kv_cache_interface, "get_kv_cache_spec_kind"):
        return tuple(map(kind_by_class, specs))
    return tuple(str(kv_cache_interface.get_kv_cache_spec_kind(spec).value) for spec in specs)


def kind_by_class(spec: Any) -> str:
    """The kind of a KV-cache group where vLLM has no words for it (0.18): by its spec's class, or one it extends.

    A group of several layers' specs (`UniformTypeKVCacheSpecs`) is of their kind, if they have the same one.
    """
    if hasattr(spec, "kv_cache_specs"):
        kinds = set(map(kind_by_class, spec.kv_cache_specs.values()))
        return kinds.pop() if len(kinds) == 1 else _UNKNOWN_KIND
    return next((_KINDS[base.__name__] for base in type(spec).__mro__ if base.__name__ in _KINDS), _UNKNOWN_KIND)


def prefix_replay_tokens(kv_cache_config: Any) -> int:
    """Tokens of a hit that the engine computes again, the most of all groups. Before vLLM 0.31 none did."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return max((int(spec.prefix_replay_tokens) for spec in specs if hasattr(spec, "prefix_replay_tokens")), default=0)


def hit_alignment_tokens(kv_cache_config: Any, vllm_config: Any) -> int:
    """What every hit is a whole number of, in tokens; never more than what the scheduler goes by.

    vLLM 0.32 tells its workers. Before, a hit may end inside the blocks of a stage with a Mamba group, and whether it
    does is the scheduler's own knowledge: then this is the finest it could be.
    """
    if hasattr(kv_cache_config, "cache_hit_alignment_tokens") and kv_cache_config.cache_hit_alignment_tokens:
        return int(kv_cache_config.cache_hit_alignment_tokens)
    sizes = [int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups]
    # Before 0.27 nothing sets the unit.
    cache_config = vllm_config.cache_config
    if "mamba" in attention_group_kinds(kv_cache_config) and hasattr(cache_config, "prefix_match_unit"):
        unit = cache_config.prefix_match_unit
        return math.gcd(*sizes) if unit is None else int(unit)
    return math.lcm(*sizes)


def drops_block_of_hits(vllm_config: Any) -> bool:
    """Whether hits lose their last block to speculation. Before vLLM 0.30 no setting turns that off."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    drops = speculative.use_eagle_block_drop if hasattr(speculative, "use_eagle_block_drop") else speculative.use_eagle
    return bool(drops())


def verifies_adaptively(vllm_config: Any) -> bool:
    """Whether the runner chooses on the device which drafts to verify. Before vLLM 0.28 none did."""
    speculative = vllm_config.speculative_config
    return hasattr(speculative, "enable_adaptive_verification") and bool(speculative.enable_adaptive_verification)


def decodes_by_diffusion(vllm_config: Any) -> bool:
    """Whether the model's tokens come by diffusion. vLLM 0.18 has no such models."""
    model = vllm_config.model_config
    return hasattr(model, "is_diffusion") and bool(model.is_diffusion)


def request_ids_are_randomised() -> bool:
    """Whether this engine appends random digits to a client's request id."""
    from vllm import envs

    return not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION


def stage_outputs_model(model: Any) -> StageOutputsModel | None:
    """The model, if it hands out further outputs. Looked up once, at load."""
    if callable(getattr(model, STAGE_OUTPUTS_METHOD, None)):
        return cast("StageOutputsModel", model)
    return None


def engine_stop_rule() -> Callable[[Any, int], bool]:
    """The scheduler's rule for the end of a request; which token ends one differs between releases."""
    from vllm.v1.core.sched.utils import check_stop

    return cast("Callable[[Any, int], bool]", check_stop)


def prompt_token_ids(new: Any) -> Sequence[int]:
    """The prompt of a request scheduled for the first time; `UNKNOWN_TOKEN_ID` where it was given as embeddings."""
    if new.prompt_embeds is None:
        return cast("Sequence[int]", new.prompt_token_ids)
    is_token_ids = prompt_is_token_ids(new)
    if new.prompt_token_ids is None or is_token_ids is None:
        return [UNKNOWN_TOKEN_ID] * len(new.prompt_embeds)
    known = zip(new.prompt_token_ids, is_token_ids, strict=True)
    return [token_id if is_token else UNKNOWN_TOKEN_ID for token_id, is_token in known]


def prompt_is_token_ids(new: Any) -> Sequence[bool] | None:
    """Which positions of a prompt with embeddings are tokens; `None`: none of them. vLLM 0.18 does not mix them."""
    return cast("Sequence[bool] | None", new.prompt_is_token_ids) if hasattr(new, "prompt_is_token_ids") else None


def draft_groups(kv_cache_config: Any) -> list[bool]:
    """Which KV-cache groups hold layers of a draft model, as far as vLLM says: 0.18 does not."""
    groups = kv_cache_config.kv_cache_groups
    return [bool(group.is_eagle_group) if hasattr(group, "is_eagle_group") else False for group in groups]


def block_copies(scheduler_output: Any) -> Sequence[Any]:
    """The copies between KV blocks that a step begins with. Before vLLM 0.27 there are none."""
    if not hasattr(scheduler_output, "kv_cache_block_copies"):
        return ()
    return cast("Sequence[Any]", scheduler_output.kv_cache_block_copies or ())


def in_process_worker(llm: Any) -> Any:
    """The worker of an `LLM` whose engine runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).

    Raises:
        StageNotFoundError: the engine or its worker runs in another process.
    """
    engine_core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    executor = getattr(engine_core, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    worker = getattr(wrapper, "worker", None)
    if worker is None:
        raise StageNotFoundError(
            "the engine's worker is not in this process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported, "
            'or ask with llm.collective_rpc("omni_core_report")'
        )
    return worker


def unfinished_request_ids(llm: Any) -> list[str]:
    """Internal ids of the requests that an `LLM` has not finished."""
    return list(llm.llm_engine.output_processor.request_states)


async def collective_rpc_of_every_engine(engine: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Call a method of every worker of an `AsyncLLM`, on every data-parallel engine; the answers in one list.

    `AsyncLLM.collective_rpc` also calls them all, but `DPLBAsyncMPClient.call_utility_async` returns the first engine's
    answers only. The call that returns all came with vLLM 0.32; on older ones the engines are asked one after another.
    """
    client = engine.engine_core
    call: tuple[Any, ...] = ("collective_rpc", method, None, args, {})
    if hasattr(client, "call_utility_all_async"):
        answers = await client.call_utility_all_async(*call)
    else:
        answers = [await client._call_utility_async(*call, engine=one) for one in client.core_engines]
    return [answer for of_engine in answers for answer in of_engine]
