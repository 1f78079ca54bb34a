# SPDX-License-Identifier: Apache-2.0
"""Picture files to pixels and back, with pillow, which the extra `diffusion` brings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from omni_core.diffusion_kv.pipeline import Pixels

NO_PILLOW = "pillow is not installed, and pictures cannot be read or written: pip install 'omni-core[diffusion]'"


class PictureError(ValueError):
    """A picture that cannot be read or written; names the file."""


def check_pillow() -> None:
    """Check that pictures can be read and written.

    Raises:
        PictureError: pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise PictureError(NO_PILLOW)


def read_picture(path: Path) -> Pixels:
    """The file's pixels, turned as its EXIF data says, transparency on white.

    Raises:
        PictureError: there is no such file, or it is no picture pillow knows.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            if upright.has_transparency_data:
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return np.array(upright.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError) as error:
        raise PictureError(f"{path} cannot be read as a picture: {error}") from error


def check_writable(path: Path) -> None:
    """Check, before anything is computed, that pillow knows the ending of `path` and that its folder is there.

    Raises:
        PictureError: it does not, or it is not.
    """
    from PIL import Image

    Image.init()
    if path.suffix.lower() not in Image.registered_extensions():
        raise PictureError(f"{path}: pillow writes no {path.suffix or 'file without an ending'}; use .png")
    if not path.absolute().parent.is_dir():
        raise PictureError(f"{path}: there is no folder {path.absolute().parent}")


def write_picture(pixels: Pixels, path: Path) -> None:
    """Write `pixels` in the form the ending of `path` names.

    Raises:
        PictureError: the file cannot be written.
    """
    from PIL import Image

    try:
        Image.fromarray(pixels).save(path)
    except (OSError, ValueError) as error:
        raise PictureError(f"{path} cannot be written: {error}") from error
