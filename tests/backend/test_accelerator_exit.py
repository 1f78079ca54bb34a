# SPDX-License-Identifier: Apache-2.0
"""A process that ends without closing its backend ends cleanly, on drivers that abort if they find memory in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import atexit, gc, os, sys
from contextlib import ExitStack

import torch
from fake_accelerator.backends import Vendor
from fake_accelerator.rig import FakeRig, step_rows
from fake_accelerator.torch_patches import torch_on


def use_a_backend(vendor, how):
    machine = vendor.machine()
    process = os.getpid()

    def shut_down():
        # The vendor's own handler, registered when its package was imported: ours runs before it.
        if os.getpid() == process:
            print(f"{vendor.value}, {how}: {len(machine.pinned)} pinned at the end", flush=True)
            try:
                machine.shut_down()
            except SystemError:
                os.abort()
        else:
            # What the parent's threads no longer do cannot hang here: the child asks nothing of the device.
            print(f"{vendor.value}, {how}: {len(machine.pinned)} pinned, {len(machine.contexts)} used", flush=True)

    atexit.register(shut_down)
    patched = ExitStack()
    patched.enter_context(torch_on(machine))
    rig = FakeRig(vendor, machine)
    rig.copy(step_rows(1))
    if how == "closed":
        rig.backend.close()
    if how == "an error":
        raise ValueError("the program failed")
    if how == "a child":
        rig.stream.record().synchronize(20)
        machine.contexts.clear()
        run(lambda: None)


def run(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit()
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


gc.freeze()  # what was imported need not be collected again at the end of each child
for how in ("left open", "closed", "an error", "a child"):
    run(lambda: use_a_backend(Vendor.CUDA, how))
run(lambda: use_a_backend(Vendor.NPU, "left open"))
"""


def test_fault_105_a_process_ends_with_nothing_pinned_and_its_own_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cuda, left open: 0 pinned at the end",
        "exit code 0",
        "cuda, closed: 0 pinned at the end",
        "exit code 0",
        "cuda, an error: 0 pinned at the end",
        "exit code 1",
        # A forked child inherits the registration, and leaves the device to its parent.
        "cuda, a child: 1 pinned, 0 used",
        "exit code 0",
        "cuda, a child: 0 pinned at the end",
        "exit code 0",
        "npu, left open: 0 pinned at the end",
        "exit code 0",
    ]
