# SPDX-License-Identifier: Apache-2.0
"""A row is all of a request that vLLM's own KV manager reads, and its hashes are vLLM's own."""

import hashlib
from dataclasses import replace

import pytest
from diffusion_kv.native_pages import BLOCK, GEOMETRY, IDENTITY, IMAGE, import_native, pool_of, row

from omni_core.diffusion_kv.errors import DiffusionKVError, RowError
from omni_core.diffusion_kv.rows import ImageFeature, RowGeometry

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

READ_BY_VLLM = {  # to look up, allocate, publish and free; found by vLLM 0.32's manager asking for them
    "request_id",
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "block_hashes",
    "skip_reading_prefix_cache",
    "status",
    "num_in_flight_tokens",
    "shared_prefix_boundary",
}
READ_FOR_STATISTICS = {"num_preemptions"}
READ_FOR_EVENTS = {"mm_features", "lora_request", "cache_salt", "prompt_embeds", "all_token_ids", "session_id"}


@pytest.fixture(scope="module")
def native():
    return import_native()


def hashed(native, demand=None, block_size=BLOCK):
    demand = row() if demand is None else demand
    made = native.row_request.RowRequest("a", 0, demand)
    native.block_hashing.hash_prefix_blocks(made, demand.identity, block_size)
    return made


def manager_with_events(pool):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager(
        pool.kv_cache_config,
        max_model_len=pool.max_model_len,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        enable_caching=True,
        log_stats=True,
        enable_kv_cache_events=True,
    )


def test_vllms_manager_reads_nothing_of_a_row_that_a_row_does_not_have(native):
    read = set()

    class Watched(native.row_request.RowRequest):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    watched = Watched("a", 0, row())
    watched.block_hashes = hashed(native).block_hashes
    manager = manager_with_events(pool_of(20))
    read.clear()
    blocks, hit_tokens, boundary = manager.get_computed_blocks(watched)
    assert (hit_tokens, boundary) == (0, 0)
    assert manager.allocate_slots(
        watched,
        GEOMETRY.total_tokens,
        new_computed_blocks=manager.truncate_computed_blocks(blocks, 0),
        delay_cache_blocks=True,
        full_sequence_must_fit=True,
    )
    manager.record_prefix_cache_stats(watched, 0)
    manager.cache_blocks(watched, 64)
    manager.free(watched)
    assert read - {"__class__"} <= READ_BY_VLLM | READ_FOR_STATISTICS | READ_FOR_EVENTS
    assert read >= READ_BY_VLLM | READ_FOR_STATISTICS
    (event,) = manager.take_events()
    assert len(event.block_hashes) == 4
    assert tuple(event.token_ids) == IDENTITY.token_ids[:64]


@pytest.mark.parametrize(("forgets", "taken"), [(True, 4), (False, 8)])
def test_a_row_that_comes_again_must_forget_how_far_it_was(native, forgets, taken):
    """vLLM adds its hit to the computed tokens it still claims, and allocates behind both."""
    manager = manager_with_events(pool_of(40))

    def allocate(one):
        blocks, hit_tokens, _ = manager.get_computed_blocks(one)
        new = one.num_tokens - hit_tokens
        free_pages = manager.block_pool.get_num_free_blocks()
        allocated = manager.allocate_slots(one, new, hit_tokens, blocks, delay_cache_blocks=True)
        assert allocated is not None
        one.num_computed_tokens = hit_tokens
        return free_pages - manager.block_pool.get_num_free_blocks() - hit_tokens // BLOCK

    again = hashed(native)
    assert allocate(again) == 8
    manager.cache_blocks(again, 64)
    manager.free(again)
    again.forget_progress()
    assert allocate(again) == 4
    manager.free(again)
    if forgets:
        again.forget_progress()
    assert allocate(again) == taken


def test_a_row_says_of_itself_what_its_geometry_says(native):
    made = native.row_request.RowRequest("a", 1, row())
    assert made.request_id == "a/row1"
    assert (made.num_tokens, made.num_prompt_tokens, made.num_computed_tokens) == (113, 70, 0)
    assert made.skip_reading_prefix_cache  # until it is hashed, nobody's pages are offered to it
    assert not hashed(native).skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("prefix", "block_size", "blocks"), [(70, 16, 4), (64, 16, 4), (63, 16, 3), (15, 16, 0), (0, 16, 0), (70, 32, 2)]
)
def test_only_the_full_blocks_of_the_prefix_are_hashed(native, prefix, block_size, blocks):
    made = hashed(native, row(replace(IDENTITY, features=()), RowGeometry(prefix, 40, prefix + 43)), block_size)
    assert len(made.block_hashes) == blocks


def test_hashing_again_changes_nothing_and_a_reserved_row_is_not_hashed(native):
    made = hashed(native)
    before = list(made.block_hashes)
    native.block_hashing.hash_prefix_blocks(made, IDENTITY, BLOCK)
    assert made.block_hashes == before
    made.num_computed_tokens = 64
    with pytest.raises(DiffusionKVError, match="'a/row0' is hashed after it was reserved"):
        native.block_hashing.hash_prefix_blocks(made, IDENTITY, BLOCK)


def test_hashes_are_the_same_in_every_process(native):
    """Worked out by hand from the rule, so no seed of a process can be in them."""
    import cbor2

    def digest(value):
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    root = digest(("omni-core diffusion kv chain 1", IDENTITY.namespace))
    first = digest((root, IDENTITY.token_ids[:16], None))
    image = ("mm", f"{IMAGE.identifier}/38", IMAGE.start - 16)
    second = digest((first, IDENTITY.token_ids[16:32], (image,)))
    assert [bytes(block_hash) for block_hash in hashed(native).block_hashes[:2]] == [first, second]


@pytest.mark.parametrize(
    ("features", "first_changed"),
    [
        ((replace(IMAGE, identifier="a cat, seed 7"),), 1),
        ((replace(IMAGE, start=21, end=59),), 1),
        ((replace(IMAGE, end=59),), 1),
        ((IMAGE, ImageFeature("another", 60, 70)), 3),
        ((), 1),
    ],
    ids=["content", "moved by one token", "longer at its end", "one more", "none"],
)
def test_every_block_an_image_touches_stands_for_the_whole_image(native, features, first_changed):
    original = hashed(native).block_hashes
    changed = hashed(native, row(replace(IDENTITY, features=features))).block_hashes
    assert [one == other for one, other in zip(original, changed, strict=True)] == [
        index < first_changed for index in range(4)
    ]


def test_two_equal_images_that_touch_one_block_both_count(native):
    twin = ImageFeature(IMAGE.identifier, 58, 62)
    alone = hashed(native).block_hashes
    both = hashed(native, row(replace(IDENTITY, features=(IMAGE, twin)))).block_hashes
    assert alone[:3] == both[:3]
    assert alone[3] != both[3]


def test_overlapping_images_are_refused_before_vllm_could_skip_one():
    with pytest.raises(RowError, match="overlap"):
        replace(IDENTITY, features=(IMAGE, ImageFeature("inner", 30, 40)))
