# SPDX-License-Identifier: Apache-2.0
"""Measures what tests/diffusion_kv/accuracy only bounds: relative errors of the latents, with and without a fault.

    PYTHONPATH=tests python scripts/diffusion_equality.py

Layout `small`, two steps. Writes docs/measurements/diffusion-accuracy/equality.md.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_kv.accuracy.encoders_that_skip import EncodersThatSkip
from diffusion_kv.accuracy.faulty_hooks import BlockLocal, NoContent, NoFault, NoSeed, identified_by
from diffusion_kv.accuracy.stages import PICTURE, asked, generate, opened, relative_error
from diffusion_kv.plain_owner import PlainOwner, run

from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline

PREFIX = 543
OUT = Path(__file__).parents[1] / "docs" / "measurements" / "diffusion-accuracy" / "equality.md"


def differs(ours: torch.Tensor, wanted: torch.Tensor) -> str:
    """The relative error, or that there is none."""
    return "equal, bit for bit" if torch.equal(ours, wanted) else f"{relative_error(ours, wanted):.1e}"


def equalities() -> Iterator[tuple[str, str, str, int, int, str]]:
    """Compared, owner, type, prefix, hit, relative error."""
    with opened("dense") as engine:
        dense = generate(engine, asked())[0].latents
    (recomputed,) = run(TinyHunyuanPipeline(TinyHunyuanOptions(layout="small")), [asked()], PlainOwner(recompute=True))
    yield "dense, with recomputing every step", "dense", "float32", PREFIX, 0, differs(dense, recomputed.latents)
    for owner, dtype, prefix in (
        ("gathered", "float32", PREFIX),
        ("kernel", "float32", PREFIX),
        ("gathered", "float32", 544),
        ("kernel", "float32", 544),
        ("gathered", "float64", PREFIX),
        ("gathered", "bfloat16", PREFIX),
        ("kernel", "bfloat16", PREFIX),
    ):
        model = {"dtype": dtype, "prefix_tokens": prefix}
        with opened(owner, model=model, enable_prefix_caching=False) as engine:
            off = generate(engine, asked())[0].latents
        with opened(owner, model=model) as engine:
            (cold,) = generate(engine, asked("cold"))
            engine.reset_prefix_cache()
            _, partial, full, again = generate(
                engine, asked("other", prompt="a goat"), asked("partial"), asked("full"), asked("again")
            )
        case = (owner, dtype, prefix)
        if (dtype, prefix) == ("float32", PREFIX):
            yield "no cache, with dense", *case, 0, differs(off, dense)
        for what, one, wanted in (
            ("caching on and nothing hit, with caching off", cold, off),
            ("a hit, with no cache", partial, off),
            ("a hit, with no cache", full, off),
            ("a hit, with the same hit", again, full.latents),
        ):
            yield what, *case, one.kv.cached_prefix_tokens, differs(one.latents, wanted)


def faults() -> Iterator[tuple[str, int, str, int, str]]:
    """Fault, hit and error with it, hit and error without."""
    last_patch = np.array(PICTURE)
    last_patch[-16:, -16:] ^= 255
    for what, fault, changes in (
        ("the seed is left out of the identity", NoSeed, {"seed": 7}),
        ("the pictures' content is left out", NoContent, {"references": (255 - PICTURE,)}),
        ("a page is identified by its own patches alone", BlockLocal, {"references": (last_patch,)}),
    ):
        with opened("dense") as engine:
            wanted = generate(engine, asked(**changes))[0].latents
        found: list[int | str] = []
        for hook in (fault, NoFault):
            with identified_by(hook, pytest.MonkeyPatch()), opened("gathered") as engine:
                _, second = generate(engine, asked("first"), asked("second", **changes))
            found += [second.kv.cached_prefix_tokens, differs(second.latents, wanted)]
        yield (what, *found)
    found = []
    for draws in (False, True):
        with opened("gathered", pipeline=EncodersThatSkip.pipeline(draws=draws)) as engine:
            _, encoded, skipped = generate(engine, asked("cold"), asked("encoded"), asked("skipped"))
        found += [skipped.kv.cached_prefix_tokens, differs(skipped.latents, encoded.latents)]
    yield ("an encoder is skipped on a hit, and its draw with it; without the fault its draw is made", *found)


def table(titles: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    """In Markdown."""
    lines = [titles, tuple("---:" if title.startswith(("Hit", "Prefix")) else "---" for title in titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def main() -> None:
    """Measure, write."""
    text = (
        f"# Equality of tiny-hunyuan, layout `small`, two steps, CPU, {torch.get_num_threads()} threads\n\n"
        "Relative error of the latents (norm of the difference over the norm). Written by "
        "`scripts/diffusion_equality.py`.\n\n"
        + table(("Compared", "Owner", "Type", "Prefix", "Hit", "Relative error"), equalities())
        + "\n## With a fault, and without\n\nCompared with a dense run of the same request, gathered pages.\n\n"
        + table(("Fault", "Hit with it", "Error with it", "Hit without", "Error without"), faults())
    )
    OUT.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
