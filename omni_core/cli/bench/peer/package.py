# SPDX-License-Identifier: Apache-2.0
"""Loads the peer's prefix cache alone: its parent packages, which need vLLM and more, are stubs while it is imported.

Its asynchronous mode needs CUDA streams and events and pinned memory. Here each stands for something that is done at
once: on the CPU a copy has happened when it was asked for. So its committer thread, its queues and its waits are its
own, and no figure contains a device.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch

_PACKAGE = "vllm_omni.core.prefix_cache"
_STUBS = ("vllm_omni", "vllm_omni.core")


class ImmediateEvent:
    """In place of a CUDA event: whatever it was recorded after is done."""

    def record(self, stream: object = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class ImmediateStream:
    """In place of a CUDA stream, and of the context manager that makes one current: work is done when it is asked for.

    Usable as `torch.cuda.Stream()` and as `torch.cuda.stream(stream)`.
    """

    def __init__(self, stream: object = None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait_event(self, event: ImmediateEvent) -> None:
        """The event has happened."""


class PeerPackage:
    """The peer's modules, imported once and kept out of `sys.modules`."""

    def __init__(self, folder: Path) -> None:
        """Import them from where they were installed.

        Raises:
            ImportError: the folder holds no such package.
        """
        with _stubbed_parents(folder):
            self._package = importlib.import_module(_PACKAGE)
            controller = importlib.import_module(f"{_PACKAGE}.controller")
            manager = importlib.import_module(f"{_PACKAGE}.manager")
        # It warns at every step that is short of room, which would be timed with the step.
        logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
        for module in (controller, manager):
            vars(module)["torch"] = _torch_that_is_immediate()

    @property
    def exported(self) -> Any:
        """The package, with the names it exports."""
        return self._package


@contextmanager
def _stubbed_parents(folder: Path) -> Iterator[None]:
    """While inside, the package's parents are empty modules; afterwards `sys.modules` is as it was."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _STUBS[0]}
    for name in before:
        del sys.modules[name]
    try:
        for name in _STUBS:
            stub = ModuleType(name)
            stub.__path__ = [str(folder.joinpath(*name.split(".")))]
            sys.modules[name] = stub
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _STUBS[0]]:
            del sys.modules[name]
        sys.modules.update(before)


def _torch_that_is_immediate() -> ModuleType:
    """What the peer's modules see as `torch`: the real one, but for the three things above."""

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)

    immediate = ModuleType("cuda")
    vars(immediate).update(
        Event=ImmediateEvent, Stream=ImmediateStream, stream=ImmediateStream, is_available=lambda: False
    )
    seen = ModuleType("torch")
    vars(seen).update(vars(torch))
    vars(seen).update(cuda=immediate, empty=empty)
    return seen
