# SPDX-License-Identifier: Apache-2.0
"""Draws the example pictures, `lighthouse.png` and `boat.png`, into a folder: `python draw_pictures.py [FOLDER]`."""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

SKY, SEA, SAND, RED, WHITE, WOOD, DARK = "#8fc7e8", "#2b6c99", "#e3cf9b", "#c8402f", "#f7f4ea", "#7a4a21", "#27313b"


def lighthouse() -> Image.Image:
    """A striped tower on a beach."""
    picture = Image.new("RGB", (192, 144), SKY)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 104, 191, 143), fill=SAND)
    for stripe in range(5):
        top = 30 + stripe * 16
        draw.polygon(
            [(84 - stripe, top), (108 + stripe, top), (109 + stripe, top + 16), (83 - stripe, top + 16)],
            fill=RED if stripe % 2 else WHITE,
        )
    draw.rectangle((86, 18, 106, 30), fill=DARK)
    draw.rectangle((91, 20, 101, 28), fill="#ffe27a")
    draw.polygon([(84, 18), (108, 18), (96, 8)], fill=RED)
    return picture


def boat() -> Image.Image:
    """A sailing boat on the sea."""
    picture = Image.new("RGB", (144, 192), SKY)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((100, 18, 128, 46), fill="#fff3b0")
    draw.rectangle((0, 128, 143, 191), fill=SEA)
    draw.polygon([(28, 124), (116, 124), (98, 148), (44, 148)], fill=WOOD)
    draw.line((72, 124, 72, 40), fill=DARK, width=3)
    draw.polygon([(76, 44), (76, 116), (114, 116)], fill=WHITE)
    draw.polygon([(68, 56), (68, 116), (38, 116)], fill=RED)
    return picture


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    lighthouse().save(folder / "lighthouse.png")
    boat().save(folder / "boat.png")
