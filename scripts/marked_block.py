# SPDX-License-Identifier: Apache-2.0
"""The part of a page that is written by a program: a block between two marks."""

import re


def with_block(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks `<!-- generated: NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: the page does not have the two marks once.
    """
    marks = rf"(<!-- generated: {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)"
    filled, count = re.subn(marks, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places marked <!-- generated: {name} -->; it needs one")
    return filled
