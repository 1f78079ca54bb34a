# SPDX-License-Identifier: Apache-2.0
"""Counts what a piece of code does, in things that do not depend on the machine: calls, torch operations, locks."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, ModuleType

import torch
from controlled_runtime import ControlledRuntime, TrackedCondition
from torch.utils._python_dispatch import TorchDispatchMode

_INLINED_LATER = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
"""Comprehensions are frames of their own before Python 3.12 only."""
_DISPATCHER_FILES = (__file__, torch._compile.__file__, *torch._library.__path__)
"""While torch operations are counted, indexing a tensor calls Python code of the dispatcher and of the counter."""


@dataclass
class CallCounts:
    """Calls made by the code of some packages. What a library does inside when it is called is not counted."""

    python: int = 0
    """Calls of Python functions, resumptions of generators included."""
    c: int = 0
    """Calls of functions and methods written in C."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The collector does not run inside the block.

    Where it would run depends on what the process allocated before. Inside a counted block its callbacks and finalizers
    would count as calls of the code it interrupts; hypothesis, once it has run, leaves such a callback behind.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def calls_made_by(*packages: ModuleType) -> Iterator[CallCounts]:
    """Count the calls that the calling thread makes from, or into, the code of `packages` inside the block."""
    with no_garbage_collection(), profiled_calls(*packages) as counts:
        yield counts


@contextmanager
def profiled_calls(*packages: ModuleType) -> Iterator[CallCounts]:
    """As `calls_made_by`, for a block that outlives a measurement: whoever measures keeps the collector away."""
    roots = tuple(path for package in packages for path in package.__path__)
    known: dict[CodeType, bool] = {}

    def is_ours(code: CodeType) -> bool:
        if code not in known:
            known[code] = code.co_filename.startswith(roots)
        return known[code]

    def is_counted(code: CodeType) -> bool:
        return code.co_name not in _INLINED_LATER and not code.co_filename.startswith(_DISPATCHER_FILES)

    counts = CallCounts()
    inside_c: list[FrameType] = []

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            counts.c += is_ours(frame.f_code)
            inside_c.append(frame)
        elif event in ("c_return", "c_exception"):
            del inside_c[-1:]
        elif event == "call" and is_counted(frame.f_code):
            caller = frame.f_back
            called_by_c = bool(inside_c) and inside_c[-1] is caller
            called_by_us = caller is not None and is_ours(caller.f_code) and not called_by_c
            counts.python += called_by_us or is_ours(frame.f_code)

    profiled_before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(profiled_before)


@dataclass
class TorchCounts:
    """torch operations of one thread."""

    ops: Counter[str] = field(default_factory=Counter)
    """Name, such as `aten.copy_`, to how often."""
    new_storages: int = 0
    """Tensors given memory of their own."""

    @property
    def total(self) -> int:
        return self.ops.total()


class _TorchCounter(TorchDispatchMode):
    def __init__(self, counts: TorchCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = _storages((*args, *(kwargs or {}).values()))
        result = func(*args, **(kwargs or {}))
        self._counts.ops[str(func.overloadpacket)] += 1
        self._counts.new_storages += len(_storages((result,)) - known)
        return result


def _storages(values: Iterable[object]) -> set[int]:
    """Of the tensors among arguments or results of an operation, and in lists among them. Cheap: it runs profiled."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


@contextmanager
def torch_operations() -> Iterator[TorchCounts]:
    """Count the torch operations that the calling thread dispatches inside the block; other threads' are not seen."""
    counts = TorchCounts()
    with _TorchCounter(counts):
        yield counts


@cache
def prepare_torch_counting() -> None:
    """Let torch import what it needs to show its operations: some hundred modules, slow under a profiler."""
    with torch_operations():
        torch.zeros(1)


class WatchedRuntime(ControlledRuntime):
    """Notes every torch operation, wait or further lock of a thread that holds a lock, and counts locks per thread.

    Helper threads are watched from their first line; the test's own thread inside `watched()`.
    """

    def __init__(self) -> None:
        super().__init__(around_thread=self.around_helper)
        self.breaches: list[str] = []
        self._own = threading.local()

    def around_helper(self) -> AbstractContextManager[None]:
        """What is entered on each helper thread, around its work."""
        return self.watched()

    @contextmanager
    def locks_taken(self) -> Iterator[list[str]]:
        """Names of the locks the calling thread takes inside the block, in order."""
        self._own.taken = []
        try:
            yield self._own.taken
        finally:
            del self._own.taken

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calling thread's torch operations inside the block."""
        with _LockWatch(self):
            yield

    def check_no_lock_held(self, what: str, besides: str | None = None) -> None:
        """Note a breach if the calling thread holds a lock other than `besides`."""
        holding = [name for name in getattr(self._own, "held", ()) if name != besides]
        if holding:
            self.breaches.append(f"{threading.current_thread().name}: {what} while holding {', '.join(holding)}")

    def sleep(self, seconds: float) -> None:
        self.check_no_lock_held("sleep")
        super().sleep(seconds)

    def note_taken(self, name: str) -> None:
        self.check_no_lock_held(f"takes lock {name!r}")
        if not hasattr(self._own, "held"):
            self._own.held = []
        self._own.held.append(name)
        if hasattr(self._own, "taken"):
            self._own.taken.append(name)
        super().note_taken(name)

    def note_left(self, name: str) -> None:
        self._own.held.remove(name)
        super().note_left(name)

    def note_waiting(self, thread: str, condition: TrackedCondition) -> None:
        self.check_no_lock_held(f"waits for {condition.name!r}", besides=condition.lock.name)
        super().note_waiting(thread, condition)


class _LockWatch(TorchDispatchMode):
    def __init__(self, runtime: WatchedRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._runtime.check_no_lock_held(str(func))
        return func(*args, **(kwargs or {}))
