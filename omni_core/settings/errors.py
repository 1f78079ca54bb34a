# SPDX-License-Identifier: Apache-2.0
"""How a configuration mistake is told: all of them at once, each with its place, its value and the rule."""

from __future__ import annotations


class SettingsError(ValueError):
    """Settings that cannot be run with; nothing was started."""

    def __init__(self, *problems: str) -> None:
        """One text for each mistake."""
        super().__init__("\n".join(problems))
        self.problems = problems
