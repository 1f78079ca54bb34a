# SPDX-License-Identifier: Apache-2.0
"""What `omni-core plan` cannot be told from what it was given: wrong usage, exit status 2."""

from __future__ import annotations


class PlanInputError(ValueError):
    """Something is missing or contradicts itself; names the argument and what to give."""
