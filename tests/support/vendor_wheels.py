# SPDX-License-Identifier: Apache-2.0
"""Wheels of vendors' packages, to be read and never imported: downloaded once into `build/vendor-wheels` and unpacked.

Always those for CPython 3.11 on x86-64 Linux, whatever runs the tests: their text is read, nothing of them is run.
"""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "vendor-wheels"

TARGET = ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3"]
TARGET += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)]
DOWNLOAD_TIMEOUT_S = 600


def unpacked_wheel(requirement: str) -> Path:
    """The folder with the packages of one wheel, such as `torch_npu==2.14.0`; the test is skipped if there is none.

    One process downloads, others wait for it. What was unpacked before is used again.
    """
    unpacked = FOLDER / requirement
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{requirement}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.is_dir():
            with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
                contents = Path(scratch) / "contents"
                with zipfile.ZipFile(_downloaded(requirement, Path(scratch))) as wheel:
                    wheel.extractall(contents)
                # Last and at once: a folder of this name is always whole.
                shutil.move(contents, unpacked)
    return unpacked


def _downloaded(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--timeout=60", "--retries=1", *TARGET]
    try:
        done = subprocess.run(
            [*command, f"--dest={folder}", requirement],
            capture_output=True,
            text=True,
            check=False,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirement}: pip did not download it within {DOWNLOAD_TIMEOUT_S} s")
    if done.returncode:
        pytest.skip(f"{requirement}: pip finds no wheel of it here: {done.stderr.strip()[-400:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel
