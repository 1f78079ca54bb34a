# SPDX-License-Identifier: Apache-2.0
"""The smallest whole backend, the third-party one whose copies are done when the call returns, passes the suite too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from omni_core.backend import DeviceBackend
from omni_core.backend.conformance import BackendConformance
from omni_core.runtime import Runtime

TOY = Path(__file__).parents[1] / "fixtures/third_party/omni_core_toy/omni_core_toy/__init__.py"


def toy_backend(runtime: Runtime) -> DeviceBackend:
    """Not installed here; the packaging tests do that."""
    spec = importlib.util.spec_from_file_location("omni_core_toy", TOY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ToyBackend(runtime)


class TestToy(BackendConformance):
    backend_name = "toy"

    def make_backend(self, runtime: Runtime) -> DeviceBackend:
        return toy_backend(runtime)

    def skip_reason(self) -> None:
        return None
