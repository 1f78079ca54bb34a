# SPDX-License-Identifier: Apache-2.0
"""The `plan` command: a model's configuration or a running engine, the sizes that follow, and whether they fit."""

from omni_core.cli.plan.command import register

__all__ = ["register"]
