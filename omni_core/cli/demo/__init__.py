# SPDX-License-Identifier: Apache-2.0
"""The `demo` command: model, prompts, engine processes and report."""

from omni_core.cli.demo.command import register

__all__ = ["register"]
