# SPDX-License-Identifier: Apache-2.0
"""The `bench` command: stages, the peer beside them, statistics, targets and reports."""

from omni_core.cli.bench.command import register

__all__ = ["register"]
