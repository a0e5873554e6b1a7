"""Read the exact numbers of a mask file: nothing is resampled, scaled or converted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.vision.images.decode import opened, orientation_of, turned

if TYPE_CHECKING:
    from PIL import Image as PILImage

MaskKind = Literal["palette", "grey", "color"]
"""Kinds of mask files: ids with a palette, ids as grey values, or colours."""

_LOSSY = ("JPEG", "MPO", "WEBP")
_INTEGERS = ("L", "P", "1", "I", "I;16", "I;16B", "I;16L", "I;16N")
_STEPS = {2: 85, 4: 17}
"""PIL spreads grey values of 2 and 4 bits over 0 to 255. This is the step between values, by number of bits."""
_TIFF_BITS = 258
_NUMPY = b"\x93NUMPY"


@dataclass(frozen=True)
class MaskValues:
    """The content of a mask file."""

    values: Array
    """Ids: integers (height, width). For a colour file: uint8 (height, width, 3), RGB."""
    palette: Array | None = None
    """The colour of each id in a palette file: uint8 (ids, 3), RGB. None: the file has no palette."""

    @property
    def in_color(self) -> bool:
        """True if the pixels are colours, not ids."""
        return self.values.ndim == 3


def as_ids(mask: MaskValues) -> MaskValues:
    """The ids of a grey mask that was saved as RGB: all three values of each pixel are equal. Otherwise the mask."""
    if not mask.in_color or not (mask.values == mask.values[..., :1]).all():
        return mask
    return MaskValues(mask.values[..., 0].copy())


def decode_mask(data: bytes, *, where: str = "") -> MaskValues:
    """The numbers in a mask file.

    | file | values |
    |---|---|
    | palette of up to 256 colours | the palette index of each pixel |
    | grey of 1, 2, 4, 8, 16 or 32 bits | the grey value in the file: 0 and 1 for a file of 1 bit |
    | RGB | colours; an alpha channel is dropped, as for grey files |
    | .npy | the integers of an array (height, width); of an array (height, width, 3) of uint8, colours |

    The orientation in the file's EXIF data is applied, as it is for images.

    Args:
        data: the bytes of the file: PNG, TIFF, BMP or GIF.
        where: name of the file, for messages.

    Raises:
        DataError: the data is empty, not an image, truncated or damaged; it is a JPEG or WebP file, which may not
            preserve the saved values; or its pixels are floating-point numbers, CMYK or similar.
    """
    if data.startswith(_NUMPY):
        return MaskValues(_array(data, where))
    with opened(data, where) as image:
        if image.format in _LOSSY:
            what = f"a {image.format} file does not keep the values of a mask exactly"
            raise DataError(what, where=where or None, remedy="save the mask as PNG, from the original values")
        image.load()
        return MaskValues(turned(_values(image, data, where), orientation_of(image)), _palette(image))


def encode_mask(
    classes: Array, kind: MaskKind, *, ids: Sequence[int], colors: Sequence[Sequence[int]]
) -> tuple[str, bytes]:
    """A mask file of class numbers, which `decode_mask` reads back exactly.

    `palette` and `grey` write ids, `color` writes colours. Ids above 255 are grey with 16 bits, without a palette; ids
    above 65535 are grey with 32 bits.

    Args:
        classes: class numbers, (height, width).
        ids: the id of each class, from 0.
        colors: (red, green, blue) of each class.

    Returns:
        the suffix of the file (`.png`; `.tiff` for 32 bits), and its content.
    """
    from PIL import Image

    most = max(ids)
    if kind == "color":
        image = Image.fromarray(np.array(colors, dtype=np.uint8)[classes])
    else:
        dtype = np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.int32
        image = Image.fromarray(np.array(ids, dtype=dtype)[classes])
        if kind == "palette" and most < 1 << 8:
            palette = np.zeros((256, 3), dtype=np.uint8)
            palette[list(ids)] = colors
            image.putpalette(palette.reshape(-1).tolist())
    suffix, form = (".tiff", "TIFF") if kind != "color" and most >= 1 << 16 else (".png", "PNG")
    file = io.BytesIO()
    image.save(file, form)
    return suffix, file.getvalue()


def _values(image: PILImage.Image, data: bytes, where: str) -> Array:
    if image.mode in ("LA", "PA"):
        return np.array(image.getchannel(0))
    if image.mode in _INTEGERS:
        values = np.array(image)
        if image.mode == "1":
            return values.astype(np.uint8)
        return values // _STEPS.get(_bits(image, data), 1) if image.mode == "L" else values
    if image.mode in ("RGB", "RGBA", "RGBX"):
        return np.array(image)[..., :3].copy()
    remedy = "save the mask as PNG: a palette, grey with 8 or 16 bits, or RGB"
    raise DataError(f"a mask cannot have pixels of PIL mode {image.mode}", where=where or None, remedy=remedy)


def _array(data: bytes, where: str) -> Array:
    """The ids or colours in a file of NumPy."""
    try:
        values: Array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a damaged file raises many kinds of errors
        what = f"not readable as NumPy: {type(error).__name__}: {error}"
        raise DataError(what, where=where or None, remedy="write the file again, or remove it") from error
    values = values[0] if values.ndim == 3 and values.shape[0] == 1 else values
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    if values.dtype == np.bool_ or (values.dtype.kind == "f" and (values == values.round()).all()):
        values = values.astype(np.int32)
    in_color = values.ndim == 3 and values.shape[2] == 3 and values.dtype == np.uint8
    if values.dtype.kind not in "iu" or not (in_color or values.ndim == 2) or not values.size:
        what = f"an array of {values.dtype} with the shape {values.shape} is not a mask"
        raise DataError(what, where=where or None, remedy="save integers (height, width): the id of each pixel")
    return values


def _bits(image: PILImage.Image, data: bytes) -> int:
    """Bits of each pixel in the file."""
    if image.format == "PNG":
        return data[24]  # in the chunk IHDR, which is the first in every file
    if image.format == "TIFF":
        return int(image.tag_v2.get(_TIFF_BITS, (8,))[0])  # type: ignore[attr-defined]
    return 8


def _palette(image: PILImage.Image) -> Array | None:
    if image.mode not in ("P", "PA"):
        return None
    colors = image.getpalette("RGB")
    return None if colors is None else np.array(colors, dtype=np.uint8).reshape(-1, 3)
