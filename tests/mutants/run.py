# SPDX-License-Identifier: Apache-2.0
"""Puts each mutant into a copy of the source and asks its detectors, until one notices: `make mutants`."""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mutants.report import PAGE, json_document, line_of, page_text, summary_of
from mutants.sandbox import REPOSITORY, frozen_source
from mutants.table import MUTANTS
from mutants.trial import Outcome, complaint_about_unchanged, try_mutant

PROCESSES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every mutant was killed, 1 if one survived, 2 if the harness itself could not do its work."""
    options = _options(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:42} {mutant.breaks}")
        return 0
    results = []
    with frozen_source() as source, ThreadPoolExecutor(PROCESSES) as pool:
        unchanged = pool.submit(complaint_about_unchanged, chosen, source)
        for result in pool.map(partial(try_mutant, source=source), chosen):
            results.append(result)
            if options.format == "text":
                print(line_of(result), flush=True)
        complaint = unchanged.result()
    if options.format == "json":
        print(json.dumps(json_document(results, complaint), indent=2))
    else:
        print(summary_of(results, complaint))
    broken = complaint is not None or any(result.outcome is Outcome.BROKEN for result in results)
    survived = any(result.outcome is Outcome.SURVIVED for result in results)
    if options.write_page and not broken and not survived:
        (REPOSITORY / PAGE).write_text(page_text(results), encoding="utf-8")
    return 2 if broken else int(survived)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="this mutant alone; repeatable")
    parser.add_argument("--list", action="store_true", help="name the mutants, run none")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--write-page", action="store_true", help=f"write {PAGE} if every mutant was killed")
    options = parser.parse_args(arguments)
    if options.write_page and options.only:
        parser.error("--write-page needs every mutant; leave --only out")
    return options


if __name__ == "__main__":
    sys.exit(main())
