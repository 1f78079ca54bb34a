# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.model [WORDS]`: run the searches whose name has these words, print verdicts and shortest ways there.

With `--tables`, print the README's tables instead.
"""

import sys
import time

from .catalogue import FINAL_DELIVERY, FINAL_STORAGE, FREE_CHOICES, WRONG_DELIVERY, WRONG_STORAGE, Search

_TABLES = (
    ("| storage world | states |\n|---|---|", FINAL_STORAGE),
    ("| delivery world | states |\n|---|---|", FINAL_DELIVERY),
    ("| wrong rule | shown by | breaks |\n|---|---|---|", (*WRONG_STORAGE, *WRONG_DELIVERY)),
    ("| free choice | tried in | verdict |\n|---|---|---|", FREE_CHOICES),
)


def main(words: list[str]) -> None:
    if "--tables" in words:
        for head, searches in _TABLES:
            _write(head)
            for search in searches:
                _write(search.row(search.run()))
            _write("")
        return
    for _, searches in _TABLES:
        for search in searches:
            if all(word in search.name for word in words):
                _show(search)


def _show(search: Search) -> None:
    began = time.perf_counter()
    verdict = search.run()
    _write(f"{search.name} [{time.perf_counter() - began:.1f} s]\n{verdict}\n")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


main(sys.argv[1:])
