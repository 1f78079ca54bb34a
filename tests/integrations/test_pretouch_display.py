# SPDX-License-Identifier: Apache-2.0
"""How far a pre-touch has come is a bar on a terminal, and elsewhere a log line now and then."""

import io
import logging
import sys
from importlib.util import find_spec

import pytest

from omni_core.integrations.vllm.pretouch_display import pretouch_display
from omni_core.prefix_cache.pretouch import PretouchProgress
from omni_core.runtime import ThreadingRuntime

GIB = 1 << 30


class SetClock(ThreadingRuntime):
    now_s = 100.0

    def monotonic_s(self):
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_at_the_start_at_the_end_and_every_few_seconds(caplog):
    clock = SetClock()
    with caplog.at_level(logging.INFO, logger="omni_core"), pretouch_display(clock) as show:
        for second in range(13):
            clock.now_s = 100.0 + second
            show(PretouchProgress(second * GIB, 12 * GIB))
    assert [record.message for record in caplog.records] == [
        "pre-touch of the pool: 0.00 of 12.00 GiB after 0 s",
        "pre-touch of the pool: 5.00 of 12.00 GiB after 5 s",
        "pre-touch of the pool: 10.00 of 12.00 GiB after 10 s",
        "pre-touch of the pool: 12.00 of 12.00 GiB after 12 s",
    ]


@pytest.mark.skipif(find_spec("rich") is None, reason="draws with rich")
def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.INFO, logger="omni_core"), pretouch_display(ThreadingRuntime()) as show:
        show(PretouchProgress(3 * GIB, 12 * GIB))
        show(PretouchProgress(12 * GIB, 12 * GIB))
    drawn = sys.stderr.getvalue()
    assert "pre-touch of the pool" in drawn
    assert "12.0/12.0 GiB" in drawn
    assert caplog.records == []


def test_nothing_is_shown_where_nothing_is_touched(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.INFO, logger="omni_core"), pretouch_display(ThreadingRuntime()):
        pass
    assert sys.stderr.getvalue() == ""
    assert caplog.records == []
