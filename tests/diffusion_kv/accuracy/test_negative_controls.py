# SPDX-License-Identifier: Apache-2.0
"""Each fault of an identity makes a wrong picture that the comparison finds; without the fault it is exact.

Those of an identity are small to the eye, so only exact comparisons find them. Pages registered at allocation and
overlapping features, which would be faults of vLLM's own hashing here, are in `test_native_controls`.
"""

import pytest
import torch
from diffusion_kv.accuracy.encoders_that_skip import EncodersThatSkip
from diffusion_kv.accuracy.faulty_hooks import BlockLocal, NoContent, NoFault, NoSeed, identified_by
from diffusion_kv.accuracy.stages import PICTURE, asked, generate, hits, opened, relative_error

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

EXACT, WRONG, QUITE_WRONG = 1e-5, 1e-3, 0.1
LAST_PATCH = PICTURE.copy()
LAST_PATCH[-16:, -16:] = 255 - LAST_PATCH[-16:, -16:]
FAULTS = {
    "the seed is left out": (NoSeed, {"seed": 7}, 512, 32),
    "the content is left out": (NoContent, {"references": (255 - PICTURE,)}, 512, 32),
    "a page knows its own patches alone": (BlockLocal, {"references": (LAST_PATCH,)}, 288, 32),
}
"""Name -> the faulty hook, the second request's difference, what it hits then, and what it may hit."""


@pytest.fixture(scope="module")
def dense():
    given = {}

    def latents(name, changes):
        if name not in given:
            with opened("dense") as engine:
                given[name] = generate(engine, asked(**changes))[0].latents
        return given[name]

    return latents


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_identity_is_found_by_the_comparison(name, dense, monkeypatch):
    fault, changes, wrong_hit, right_hit = FAULTS[name]
    wanted = dense(name, changes)
    for hook, hit in ((fault, wrong_hit), (NoFault, right_hit)):
        with identified_by(hook, monkeypatch), opened("gathered") as engine:
            _, second = generate(engine, asked("first"), asked("second", **changes))
        assert hits([second]) == [hit]
        error = relative_error(second.latents, wanted)
        assert error > WRONG if hook is fault else error <= EXACT, f"{hook.__name__}: {error:.1e}"


@pytest.mark.parametrize("fault", [NoSeed, NoContent, BlockLocal])
def test_a_faulty_hook_is_right_about_equal_requests(fault, monkeypatch, dense):
    """So a suite that only repeats one request would pass with every one of these faults."""
    with identified_by(fault, monkeypatch), opened("gathered") as engine:
        _, second = generate(engine, asked("first"), asked("second"))
    assert hits([second]) == [512]
    assert relative_error(second.latents, dense("plain", {})) <= EXACT


@pytest.mark.parametrize(("draws", "exact"), [(True, True), (False, False)])
def test_an_encoder_skipped_on_a_hit_must_still_draw(draws, exact):
    """Its pages hold all that it gives; but it draws from the generator that the first noise comes from."""
    with opened("gathered", pipeline=EncodersThatSkip.pipeline(draws=draws)) as engine:
        cold, encoded, skipped = generate(engine, asked("cold"), asked("encoded"), asked("skipped"))
    assert hits([cold, encoded, skipped]) == [0, 512, 512]
    assert relative_error(encoded.latents, cold.latents) <= EXACT
    assert torch.equal(skipped.latents, encoded.latents) == exact
    assert exact or relative_error(skipped.latents, encoded.latents) > QUITE_WRONG
