# SPDX-License-Identifier: Apache-2.0
"""The `diffuse` command: pictures and prompts in, pictures out, and what the prefix cache saved."""

from omni_core.cli.diffuse.command import register

__all__ = ["register"]
