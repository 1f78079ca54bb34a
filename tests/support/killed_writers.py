# SPDX-License-Identifier: Apache-2.0
"""Run as a script: processes that write request files and are killed in the middle of it.

Each writes one whole request of client `c`, and dies while a second one is on its way.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd
from omni_core.sinks.safetensors_files import SafetensorsSink


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle_of_a_line(descriptor, line):
    os.writev(descriptor, [line[: len(line) // 2]])
    die()


POINTS = {
    "mid_delivery": None,
    "before_the_data_is_on_disk": ("fsync", die),
    "before_the_file_gets_its_name": ("link", die),
    "before_the_index_names_it": ("write", die),
    "while_the_index_names_it": ("write", die_in_the_middle_of_a_line),
}


def accept(sink, req_id, first, count):
    rows = {HIDDEN_KEY: torch.full((count, 3), 7.0)}
    sink.accept(SinkDelivery(req_id, "c", 0, ((first, first + count),), rows, np.zeros(count, dtype=np.int64)))


def write(directory, point):
    sink = SafetensorsSink(directory)
    accept(sink, "whole-00000000", 0, 4)
    sink.finish(SinkRequestEnd("whole-00000000", "c", RequestEnd.FINISHED))
    accept(sink, "late-00000001", 0, 4)
    if POINTS[point] is None:
        die()
    name, replacement = POINTS[point]
    setattr(os, name, replacement)
    accept(sink, "late-00000001", 4, 5)
    sink.finish(SinkRequestEnd("late-00000001", "c", RequestEnd.FINISHED))


def main(root):
    statuses = {}
    for point in POINTS:
        child = os.fork()
        if child == 0:
            write(Path(root) / point, point)
            os._exit(0)
        statuses[point] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    main(sys.argv[1])
