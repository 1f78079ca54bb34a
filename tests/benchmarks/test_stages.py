# SPDX-License-Identifier: Apache-2.0
"""Both sides of a benchmark are given the same steps, and deliver the same rows of them."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from omni_core.cli.bench.engine_batch import BLOCK_SIZE, CODES_KEY, DecodeBatch, HitPrompts, StageShape
from omni_core.cli.bench.peer.install import PEER_REQUIREMENT, PeerError, install_peer, peer_home
from omni_core.cli.bench.peer.package import PeerPackage
from omni_core.cli.bench.peer.stage import PeerMode, PeerStage
from omni_core.cli.bench.stage import OurStage
from omni_core.cli.bench.threads import COMMITTER, Builders, MeteredRuntime
from omni_core.prefix_cache.config import HIDDEN_KEY

SHAPE = StageShape(DecodeBatch.num_blocks(3), 3, hidden_size=8)
HIT_TOKENS = 4 * BLOCK_SIZE
HIT_SHAPE = StageShape(HitPrompts.num_blocks(HIT_TOKENS), 24, hidden_size=8)


@pytest.fixture(scope="module")
def peer_package():
    try:
        folder = install_peer(peer_home())
    except (PeerError, OSError) as error:
        pytest.skip(f"{PEER_REQUIREMENT} cannot be installed here: {error}")
    return PeerPackage(folder)


@pytest.fixture(params=PeerMode, ids=lambda mode: mode.value)
def make_peer(request, peer_package):
    made = []

    def make(shape):
        made.append(PeerStage(peer_package, shape, request.param))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def make_ours():
    made = []

    def make(shape, **options):
        made.append(OurStage(shape, MeteredRuntime(), **options))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def our_rows(stage, step_id, req_ids):
    outputs = stage.cache.materialize(step_id, req_ids)
    return {req_id: {key: rows.clone() for key, rows in outputs[req_id].rows.items()} for req_id in req_ids}


def peer_rows(stage, step_id, req_ids):
    delivered = stage.deliver(step_id).outputs
    rows = {req_id: {key: by_req[req_id] for key, by_req in delivered.mm_outputs.items()} for req_id in req_ids}
    for req_id, hidden in (delivered.hidden_states or {}).items():
        rows[req_id][HIDDEN_KEY] = hidden
    return rows


def assert_equal_rows(ours, theirs):
    assert ours.keys() == theirs.keys()
    for req_id, rows in ours.items():
        assert rows.keys() == theirs[req_id].keys()
        for key, tensor in rows.items():
            assert torch.equal(tensor, theirs[req_id][key]), (req_id, key)


def test_decode_steps(make_ours, make_peer):
    ours, peer = make_ours(SHAPE), make_peer(SHAPE)
    our_batch, peer_batch = DecodeBatch(SHAPE, 3), DecodeBatch(SHAPE, 3)
    for step in range(5):
        for stage, batch in ((ours, our_batch), (peer, peer_batch)):
            stage.prepare(batch.next_step() if step else batch.restart())
        req_ids = [f"request-{index}" for index in range(3)]
        delivered = our_rows(ours, ours.run_step(), req_ids)
        assert delivered["request-2"][HIDDEN_KEY].shape == (1, 8)
        assert_equal_rows(delivered, peer_rows(peer, peer.run_step(), req_ids))
        ours.settle()
        peer.settle()


def test_a_hit_gives_the_whole_prompt(make_ours, make_peer):
    ours, peer = make_ours(HIT_SHAPE), make_peer(HIT_SHAPE)
    our_prompts, peer_prompts = HitPrompts(HIT_SHAPE, HIT_TOKENS), HitPrompts(HIT_SHAPE, HIT_TOKENS)
    for stage, prompts in ((ours, our_prompts), (peer, peer_prompts)):
        for step in prompts.storing_steps():
            stage.prepare(step)
            stage.deliver(stage.run_step()).release()
        stage.settle()
        stage.prepare(prompts.reading_step())
    delivered = our_rows(ours, ours.run_step(), ["reader-1"])
    assert delivered["reader-1"][HIDDEN_KEY].shape == (HIT_TOKENS + 1, 8)
    assert_equal_rows(delivered, peer_rows(peer, peer.run_step(), ["reader-1"]))


def test_deferred_steps_are_given_up_and_stay_on_the_device(make_ours, make_peer):
    shape = replace(SHAPE, hidden_size=None, token_keys={}, deferred_keys={CODES_KEY: 16})
    ours, peer = make_ours(shape, deliver_all=False), make_peer(shape)
    for stage in (ours, peer):
        batch = DecodeBatch(shape, 3)
        for step in range(4):
            stage.prepare(batch.next_step() if step else batch.restart())
            stage.discard(stage.run_step())
        if stage is ours:
            assert ours.stats().deferred_bytes >= 4 * 3 * 16 * 8
        stage.prepare(batch.finish_last())
        stage.discard(stage.run_step())


def test_the_peer_is_loaded_alone_and_leaves_no_trace():
    """In a process of its own: here other tests may have imported what must not be there."""
    program = (
        "import sys\n"
        "from omni_core.cli.bench.peer.install import install_peer, peer_home\n"
        "from omni_core.cli.bench.peer.package import PeerPackage\n"
        "import torch, types\n"
        "before = torch.cuda.Event, torch.empty\n"
        "theirs = sys.modules['vllm_omni'] = types.ModuleType('vllm_omni')\n"
        "package = PeerPackage(install_peer(peer_home()))\n"
        "assert package.exported.OmniPrefixCacheManager is not None\n"
        "assert (torch.cuda.Event, torch.empty) == before\n"
        "assert sys.modules.pop('vllm_omni') is theirs\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('vllm', 'vllm_omni')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "PeerError" in done.stderr:
        pytest.skip(f"{PEER_REQUIREMENT} cannot be installed here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_builders_deliver_every_step_once_and_tell_of_their_errors(make_ours):
    stage = make_ours(SHAPE)
    batch = DecodeBatch(SHAPE, 3)
    builders = Builders(MeteredRuntime(), stage, 2)
    for step in range(20):
        stage.prepare(batch.next_step() if step else batch.restart())
        builders.wait_for_open(1)
        builders.submit(stage.run_step())
    builders.wait_for_open(0)
    assert stage.stats().steps_materialized == 20
    builders.submit(20)
    with pytest.raises(RuntimeError, match="a builder of the benchmark failed"):
        builders.wait_for_open(0)
    builders.close()


def test_the_committer_is_metered(make_ours):
    runtime = MeteredRuntime()
    stage = OurStage(SHAPE, runtime)
    try:
        batch = DecodeBatch(SHAPE, 3)
        stage.prepare(batch.restart())
        stage.deliver(stage.run_step()).release()
        stage.settle()
        before = runtime.cpu_s(COMMITTER)
        for _ in range(50):
            stage.prepare(batch.next_step())
            stage.deliver(stage.run_step()).release()
        stage.settle()
        assert runtime.cpu_s(COMMITTER) > before
    finally:
        stage.close()


def test_a_batch_whose_blocks_are_full_has_to_be_restarted():
    batch = DecodeBatch(SHAPE, 3, blocks_per_request=1)
    batch.restart()
    for _ in range(BLOCK_SIZE - 1):
        batch.next_step()
    assert batch.room == 0
    with pytest.raises(ValueError, match="restart the batch"):
        batch.next_step()
    again = batch.restart()
    assert again.finished == ("request-0", "request-1", "request-2")
    assert batch.room == BLOCK_SIZE - 1
