# SPDX-License-Identifier: Apache-2.0
"""An image is found again exactly if its pixels, its place and the numbers its latent was drawn from are the same."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from omni_core.diffusion_kv.errors import IdentityValueError, RowError
from omni_core.diffusion_kv.identity.images import (
    Draw,
    GeneratorDraws,
    ReferenceImage,
    SeededDraws,
    UnrepeatableDraws,
    image_digests,
    place,
)

SEEDED = SeededDraws(seed=42, device="cpu")


def image(value=0.0, **changed):
    made = ReferenceImage(
        tensors={"vae_pixels": torch.full((3, 8, 8), value), "vit_pixels": torch.full((3, 4, 4), value)},
        grids={"vae": (2, 2), "vit": (1, 1)},
        draw=Draw((16, 2, 2), "float32"),
    )
    return replace(made, **changed)


def digest(one, draws=SEEDED):
    return image_digests([one], draws)[0]


def test_the_same_image_is_found_again():
    assert digest(image()) == digest(image())


def changed_pixel(name):
    tensors = {key: tensor.clone() for key, tensor in image().tensors.items()}
    tensors[name][-1, -1, -1] += 2**-20
    return image(tensors=tensors)


CHANGES = {
    "the last VAE pixel": changed_pixel("vae_pixels"),
    "the last ViT pixel": changed_pixel("vit_pixels"),
    "the dtype": image(tensors={name: one.double() for name, one in image().tensors.items()}),
    "the names": image(tensors={f"x_{name}": one for name, one in image().tensors.items()}),
    "the VAE grid": image(grids={"vae": (1, 4), "vit": (1, 1)}),
    "is_reference": image(is_reference=False),
    "a flag": image(flags={"keep_ratio": True}),
    "the latent's shape": image(draw=Draw((16, 1, 4), "float32")),
    "the latent's dtype": image(draw=Draw((16, 2, 2), "float64")),
    "no draw": image(draw=None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another(what):
    assert digest(CHANGES[what]) != digest(image())


def test_arrays_are_taken_as_tensors_are():
    of_arrays = image(tensors={"sizes": np.array([8, 8])})
    assert digest(of_arrays) == digest(image(tensors={"sizes": np.array([8, 8])}))
    assert digest(of_arrays) != digest(image(tensors={"sizes": np.array([8, 9])}))


def test_what_has_no_canonical_hash_is_refused_by_name():
    with pytest.raises(IdentityValueError, match=r"\['flags'\]\['resize'\]: a builtins\.object"):
        digest(image(flags={"resize": object()}))


# --- each image stands alone


def test_another_second_image_leaves_the_first_as_it_was():
    before = image_digests([image(1.0), image(2.0)], SEEDED)
    after = image_digests([image(1.0), image(3.0)], SEEDED)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_another_first_image_of_the_same_draw_leaves_the_second_as_it_was():
    before = image_digests([image(1.0), image(2.0)], SEEDED)
    after = image_digests([image(3.0), image(2.0)], SEEDED)
    assert before[1] == after[1]


def test_one_image_encoded_first_and_second_is_two():
    first, second = image_digests([image(), image()], SEEDED)
    assert first != second


def test_a_larger_draw_before_it_makes_another_image():
    small = image_digests([image(), image(2.0)], SEEDED)
    large = image_digests([image(draw=Draw((16, 4, 4), "float32")), image(2.0)], SEEDED)
    assert small[1] != large[1]


def test_an_image_that_draws_nothing_moves_no_state():
    silent = image(draw=None)
    assert image_digests([silent, image(2.0)], SEEDED)[1] == digest(image(2.0))


# --- where the latents come from


@pytest.mark.parametrize("other", [SeededDraws(seed=43, device="cpu"), SeededDraws(seed=42, device="cuda")])
def test_another_seed_or_generator_device_makes_another_image(other):
    assert digest(image(), other) != digest(image())
    assert digest(image(draw=None), other) == digest(image(draw=None))


def states(generator, draws):
    """The generator's state before each draw, and what is drawn."""
    before, drawn = [], []
    for draw in draws:
        before.append(generator.get_state())
        drawn.append(torch.randn(draw.shape, generator=generator))
    return tuple(before), drawn


def test_a_generator_is_its_state_before_the_images_draw():
    draws = [Draw((16, 2, 2), "float32")] * 2
    once, drawn = states(torch.Generator().manual_seed(1), draws)
    again, drawn_again = states(torch.Generator().manual_seed(1), draws)
    images = [image(), image(2.0)]
    assert all(map(torch.equal, drawn, drawn_again))
    digests = image_digests(images, GeneratorDraws("cpu", once))
    assert digests == image_digests(images, GeneratorDraws("cpu", again))
    advanced, _ = states(torch.Generator().set_state(once[1]), draws)
    assert image_digests(images, GeneratorDraws("cpu", advanced))[0] != digests[0]
    assert digests != image_digests(images, GeneratorDraws("cuda", once))


def test_a_generator_state_that_is_missing_is_told():
    with pytest.raises(RowError, match="1 generator states for more than 1 draws"):
        image_digests([image(), image()], GeneratorDraws("cpu", (torch.Generator().get_state(),)))


def test_without_seed_and_generator_no_image_that_draws_is_shared():
    unique = count()
    draws = UnrepeatableDraws(lambda: next(unique).to_bytes(8, "big"))
    assert digest(image(), draws) != digest(image(), draws)
    assert digest(image(draw=None), draws) == digest(image(draw=None), draws)


def test_ways_of_drawing_are_told_apart():
    generator = GeneratorDraws("cpu", (torch.Generator().get_state(),))
    assert len({digest(image(), draws) for draws in (SEEDED, generator, UnrepeatableDraws(lambda: b"x"))}) == 3


# --- where it stands


def test_an_image_moved_by_one_token_is_another():
    here = place(digest(image()), 37, 41)
    assert here == place(digest(image()), 37, 41)
    assert (here.start, here.end) == (37, 41)
    assert len({place(digest(image()), *span).identifier for span in ((37, 41), (38, 42), (37, 42), (36, 41))}) == 4
