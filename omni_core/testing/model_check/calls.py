# SPDX-License-Identifier: Apache-2.0
"""How an author's model is called, as an engine calls it: one forward for several requests, some rows of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch

from omni_core.prefix_cache.errors import OmniPrefixCacheError
from omni_core.prefix_cache.leftovers import tensors_of
from omni_core.prefix_cache.step_inputs import flatten


class AuthoredModelError(Exception):
    """Something is wrong with the model that was given, not with the cache."""


class ModelCallError(AuthoredModelError):
    """The model raised. Names the forward; the model's own exception is the cause."""


class ModelOutputError(AuthoredModelError):
    """The model returned what no stage can take. Names the forward and the value."""


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """One request's share of a forward: the model is to give rows for its positions `[start, len(token_ids))`.

    An engine keeps KV for the positions before `start`. A model in a test may do so, or compute them again.
    """

    req_id: str
    token_ids: torch.Tensor
    """`(stop,)` int64 on the CPU: every token from the request's first to the last one of this forward."""
    start: int
    """The first position that a row is wanted for; smaller than `stop`."""

    @property
    def num_tokens(self) -> int:
        """Rows wanted."""
        return len(self.token_ids) - self.start

    @property
    def input_ids(self) -> torch.Tensor:
        """`(num_tokens,)`: the tokens at the positions rows are wanted for."""
        return self.token_ids[self.start :]

    @property
    def positions(self) -> torch.Tensor:
        """`(num_tokens,)` int64: the positions rows are wanted for."""
        return torch.arange(self.start, len(self.token_ids))

    def __str__(self) -> str:
        return f"{self.req_id!r} [{self.start}, {len(self.token_ids)})"


class StageModel(Protocol):
    """A model as the checks call it; an `nn.Module` with such a `forward` is one.

    It returns hidden states `(num_tokens, hidden_size)` (`None` only if its policy keeps none) and a mapping of further
    outputs by name, which may be nested. The rows of the runs follow each other in the order of `runs`, in every tensor
    that has a row per token. Called on one thread, under `torch.inference_mode()`.
    """

    def __call__(self, runs: Sequence[SequenceRun], /) -> tuple[torch.Tensor | None, Mapping[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class ModelForward:
    """One forward: what was asked and what came."""

    runs: tuple[SequenceRun, ...]
    hidden: torch.Tensor | None
    """`(num_tokens, hidden_size)`."""
    nested: Mapping[str, Any]
    """The further outputs as the model returned them."""
    outputs: Mapping[str, Any]
    """The same by flattened name, such as `codes.audio`."""

    @property
    def num_tokens(self) -> int:
        """Rows asked for."""
        return sum(run.num_tokens for run in self.runs)

    @property
    def row_bytes(self) -> int:
        """Bytes of all further outputs per row asked for, rounded up."""
        tensors = [tensor for value in self.outputs.values() for tensor in tensors_of(value)]
        return -(-sum(tensor.nbytes for tensor in tensors) // self.num_tokens)

    def has_row_per_token(self, name: str) -> bool:
        """Whether that output is a tensor whose first dimension is the forward's token count."""
        value = self.outputs.get(name)
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == self.num_tokens

    def kept(self) -> ModelForward:
        """The forward with tensors of its own: a model may use its buffers again. Lists stay as they are."""
        hidden = None if self.hidden is None else self.hidden.clone()
        outputs = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.outputs.items()
        }
        return ModelForward(self.runs, hidden, self.nested, outputs)

    def rows_of(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """The rows of `runs[index]` in a tensor with a row per token; a view."""
        start = sum(run.num_tokens for run in self.runs[:index])
        return rows[start : start + self.runs[index].num_tokens]


class ModelCaller:
    """Calls a model and refuses what it may not return.

    Args:
        model: the model.
        keeps_hidden: whether its policy keeps hidden rows, so that it must return some.
        watch: shown each forward, at once.
    """

    def __init__(
        self, model: StageModel, *, keeps_hidden: bool, watch: Callable[[ModelForward], None] = lambda forward: None
    ) -> None:
        self._model = model
        self._name = name_of(model)
        self._keeps_hidden = keeps_hidden
        self._watch = watch
        self._num_calls = 0

    def __call__(self, runs: Sequence[SequenceRun]) -> ModelForward:
        """Run one forward of at least one run.

        Raises:
            ModelCallError: the model raised.
            ModelOutputError: it returned something else than hidden states and a mapping, on the CPU.
        """
        self._num_calls += 1
        shown = ", ".join(map(str, runs[:4])) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
        where = f"call {self._num_calls} of {self._name}, for {shown}"
        own_runs = tuple(SequenceRun(run.req_id, run.token_ids.clone(), run.start) for run in runs)
        try:
            with torch.inference_mode():
                returned = self._model(own_runs)
        except Exception as error:
            raise ModelCallError(f"{where}: raised {type(error).__name__}: {error}") from error
        forward = self._understood(where, tuple(runs), returned)
        self._watch(forward)
        return forward

    def _understood(self, where: str, runs: tuple[SequenceRun, ...], returned: Any) -> ModelForward:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ModelOutputError(
                f"{where}: returned {_described(returned)}; return a tuple (hidden states, mapping of further outputs)"
            )
        hidden, nested = returned
        if not isinstance(nested, Mapping):
            raise ModelOutputError(f"{where}: its further outputs are {_described(nested)}; return a mapping by name")
        try:
            outputs = flatten(nested)
        except (OmniPrefixCacheError, TypeError) as error:
            raise ModelOutputError(f"{where}: {error}") from error
        forward = ModelForward(runs, hidden, nested, outputs)
        self._check_hidden(where, hidden, forward.num_tokens)
        for name, value in outputs.items():
            for tensor in tensors_of(value):
                if tensor.device.type != "cpu":
                    raise ModelOutputError(
                        f"{where}: output {name!r} lies on {tensor.device}; the simulated stage runs on the CPU"
                    )
        return forward

    def _check_hidden(self, where: str, hidden: Any, num_tokens: int) -> None:
        if hidden is None:
            if self._keeps_hidden:
                raise ModelOutputError(
                    f"{where}: returned no hidden states; return them, or declare needs_full_hidden_states=False"
                )
            return
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2 or hidden.shape[0] != num_tokens:
            raise ModelOutputError(
                f"{where}: its hidden states are {_described(hidden)}; return a tensor ({num_tokens}, hidden_size), "
                "the rows of the runs one after the other"
            )
        if hidden.device.type != "cpu":
            raise ModelOutputError(
                f"{where}: hidden states lie on {hidden.device}; the simulated stage runs on the CPU"
            )


def name_of(model: object) -> str:
    """What to call a model in a message: a function's name, or its class's."""
    return model.__qualname__ if isinstance(model, FunctionType | MethodType) else type(model).__name__


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
