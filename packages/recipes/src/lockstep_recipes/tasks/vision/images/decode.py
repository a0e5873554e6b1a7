"""Decode the bytes of an image file to upright pixels with one or three channels.

simplejpeg decodes ordinary JPEG files. It uses libjpeg-turbo, as PIL does, with less overhead. PIL decodes everything
else: other formats, CMYK, damaged files, and all files if simplejpeg is not installed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.core.errors import SKIP, DataError, UsageError

if TYPE_CHECKING:
    from PIL import Image as PILImage

Pixels = npt.NDArray[np.uint8]
T = TypeVar("T", bound=np.generic)

_EXIF_ORIENTATION = 0x0112
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N", "I")
WHITE = 65535
"""The value that becomes white in grey images of 16 bits, unless the training images have fewer bits."""
_RANGES = (255, 1023, 4095, 16383, WHITE)
_FEW, _MANY = 8, 64  # training images that are opened to find 16 bits, and to find their range
_REPAIR = f"repair or remove the file, or {SKIP}"


def decode(data: bytes, *, channels: int = 3, levels: int = WHITE, where: str = "") -> Pixels:
    """The pixels of an image file.

    The result is upright: the orientation in the file's EXIF data is applied. Grey images, palettes, CMYK and bits
    become RGB or grey. An alpha channel is dropped, and the colours stay as they are in the file. Grey values of 16
    bits are scaled from `levels` to 8 bits and rounded. The first frame of an animation is read.

    Args:
        data: the bytes of the file, in any format that PIL reads.
        channels: 3 for RGB, 1 for grey (luma of ITU-R BT.601, as PIL's mode L).
        levels: the grey value of a file of 16 bits that becomes 255. Many cameras and scanners write 12 bits.
        where: name of the file, for messages.

    Returns:
        uint8 array (height, width, channels), contiguous and writable.

    Raises:
        DataError: the data is empty, not an image, truncated or damaged; or the image has more than
            `PIL.Image.MAX_IMAGE_PIXELS` pixels, or a value above `levels`.
        UsageError: `channels` is neither 1 nor 3.
    """
    if channels not in (1, 3):
        raise UsageError(f"images cannot be read with {channels} channels", remedy="use 1 (grey) or 3 (RGB)")
    pixels = _decode_jpeg(data, channels)
    if pixels is not None:
        return turned(pixels, _jpeg_orientation(data))
    with opened(data, where) as image:
        image.load()
        return turned(_to_pixels(image, channels, levels, where), orientation_of(image))


def levels_of(images: Any) -> int:
    """The value that becomes white in the grey images of 16 bits of a training set: the largest value of the number of
    bits that they use. A few images are opened, spread over the set, and more of them if one has 16 bits.

    Args:
        images: encoded images, with a length and `read(index)`.
    """
    highest: float = -1
    for most in (min(_FEW, len(images)), min(_MANY, len(images))):
        for index in (number * len(images) // most for number in range(most)):
            with contextlib.suppress(DataError), opened(images.read(index), "") as image:
                if image.mode in _SIXTEEN_BIT:
                    image.load()
                    highest = max(highest, image.getextrema()[1])
        if highest < 0:
            return WHITE
    return next((white for white in _RANGES if highest <= white), WHITE)


def image_size(data: bytes, *, where: str = "") -> tuple[int, int]:
    """(height, width) in pixels of the upright image, read from the header of the file.

    Args:
        data: the bytes of the file. The pixels may be missing.
        where: name of the file, for messages.

    Raises:
        DataError: the data is empty or not an image, or the image is too large.
    """
    header = _jpeg_header(data)
    if header is not None:
        height, width, _ = header
        sideways = _jpeg_orientation(data) >= 5
    else:
        with opened(data, where) as image:
            width, height = image.size
            sideways = orientation_of(image) >= 5 and image.format != "TIFF"  # PIL rotates TIFF files itself
    return (width, height) if sideways else (height, width)


# ---- JPEG with simplejpeg


@functools.cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def _jpeg_header(data: bytes) -> tuple[int, int, str] | None:
    """Height, width and colour space of a JPEG file; None if PIL has to read the file."""
    if data[:2] != b"\xff\xd8" or _simplejpeg() is None:
        return None
    from PIL import Image

    try:
        height, width, colours, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    limit = Image.MAX_IMAGE_PIXELS
    return None if limit is not None and height * width > limit else (height, width, colours)


def _decode_jpeg(data: bytes, channels: int) -> Pixels | None:
    """The pixels as the file stores them; None if PIL has to read the file."""
    header = _jpeg_header(data)
    if header is None or header[2] not in ("Gray", "YCbCr", "RGB"):
        return None
    grey = channels == 1 and header[2] == "Gray"
    try:
        pixels: Pixels = _simplejpeg().decode_jpeg(data, "GRAY" if grey else "RGB")
    except ValueError:  # includes damage that PIL's decoder repairs
        return None
    if channels == 1 and not grey:
        from PIL import Image

        pixels = np.array(Image.fromarray(pixels).convert("L"))[..., None]
    return pixels


def _jpeg_orientation(data: bytes) -> int:
    from PIL import Image

    if not _has_app1(data):
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                return orientation_of(image)
        except Exception:  # simplejpeg has read the image, so only its metadata is broken
            return 1


def _has_app1(data: bytes) -> bool:
    """True if a JPEG file has a segment APP1, which contains EXIF and XMP data, before its pixels."""
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in (0xE1, 0xDA):  # APP1; start of the pixels
            return marker == 0xE1
        # A marker may be preceded by any number of bytes 0xFF.
        place += 1 if marker == 0xFF else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return True  # an unusual file; leave it to PIL


# ---- HEIC with pillow-heif


@functools.cache
def reads_heif() -> bool:
    """True if HEIC and HEIF files can be read: `pillow-heif` is installed. PIL then opens them."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _needs_heif(data: bytes) -> bool:
    """True if PIL cannot read the file without pillow-heif: brands of HEVC, ISO/IEC 23008-12, annex B."""
    if data[4:8] != b"ftyp" or reads_heif():
        return False
    return data[8:12] in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")


# ---- everything else with PIL


@contextlib.contextmanager
def opened(data: bytes, where: str) -> Iterator[PILImage.Image]:
    """The image as a PIL image. Errors in the block become DataErrors.

    PIL warns about damaged metadata of images that it can read. These warnings are suppressed.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise DataError("the file is empty", where=where or None, remedy=_REPAIR)
    if _needs_heif(data):
        remedy = f"pip install pillow-heif, or save it as JPEG, or {SKIP}"
        raise DataError("this is a HEIC image, which needs pillow-heif", where=where or None, remedy=remedy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        what = f"this is not an image that can be read: {len(data)} bytes that start with {data[:16]!r}"
        raise DataError(what, where=where or None, remedy=_REPAIR) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        remedy = "make the image smaller. If it is meant to be this large, set PIL.Image.MAX_IMAGE_PIXELS"
        raise DataError(f"the image is too large: {error}", where=where or None, remedy=remedy) from error
    except Exception as error:  # PIL's readers raise many kinds of errors
        what = f"the image is truncated or damaged: {type(error).__name__}: {error}"
        raise DataError(what, where=where or None, remedy=_REPAIR) from error


def orientation_of(image: PILImage.Image) -> int:
    """The EXIF orientation, 1 (upright) to 8. It is 1 if the file does not have one or the EXIF data cannot be read."""
    try:
        value = int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # broken EXIF data is common, and PIL raises many kinds of errors
        return 1
    return value if 1 <= value <= 8 else 1


def turned(pixels: npt.NDArray[T], orientation: int) -> npt.NDArray[T]:
    """The upright image. Source of the numbers: EXIF 2.32, table 4, tag Orientation."""
    if orientation == 1:
        return pixels
    if orientation >= 5:  # rows and columns are swapped
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels.copy()  # np.ascontiguousarray does not change a row of one pixel, whose stride torch refuses


def _to_pixels(image: PILImage.Image, channels: int, levels: int, where: str) -> Pixels:
    if image.mode in _SIXTEEN_BIT:
        return np.repeat(_eight_bits(np.asarray(image), levels, where)[..., None], channels, axis=2)
    if image.mode == "F":
        what = "the pixels are floating-point numbers, whose range is unknown"
        raise DataError(what, where=where or None, remedy="save the image with 8 or 16 bits a channel")
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")  # PIL cannot drop the transparency of a palette in one step
    pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return pixels[..., None] if channels == 1 else pixels


def _eight_bits(values: npt.NDArray[Any], levels: int, where: str) -> Pixels:
    """Integers from 0 to `levels`, scaled to 0 to 255 and rounded."""
    if values.min() < 0 or values.max() > WHITE:
        what = f"grey values from {values.min()} to {values.max()} do not fit into 16 bits"
        raise DataError(what, where=where or None, remedy="save the image with 8 or 16 bits a channel")
    if values.max() > levels:
        what = f"the grey value {values.max()} is above {levels}, which is white in the training images"
        enough = next(white for white in _RANGES if values.max() <= white)
        remedy = f"train with task.levels={enough}, or save the image in the range of the others"
        raise DataError(what, where=where or None, remedy=remedy)
    return ((values.astype(np.uint32) * 255 + levels // 2) // levels).astype(np.uint8)
