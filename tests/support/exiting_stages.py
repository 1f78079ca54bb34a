# SPDX-License-Identifier: Apache-2.0
"""Run as a script: processes with an open stage that end in every way; tells their exit codes as JSON."""

import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

import fake_runner as fake
from fake_stage import FakeStage

PROMPT = [11, 12, 13, 14]


def open_stage(directory, shutdown_timeout_s):
    return FakeStage(sink="safetensors", sink_options={"directory": directory}, shutdown_timeout_s=shutdown_timeout_s)


def ends_by_itself():
    pass


def exits():
    sys.exit(3)


def raises():
    raise RuntimeError("the engine failed")


def is_terminated():
    def leave(*_):
        raise SystemExit

    signal.signal(signal.SIGTERM, leave)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


WAYS = (ends_by_itself, exits, is_killed)
STUCK_WAYS = (raises, is_terminated)
_KEPT = []


def in_a_child(way, directory, *, stuck):
    """Open a stage, compute a request's prompt, and leave with the request open."""
    gc.freeze()  # the parent's objects need no look at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    stage = open_stage(directory, shutdown_timeout_s=0.2 if stuck else 30.0)
    if way is not ends_by_itself:
        _KEPT.append(stage)  # else it is garbage before the process ends
    entered = threading.Event()
    if stuck:
        # The only way to a sink that hangs for ever: there is no option for it.
        stage.session.sink.accept = lambda delivery: (entered.set(), threading.Event().wait())
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 4)]))
    if stuck:
        assert entered.wait(20)
    way()


def main(root):
    children = {}
    for way, stuck in [(way, False) for way in WAYS] + [(way, True) for way in STUCK_WAYS]:
        name = f"{way.__name__}{', sink stuck' if stuck else ''}"
        child = os.fork()
        if child == 0:
            in_a_child(way, str(Path(root) / name), stuck=stuck)
            return
        children[name] = child
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1])
