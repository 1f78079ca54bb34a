# SPDX-License-Identifier: Apache-2.0
"""The independent tap: keeps every row each forward really computed, to hold delivered rows against.

It shares no code and no memory with the cache. It does not know about blocks, slots or hits: it reads what the runner
fed to the model (token ids, positions, where each request's rows begin, which adapter and which pictures), and files
each row under a digest of all that up to its position. Rows of draft tokens are filed under the drafts that were fed.
It works the same on an engine without our cache. For demonstrations and tests: it keeps everything.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.versions import STAGE_OUTPUTS_METHOD, stage_outputs_model
from omni_core.prefix_cache.config import HIDDEN_KEY

_LOG = logging.getLogger(__name__)

Digest = bytes
"""Digest of a token prefix, its last token included, with the adapter and the pictures it was computed with."""


@dataclass(slots=True)
class TappedRequest:
    """What the engine computed for one request."""

    req_id: str
    num_prompt_tokens: int
    skipped_tokens: int
    """Prompt tokens the engine did not compute because their KV was cached."""
    computed_tokens: int = 0
    """Rows the engine computed: all that vLLM alone would have given for this request."""
    token_ids: list[int] = field(default_factory=list)
    """Every token fed so far, the skipped ones included; of draft tokens those fed last."""
    digests: list[Digest] = field(default_factory=list)
    """Per position."""
    identity: Digest = b""
    """Stands for the adapter; empty for the bare model."""
    pictures: Mapping[int, Digest] = field(default_factory=dict)
    """Position in the prompt → the piece of a picture that stands there."""
    embeddings: Mapping[int, Digest] = field(default_factory=dict)
    """Position in the prompt → the embedding that was given there instead of a token."""
    num_drafts_replaced: int = 0
    """Positions at which another token was fed later than at first: drafts the engine rejected."""

    def learn(self, position: int, token_id: int) -> None:
        """The model was fed `token_id` at `position`.

        Raises:
            ValueError: tokens in between were never seen, or it contradicts the prompt.
        """
        if position > len(self.token_ids):
            raise ValueError(f"request {self.req_id!r}: position {position} after {len(self.token_ids)} tokens")
        if position == len(self.token_ids):
            self.token_ids.append(token_id)
        elif self.token_ids[position] != token_id:
            if position < self.num_prompt_tokens:
                raise ValueError(
                    f"request {self.req_id!r}: token {token_id} at {position}, {self.token_ids[position]} in its prompt"
                )
            self.num_drafts_replaced += 1
            del self.token_ids[position:]
            del self.digests[position:]
            self.token_ids.append(token_id)
        while len(self.digests) < len(self.token_ids):
            at = len(self.digests)
            before = self.digests[-1] if self.digests else self.identity
            before += self.pictures.get(at, b"") + self.embeddings.get(at, b"")
            self.digests.append(_chained(before, self.token_ids[at]))


class ForwardTap:
    """Rows by (token-prefix digest, position, key). Written by the engine thread; read it while no step runs."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Digest, int, str], list[torch.Tensor]] = {}
        self._requests: dict[str, TappedRequest] = {}
        self.num_forwards = 0
        """Real forwards seen; profile and dummy runs are not among them."""
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
        if self.failure is None:
            try:
                action()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                _LOG.exception("the tap stops here; rows of later forwards are unknown to it")

    def forget(self) -> None:
        """Drop every row and request, so that a long run does not grow. While no request runs and nothing is cached."""
        self._rows.clear()
        self._requests.clear()

    def step_begins(self, scheduler_output: Any) -> None:
        """Meet the step's new requests. Before the forward."""
        for new in scheduler_output.scheduled_new_reqs:
            embeddings = _embeddings_of(new)
            prompt = [UNKNOWN_TOKEN_ID] * len(embeddings)
            if new.prompt_token_ids is not None:
                known = enumerate(new.prompt_token_ids)
                prompt = [UNKNOWN_TOKEN_ID if at in embeddings else token_id for at, token_id in known]
            self._requests[new.req_id] = TappedRequest(
                new.req_id,
                len(prompt),
                skipped_tokens=new.num_computed_tokens,
                token_ids=prompt,
                identity=_adapter_of(new.lora_request),
                pictures=_pictures_of(new.mm_features),
                embeddings=embeddings,
            )

    def forward_done(self, runner: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the rows of the forward that has just run. Before its outputs are used up by `sample_tokens`."""
        req_ids = list(runner.input_batch.req_ids)
        bounds = runner.query_start_loc.np[: len(req_ids) + 1].tolist()
        num_tokens = bounds[-1]
        fed = runner.input_ids.gpu[:num_tokens].tolist()
        positions = runner.positions[:num_tokens].tolist()
        owners: list[tuple[Digest, int]] = []
        for req_id, first, stop in zip(req_ids, bounds, bounds[1:], strict=False):
            request = self._requests[req_id]
            request.computed_tokens += stop - first
            for token_id, position in zip(fed[first:stop], positions[first:stop], strict=True):
                request.learn(position, UNKNOWN_TOKEN_ID if position in request.embeddings else token_id)
                owners.append((request.digests[position], position))
        num_padded = runner.execute_model_state.hidden_states.shape[0]
        tensors = {HIDDEN_KEY: runner.execute_model_state.hidden_states, **dict(_flat(outputs))}
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
        tap.guarded(lambda: tap.step_begins(scheduler_output))
        last.clear()
        result = type(runner).execute_model(runner, scheduler_output, *args, **kwargs)
        if runner.execute_model_state is not None:
            tap.guarded(look)
        return result

    runner.execute_model = execute_model
    return tap


def prefix_digests(token_ids: Iterable[int]) -> list[Digest]:
    """The digest of every prefix of `token_ids`, shortest first."""
    digests: list[Digest] = []
    for token_id in token_ids:
        digests.append(_chained(digests[-1] if digests else b"", int(token_id)))
    return digests


def _adapter_of(lora_request: Any) -> Digest:
    if lora_request is None:
        return b""
    name = f"{lora_request.lora_int_id}:{lora_request.lora_name}".encode()
    return hashlib.blake2b(name, digest_size=16).digest()


def _pictures_of(mm_features: Iterable[Any]) -> dict[int, Digest]:
    pictures = {}
    for feature in mm_features or ():
        place = feature.mm_position
        for offset in range(place.length):
            name = f"{feature.identifier}:{offset}".encode()
            pictures[place.offset + offset] = hashlib.blake2b(name, digest_size=16).digest()
    return pictures


def _layer_outputs(runner: Any, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
    return dict(zip(names, runner.execute_model_state.aux_hidden_states, strict=True)) if names else {}


def _embeddings_of(new: Any) -> dict[int, Digest]:
    if new.prompt_embeds is None:
        return {}
    tokens = new.prompt_is_token_ids or [False] * len(new.prompt_embeds)
    rows = new.prompt_embeds.detach().cpu().contiguous()
    return {
        at: hashlib.blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        for at, (row, is_token) in enumerate(zip(rows, tokens, strict=True))
        if not is_token
    }


def _remembering(
    take: Callable[[], Mapping[str, Any]], last: list[Mapping[str, Any]]
) -> Callable[[], Mapping[str, Any]]:
    def take_and_remember() -> Mapping[str, Any]:
        last[:] = [take()]
        return last[0]

    return take_and_remember


def _chained(before: Digest, token_id: int) -> Digest:
    return hashlib.blake2b(before + token_id.to_bytes(8, "little", signed=True), digest_size=16).digest()


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
