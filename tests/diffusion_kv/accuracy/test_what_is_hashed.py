# SPDX-License-Identifier: Apache-2.0
"""With prefix caching off nothing is ever hashed, of pictures or of blocks; with it on, each request once."""

import pytest
from diffusion_kv.accuracy.stages import asked, generate, opened

from omni_core.diffusion_kv.identity import canonical, images, namespace
from omni_core.diffusion_kv.tiny_hunyuan.hook import TinyHunyuanHook

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.fixture
def counts(monkeypatch):
    """How often a request was identified, a value hashed, and a row's blocks."""
    from omni_core.integrations.diffusion import kv_manager

    found = {"identify": 0, "digest": 0, "blocks": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(TinyHunyuanHook, "identify", counted("identify", TinyHunyuanHook.identify))
    for module in (images, namespace):
        monkeypatch.setattr(module, "canonical_digest", counted("digest", canonical.canonical_digest))
    monkeypatch.setattr(kv_manager, "hash_prefix_blocks", counted("blocks", kv_manager.hash_prefix_blocks))
    return found


@pytest.mark.parametrize(
    ("owner", "settings"), [("dense", {}), ("gathered", {"enable_prefix_caching": False}), ("gathered", {})]
)
def test_hashes_are_made_for_caching_alone(owner, settings, counts):
    with opened(owner, layout="debug", **settings) as engine:
        counts.update(dict.fromkeys(counts, 0))
        generate(engine, asked("a"), asked("b", prompt="a goat"))
    if owner == "gathered" and not settings:
        assert counts["identify"] == 2
        assert counts["blocks"] == 4
        assert counts["digest"] >= 4
    else:
        assert counts == {"identify": 0, "digest": 0, "blocks": 0}


def test_the_same_picture_under_another_prompt_shares_the_leading_blocks():
    with opened("gathered", layout="debug", block_size=16) as engine:
        first, second = generate(engine, asked("a"), asked("b", prompt="another prompt"))
    assert first.kv.cached_prefix_tokens == 0
    assert second.kv.cached_prefix_tokens == 32  # one picture, [11, 37); the prompt follows
