# SPDX-License-Identifier: Apache-2.0
"""The independent tap: keeps every row each forward really computed, to hold delivered rows against.

It shares no code and no memory with the cache. It does not know about blocks, slots or hits: it reads what the runner
fed to the model (token ids, positions, where each request's rows begin, which adapter and which pictures), and files
each row under a digest of all that up to its position. Rows of draft tokens are filed under the drafts that were fed.
It works the same on an engine without our cache. For demonstrations and tests: it keeps everything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.tapped_request import Digest, TappedRequest, prefix_digests
from omni_core.integrations.vllm.versions import STAGE_OUTPUTS_METHOD, stage_outputs_model
from omni_core.prefix_cache.config import HIDDEN_KEY

_LOG = logging.getLogger(__name__)


Batch = tuple[list[str], list[int], list[int], list[int]]
"""A forward's requests, where each one's rows begin and the last one's end, and of each row its token and position."""


class ForwardTap:
    """Rows by (token-prefix digest, position, key). Written by the engine thread; read it while no step runs."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Digest, int, str], list[torch.Tensor]] = {}
        self._requests: dict[str, TappedRequest] = {}
        self.num_forwards = 0
        """Real forwards seen; profile and dummy runs are not among them."""
        self._paused = False
        self.failure: str | None = None
        """Why the tap stopped, if it did: the engine goes on without it."""

    @property
    def requests(self) -> Mapping[str, TappedRequest]:
        """Every request seen, by the engine's internal id, in the order they started."""
        return self._requests

    @property
    def keys(self) -> frozenset[str]:
        """The keys rows were kept under."""
        return frozenset(key for _, _, key in self._rows)

    def computed_tokens(self, req_id: str) -> int:
        """How many rows the engine computed for a request: what vLLM alone would have given."""
        return self._requests[req_id].computed_tokens

    def rows(self, digest: Digest, position: int, key: str = HIDDEN_KEY) -> list[torch.Tensor]:
        """The bitwise different rows computed for one prefix; empty if none ever was."""
        return list(self._rows.get((digest, position, key), ()))

    def rows_for(self, token_ids: Sequence[int], position: int, key: str = HIDDEN_KEY) -> list[torch.Tensor]:
        """As `rows`, for the prefix `token_ids[: position + 1]`."""
        return self.rows(prefix_digests(token_ids[: position + 1])[position], position, key)

    def contains(self, token_ids: Sequence[int], position: int, row: torch.Tensor, key: str = HIDDEN_KEY) -> bool:
        """Whether a forward computed exactly this row, bit for bit, for the prefix `token_ids[: position + 1]`."""
        return any(_same_bits(row, known) for known in self.rows_for(token_ids, position, key))

    def equal_rows(
        self, token_ids: Sequence[int], rows: torch.Tensor, key: str = HIDDEN_KEY, first_position: int = 0
    ) -> npt.NDArray[np.bool_]:
        """`(len(rows),)`: `contains` for each of the rows at `first_position`, `first_position + 1`, and so on."""
        return self.equal_rows_at(prefix_digests(token_ids[: first_position + len(rows)]), rows, key, first_position)

    def equal_rows_at(
        self, digests: Sequence[Digest], rows: torch.Tensor, key: str = HIDDEN_KEY, first_position: int = 0
    ) -> npt.NDArray[np.bool_]:
        """As `equal_rows` for digests known already: those of a tapped request, whatever it was computed with."""
        verdicts = [
            any(_same_bits(row, known) for known in self.rows(digests[position], position, key))
            for position, row in enumerate(rows, start=first_position)
        ]
        return np.asarray(verdicts, dtype=np.bool_)

    def guarded(self, action: Callable[[], None]) -> None:
        """Do something for the tap. Its first error ends the tap, and never the engine's step."""
        if self.failure is None and not self._paused:
            try:
                action()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                _LOG.exception("the tap stops here; rows of later forwards are unknown to it")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this is entered nothing is seen."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def forget(self) -> None:
        """Drop every row and request, so that a long run does not grow. While no request runs and nothing is cached."""
        self._rows.clear()
        self._requests.clear()

    def step_begins(self, scheduler_output: Any) -> None:
        """Meet the step's new requests. Before the forward."""
        for new in scheduler_output.scheduled_new_reqs:
            # The second model runner is told of a request that was preempted as if it were new.
            if new.req_id not in self._requests or not _comes_back(new):
                self._requests[new.req_id] = TappedRequest.announced(new)

    def forward_done(self, runner: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the rows of the forward that has just run. Before its outputs are used up by `sample_tokens`."""
        state = runner.execute_model_state
        # The second model runner leaves its batch in the state; the first keeps it.
        req_ids, bounds, fed, positions = _batch_of_v2(state) if hasattr(state, "input_batch") else _batch_of_v1(runner)
        num_tokens = bounds[-1]
        owners: list[tuple[Digest, int]] = []
        for req_id, first, stop in zip(req_ids, bounds, bounds[1:], strict=False):
            request = self._requests[req_id]
            request.computed_tokens += stop - first
            for token_id, position in zip(fed[first:stop], positions[first:stop], strict=True):
                request.learn(position, UNKNOWN_TOKEN_ID if position in request.embeddings else token_id)
                owners.append((request.digests[position], position))
        num_padded = state.hidden_states.shape[0]
        tensors = {HIDDEN_KEY: state.hidden_states, **dict(_flat(outputs))}
        for key, value in tensors.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] in (num_tokens, num_padded):
                self._keep(key, owners, _copied(value[:num_tokens]))
        self.num_forwards += 1

    def _keep(self, key: str, owners: Iterable[tuple[Digest, int]], rows: torch.Tensor) -> None:
        for (digest, position), row in zip(owners, rows, strict=True):
            known = self._rows.setdefault((digest, position, key), [])
            if not any(_same_bits(row, one) for one in known):
                known.append(row)


def install_tap(runner: Any, *, layers: Iterable[int] = ()) -> ForwardTap:
    """Put a tap on a runner. Engine thread, before the first request; works with and without our cache's hooks.

    Args:
        runner: the model runner.
        layers: the decoder layers whose outputs its forwards return.
    """
    tap = ForwardTap()
    model = stage_outputs_model(runner.get_model())
    layer_names = [f"hidden_states.layer_{layer}" for layer in sorted(layers)]
    last: list[Mapping[str, Any]] = []
    if model is not None:
        # A model hands its outputs out once per forward, and the cache may have taken them first.
        setattr(model, STAGE_OUTPUTS_METHOD, _remembering(model.take_stage_outputs, last))

    def look() -> None:
        if model is not None and not last:
            model.take_stage_outputs()
        outputs = last[0] if last else {}
        tap.forward_done(runner, {**outputs, **_layer_outputs(runner, layer_names)})

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return type(runner).execute_model(runner, scheduler_output, *args, **kwargs)
        tap.guarded(lambda: tap.step_begins(scheduler_output))
        last.clear()
        result = type(runner).execute_model(runner, scheduler_output, *args, **kwargs)
        if runner.execute_model_state is not None:
            tap.guarded(look)
        return result

    runner.execute_model = execute_model
    return tap


def _batch_of_v1(runner: Any) -> Batch:
    req_ids = list(runner.input_batch.req_ids)
    bounds = runner.query_start_loc.np[: len(req_ids) + 1].tolist()
    return req_ids, bounds, runner.input_ids.gpu[: bounds[-1]].tolist(), runner.positions[: bounds[-1]].tolist()


def _batch_of_v2(state: Any) -> Batch:
    batch = state.input_batch
    bounds = batch.query_start_loc_np[: len(batch.req_ids) + 1].tolist()
    return list(batch.req_ids), bounds, batch.input_ids[: bounds[-1]].tolist(), batch.positions[: bounds[-1]].tolist()


def _comes_back(new: Any) -> bool:
    return new.prefill_token_ids is not None and len(new.prefill_token_ids) > len(new.prompt_token_ids or ())


def _layer_outputs(runner: Any, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    return dict(zip(names, runner.execute_model_state.aux_hidden_states, strict=True)) if names else {}


def _remembering(
    take: Callable[[], Mapping[str, Any]], last: list[Mapping[str, Any]]
) -> Callable[[], Mapping[str, Any]]:
    def take_and_remember() -> Mapping[str, Any]:
        last[:] = [take()]
        return last[0]

    return take_and_remember


def _flat(outputs: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _copied(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().cpu().clone(memory_format=torch.contiguous_format)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_bytes_of(left), _bytes_of(right))


def _bytes_of(row: torch.Tensor) -> torch.Tensor:
    return row.contiguous().reshape(-1).view(torch.uint8)
