# SPDX-License-Identifier: Apache-2.0
"""The page on a diffusion stage's settings has every setting and every refusal of the source."""

import render_diffusion_settings


def test_the_generated_parts_are_current():
    page = render_diffusion_settings.PAGE.read_text(encoding="utf-8")
    assert render_diffusion_settings.rendered(page) == page, "run `python scripts/render_diffusion_settings.py`"


def test_every_refusal_is_told_in_words_of_its_own():
    lines = render_diffusion_settings.refusals_list().splitlines()
    messages = [line.partition(": ")[2] for line in lines]
    assert len(set(messages)) == len(lines) > 20
