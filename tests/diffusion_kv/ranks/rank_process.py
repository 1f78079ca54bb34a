# SPDX-License-Identifier: Apache-2.0
"""One of two ranks: `python rank_process.py RANK FOLDER NAME…` runs each combination and leaves what it found.

Every rank runs an engine of its own over gloo and is given the same requests.
"""

import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch
from diffusion_kv.ranks.combinations import COMBINATIONS
from diffusion_kv.ranks.served import serve
from torch import distributed

from omni_core.diffusion_kv.gloo import ProcessGroupRanks
from omni_core.diffusion_kv.parallel import OneRank, Ranks


def main(rank, folder, names):
    logging.disable(logging.WARNING)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=200)
    )
    both = ProcessGroupRanks(distributed.group.WORLD)
    for name in names:
        combination = COMBINATIONS[name]
        ranks = Ranks(OneRank(), both) if combination.cfg_size == 2 else Ranks(both, OneRank())
        torch.save(serve(combination, ranks), folder / f"{name}.{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
