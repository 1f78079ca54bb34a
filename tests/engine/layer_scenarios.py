# SPDX-License-Identifier: Apache-2.0
"""Runs one scenario of chosen layers in this process, and writes what was seen.

    python layer_scenarios.py SCENARIO RESULT.json

Run by the tests in a process of its own, because importing vllm changes torch for the whole process.
"""

import copy
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
import torch
from engine_workload import Engine
from safetensors.torch import load_file
from tiny_model import VOCAB_SIZE, save_tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig

from omni_core.integrations.vllm.rpc.stage_client import flush_stage
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.settings.errors import SettingsError

LAYERS = [0, 1, 2]  # of a model with two decoder layers
KEYS = {layer: f"hidden_states.layer_{layer}" for layer in LAYERS}
OPTIONS = {"block_size": 32, "num_blocks": 60}


def save_llama(directory: Path) -> str:
    """The tiny model without its second output."""
    model = save_tiny_model(directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    return model


def two_waves() -> list[dict[str, list[int]]]:
    """Prompts with one long prefix: the first wave hits it in the step that computes it, the second one when stored."""
    source = random.Random(3)
    system = [source.randrange(2, VOCAB_SIZE) for _ in range(100)]
    return [
        {f"{name}-{i}": system + [source.randrange(2, VOCAB_SIZE) for _ in range(20 + 7 * i)] for i in range(4)}
        for name in ("first", "second")
    ]


class Reference:
    """Transformers' hidden states of the same weights."""

    def __init__(self, model: str):
        self._network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self._before_norm: list[torch.Tensor] = []
        self._network.model.norm.register_forward_pre_hook(lambda _, inputs: self._before_norm.append(inputs[0]))

    def layers(self, tokens: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Each layer's rows, the last layer's before the final norm; and the rows behind that norm."""
        self._before_norm.clear()
        with torch.inference_mode():
            states = self._network(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        by_layer = {layer: state[0] for layer, state in enumerate(states)}
        return by_layer | {len(states) - 1: self._before_norm[0][0]}, states[-1][0]


def relative_error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of a row, relative to the row's largest element."""
    scale = reference.abs().amax(dim=1).clamp_min(1e-9)
    return float(((rows - reference).abs().amax(dim=1) / scale).max())


def stored_rows(engine: Engine) -> dict:
    flush_stage(engine.llm)
    return {name: engine.session.sink.requests_of_client(name)[0] for name in engine.requests}


def layers(model: str, **options) -> dict:
    """Two waves with every layer; rows against the tap of the same run and against transformers."""
    with Engine(model, cache=True, settings={"layers": LAYERS}, **OPTIONS, **options) as engine:
        for wave in two_waves():
            engine.wave(wave)
        stored = stored_rows(engine)
        tap, reference, requests = engine.session.tap, Reference(model), {}
        for name, request in engine.requests.items():
            kept = stored[name]
            tokens = request.tokens[:-1]
            by_layer, normed = reference.layers(tokens)
            requests[name] = {
                "prompt_tokens": len(request.prompt),
                "fed_tokens": len(tokens),
                "skipped": tap.requests[kept.req_id].skipped_tokens,
                "complete": kept.complete,
                "tokens_agree": kept.token_ids.tolist() == tokens,
                "positions_agree": kept.positions.tolist() == list(range(len(tokens))),
                "rows": {key: list(rows.shape) for key, rows in kept.rows.items()},
                "equal_to_tap": {key: int(tap.equal_rows(tokens, rows, key).sum()) for key, rows in kept.rows.items()},
                "embeddings_equal": torch.equal(kept.rows[KEYS[0]], by_layer[0]),
                "off_reference": {
                    **{KEYS[layer]: relative_error(kept.rows[KEYS[layer]], by_layer[layer]) for layer in LAYERS},
                    HIDDEN_KEY: relative_error(kept.hidden_states, normed),
                },
                "last_layer_against_normed": relative_error(kept.rows[KEYS[2]], normed),
            }
        return {
            "requests": requests,
            "rows_hit": engine.history.rows_hit,
            "tap_keys": sorted(tap.keys),
            "report": engine.session.report(),
            "compile_cache_keys": compile_cache_keys(engine.llm.llm_engine.vllm_config),
        }


def compiled(model: str) -> dict:
    """The same with a compiled forward."""
    return layers(model, enforce_eager=False)


def compile_cache_keys(config: VllmConfig) -> dict[str, str]:
    """vLLM's key as the engine ran, without the setting, and with other layers."""
    section = dict(config.additional_config["omni_core"])
    keys = {"layers": config.compute_hash()}
    chosen = section.pop("layers")
    variants = {"no setting": section, "other layers": section | {"layers": chosen[:1]}}
    for name, other in variants.items():
        changed = copy.copy(config)
        changed.additional_config = {"omni_core": other}
        keys[name] = changed.compute_hash()
    return keys


def refused(model: str) -> dict:
    """Settings and models that cannot give layers, each with the text of its refusal."""
    with tempfile.TemporaryDirectory() as other:
        config = GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=512, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
        )
        GPT2LMHeadModel(config).save_pretrained(other)
        cases = {
            "out of range": (model, [1, 3], {}),
            "speculation with layers of its own": (model, [1], {"speculative_config": extracting(LAYERS)}),
            "no interface": (other, [1], {}),
        }
        return {name: refusal(*case) for name, case in cases.items()}


def refusal(model: str, chosen: list[int], options: dict) -> str | None:
    try:
        Engine(model, cache=True, settings={"layers": chosen}, **OPTIONS, **options)
    except SettingsError as error:
        return str(error)
    return None


def extracted(model: str) -> dict:
    """The same waves through vLLM's own `extract_hidden_states`; its rows of prompt tokens against ours."""
    waves = two_waves()
    with Engine(model, cache=True, settings={"layers": LAYERS}, **OPTIONS) as engine:
        for wave in waves:
            engine.wave(wave, max_tokens=1)
        ours = stored_rows(engine)
    with tempfile.TemporaryDirectory() as directory, copies_without_an_accelerator():
        theirs = rows_vllm_extracts(model, directory, waves)
    compared = {}
    for name, kept in ours.items():
        token_ids, rows = theirs[name]
        compared[name] = {
            "tokens_agree": kept.token_ids.tolist() == token_ids.tolist(),
            "equal_rows": {
                key: int((kept.rows[key] == rows[:, place]).all(dim=1).sum()) for place, key in enumerate(KEYS.values())
            },
            "prompt_tokens": kept.num_rows,
        }
    return compared


def rows_vllm_extracts(model: str, directory: str, waves: list[dict]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per request its token ids `(n,)` and `(n, layers, hidden_size)` rows, from the files vLLM's connector writes."""
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        block_size=OPTIONS["block_size"],
        num_gpu_blocks_override=200,
        speculative_config=extracting(LAYERS),
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": directory},
        },
    )
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    files = {}
    for wave in waves:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in wave.values()], params)
        for name, answer in zip(wave, answers, strict=True):
            files[name] = answer.kv_transfer_params["hidden_states_path"]
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)  # a request's end is told with the next step
    llm.llm_engine.engine_core.shutdown()
    return {name: (load_file(path)["token_ids"], load_file(path)["hidden_states"]) for name, path in files.items()}


@contextmanager
def copies_without_an_accelerator() -> Iterator[None]:
    """vLLM's connector asks for pinned memory and for an event that can be queried; its CPU stand-ins have neither."""
    empty_like, event = torch.empty_like, torch.cuda.Event

    class CompletedEvent(event):
        def query(self) -> bool:
            return True

    torch.empty_like = lambda *args, pin_memory=False, **options: empty_like(*args, **options)
    torch.cuda.Event = CompletedEvent
    try:
        yield
    finally:
        torch.empty_like, torch.cuda.Event = empty_like, event


def extracting(chosen: list[int]) -> dict:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": chosen}},
    }


SCENARIOS = {"layers": layers, "compiled": compiled, "refused": refused, "extracted": extracted}

if __name__ == "__main__":
    exact_rows.make_rows_exact()
    with tempfile.TemporaryDirectory() as directory:
        outcome = SCENARIOS[sys.argv[1]](save_llama(Path(directory)))
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
