# SPDX-License-Identifier: Apache-2.0
"""What `omni-core plan` cannot be told from what it was given: wrong usage, exit status 2."""

from __future__ import annotations

OTHER_RELEASE = "is it another release of Omni Core?"
"""What to ask of a running stage that tells something of another form."""


class PlanInputError(ValueError):
    """Something is missing or contradicts itself; names the argument and what to give, in one line."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))


class NoAnswerError(ValueError):
    """A server gave no answer, or none that can be understood; says what came in its place."""


def one_line(text: str) -> str:
    """`text` with everything escaped that is not printed as a character: it may come from a server or a file."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
