# SPDX-License-Identifier: Apache-2.0
"""Reserved is not committed: a process's memory follows the blocks that are written, in a process of its own.

The tolerance is for what the interpreter and the threads allocate beside, and the pages of the tables: measured as 0.1
to 1.3 MB. Blocks that lie far apart cost 2 MiB for each table that takes huge pages: 39 MB for one such table.
"""

from process_memory import memory_programs

TOLERANCE_BYTES = 4 << 20
FAR_BLOCKS = list(range(100_000, 1_000_000, 50_000))
HIDDEN = "__hidden_states__"


def test_a_million_blocks_cost_nothing_until_they_are_written():
    told = {"num_blocks": 1_000_000, "block_size": 16, "hidden_size": 2048, "hidden_dtype": "bfloat16"}
    with memory_programs() as memory_of:
        seen = memory_of(**told, max_num_tokens=1024, staging_depth=2, fill_blocks=2500, far_blocks=FAR_BLOCKS)
    reserved = seen["memory_when_filled"]
    assert reserved["pool_bytes"] == {HIDDEN: 65_536_000_000}
    assert reserved["shared_table_bytes"] + reserved["key_table_bytes"][HIDDEN] > 500_000_000
    staging_bytes = reserved["staging_bytes"] + reserved["snapshot_ring_bytes"]
    assert abs(seen["growth_when_built"] - staging_bytes) < TOLERANCE_BYTES
    assert abs(seen["growth_when_one_block_is_written"] - staging_bytes) < TOLERANCE_BYTES
    block_bytes = 16 * 4096
    filled_bytes, written_bytes = 2500 * block_bytes, (2500 + len(FAR_BLOCKS)) * block_bytes
    assert abs(seen["growth_when_filled"] - staging_bytes - filled_bytes) < TOLERANCE_BYTES
    assert abs(seen["growth_when_far_blocks_are_written"] - staging_bytes - written_bytes) < TOLERANCE_BYTES
    assert seen["resident_pool_bytes"] == {HIDDEN: written_bytes}
