# SPDX-License-Identifier: Apache-2.0
"""The `doctor` command: what every backend can do on this machine, tried in processes of their own."""

from omni_core.cli.doctor.command import register

__all__ = ["register"]
