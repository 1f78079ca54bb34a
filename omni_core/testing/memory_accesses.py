# SPDX-License-Identifier: Apache-2.0
"""Which bytes each torch operation of a thread reads and writes, told before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_core.backend.observer import ByteRange

_LOOK_ONLY_AT_SHAPES = ("aten::empty_like", "aten::full_like", "aten::ones_like", "aten::zeros_like", "aten::new_")
"""Operations whose tensor arguments say what to make; their bytes are not read."""


@dataclass(frozen=True, slots=True)
class TorchAccess:
    """One torch operation about to run."""

    operation: str
    """Such as `aten::index_copy_`."""
    reads: Sequence[ByteRange]
    writes: Sequence[ByteRange]


class AccessListener(Protocol):
    """Hears of every torch operation of the threads it listens to."""

    def torch_runs(self, access: TorchAccess) -> None:
        """An operation is about to run on the calling thread. Raise to keep it from running."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """What an operation does to its arguments."""

    reads: bool
    writes_at: frozenset[int]
    writes_named: frozenset[str]


class AccessWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is untyped
    """Entered on a thread, tells a listener of each of its operations. Views move no byte and have no ranges.

    What numpy reads or writes through shared memory is not seen.
    """

    _signatures: dict[Any, _Signature] = {}  # noqa: RUF012  one cache for all: signatures never change

    def __init__(self, listener: AccessListener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener = listener

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = self._signatures.get(func)
        if signature is None:
            signature = self._signatures[func] = _signature_of(func)
        reads: list[ByteRange] = []
        writes: list[ByteRange] = []
        for position, value in enumerate(args):
            target = writes if position in signature.writes_at else reads
            target.extend(map(ByteRange.of, _tensors_in(value)))
        for name, value in kwargs.items():
            target = writes if name in signature.writes_named else reads
            target.extend(map(ByteRange.of, _tensors_in(value)))
        self._listener.torch_runs(TorchAccess(func.name(), reads if signature.reads else (), writes))
        return func(*args, **kwargs)


def _signature_of(func: Any) -> _Signature:
    schema = func._schema
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    is_view = not any(written) and any(result.alias_info is not None for result in schema.returns)
    return _Signature(
        reads=not is_view and not func.name().startswith(_LOOK_ONLY_AT_SHAPES),
        writes_at=frozenset(at for at, is_written in enumerate(written) if is_written),
        writes_named=frozenset(
            argument.name for argument, is_written in zip(schema.arguments, written, strict=True) if is_written
        ),
    )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
