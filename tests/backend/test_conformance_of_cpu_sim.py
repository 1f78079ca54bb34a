# SPDX-License-Identifier: Apache-2.0
"""cpu_sim passes the suite every backend passes: as registered, and with every simulated cost switched on."""

from typing import ClassVar

from omni_core.backend.conformance import BackendConformance


class TestRegisteredCpuSim(BackendConformance):
    backend_name = "cpu_sim"
    throughput_nbytes = 1 << 20


class TestSlowCpuSim(BackendConformance):
    backend_name = "cpu_sim"
    throughput_nbytes = 1 << 20
    backend_options: ClassVar = {
        "copy_latency_s": 0.0005,
        "copy_bandwidth_bytes_per_s": 2e9,
        "copy_parts": 3,
        "pin_seconds_per_byte": 1e-10,
        "max_pinned_bytes": 1 << 30,
    }
