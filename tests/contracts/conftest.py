# SPDX-License-Identifier: Apache-2.0
"""Reports of contracts are shown whether their test passes or not."""

import sys

import pytest


@pytest.fixture
def show(capsys):
    """Writes a report to the terminal."""

    def write(report):
        with capsys.disabled():
            sys.stdout.write(f"\n{report}\n")

    return write
