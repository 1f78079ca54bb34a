# SPDX-License-Identifier: Apache-2.0
"""Gets the peer's package, without what it depends on, into a folder of its own that nothing else imports from."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from omni_core.cli.bench.results import BenchmarkError

PEER_REQUIREMENT = "vllm-omni==0.30.0"
_HOME_VARIABLE = "OMNI_CORE_HOME"
_TIMEOUT_S = 600.0


class PeerError(BenchmarkError):
    """The peer cannot be had; the message says why and what to do."""


def peer_home() -> Path:
    """Where it is installed: under `OMNI_CORE_HOME`, else `omni-core` in the user's cache folder."""
    home = os.environ.get(_HOME_VARIABLE)
    if home:
        return Path(home).expanduser().absolute() / "peer"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "omni-core" / "peer"


def install_peer(home: Path) -> Path:
    """The folder the peer's packages lie in, installed by pip if it is not there. Blocks for the download, 8 MB.

    It is installed beside its place and then renamed, so it is there whole or not at all.

    Raises:
        PeerError: pip could not install it; holds what pip said.
        OSError: the folder cannot be written.
    """
    ready = home / PEER_REQUIREMENT.replace("==", "-")
    if ready.is_dir():
        return ready
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=home) as scratch:
        target = Path(scratch) / "packages"
        options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--no-compile")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", *options, "--target", str(target), PEER_REQUIREMENT],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"pip did not install {PEER_REQUIREMENT} within {_TIMEOUT_S:g} s; run without --peer, or put it into "
                f"{ready}"
            ) from None
        if done.returncode != 0:
            said = done.stdout.decode("utf-8", "replace").strip().splitlines()[-5:]
            raise PeerError(
                f"pip could not install {PEER_REQUIREMENT}; run without --peer, or put it into {ready}:\n"
                + "\n".join("  " + line for line in said)
            )
        target.rename(ready)
    return ready
