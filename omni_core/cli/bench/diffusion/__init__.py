# SPDX-License-Identifier: Apache-2.0
"""`diffusion`: what prefix caching saves a diffusion stage, dense, paged and paged with prefix caching side by side.

config      sizes, modes, workloads and step counts
workloads   the requests
measure     rounds in which the modes take turns
rows        figures, targets and charts
"""

from omni_core.cli.bench.diffusion.measure import measure
from omni_core.cli.bench.diffusion.rows import CHARTS, TARGETS

__all__ = ["CHARTS", "TARGETS", "measure"]
