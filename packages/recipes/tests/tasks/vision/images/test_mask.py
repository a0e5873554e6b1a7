"""The numbers in a mask file come out as they were saved, whatever the kind of file."""

import io

import numpy as np
import pytest
from PIL import Image

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.images.mask import decode_mask

IDS = np.arange(24, dtype=np.uint8).reshape(4, 6)


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def palette_image(ids, colors):
    image = Image.frombytes("P", ids.shape[::-1], ids.tobytes())
    image.putpalette(np.asarray(colors, dtype=np.uint8).reshape(-1).tolist())
    return image


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_grey_values_are_ids(kind):
    mask = decode_mask(saved(Image.fromarray(IDS), kind))
    np.testing.assert_array_equal(mask.values, IDS)
    assert mask.palette is None
    assert not mask.in_color


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF"])
def test_a_palette_file_holds_places_in_its_palette(kind):
    colors = np.random.default_rng(0).integers(0, 256, (256, 3))
    mask = decode_mask(saved(palette_image(IDS, colors), kind))
    if kind == "GIF":  # PIL sorts the palette of a GIF again
        np.testing.assert_array_equal(mask.palette[mask.values], colors[IDS])
    else:
        np.testing.assert_array_equal(mask.values, IDS)
        np.testing.assert_array_equal(mask.palette[:24], colors[:24])


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_small_palette_holds_ids(bits):
    ids = IDS % 2**bits
    colors = np.random.default_rng(0).integers(0, 256, (2**bits, 3))
    np.testing.assert_array_equal(decode_mask(saved(palette_image(ids, colors), bits=bits)).values, ids)


def test_transparency_of_a_palette_changes_nothing():
    image = palette_image(IDS, np.arange(768).reshape(256, 3) % 251)
    np.testing.assert_array_equal(decode_mask(saved(image, transparency=3)).values, IDS)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_grey_values_of_few_bits_are_not_spread(bits):
    """A PNG written by hand: PIL writes no grey PNG of 2 or 4 bits, and spreads their values when it reads them."""
    import struct
    import zlib

    ids = np.arange(16).reshape(2, 8) % 2**bits
    lines = [b"\0" + np.packbits(_bits(line, bits)).tobytes() for line in ids]

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 8, 2, bits, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(lines)))
    np.testing.assert_array_equal(decode_mask(data + chunk(b"IEND", b"")).values, ids)


def _bits(values, bits):
    return [value >> place & 1 for value in values.tolist() for place in reversed(range(bits))]


def test_ids_of_16_and_32_bits():
    ids = np.array([[0, 255, 256], [1000, 40000, 65535]], dtype=np.uint16)
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(ids))).values, ids)
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(ids), "TIFF")).values, ids)
    wide = ids.astype(np.int32) * 100
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(wide), "TIFF")).values, wide)


def test_a_black_and_white_file_has_the_ids_0_and_1():
    ids = IDS % 2
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(ids.astype(bool)))).values, ids)


def test_colours_stay_and_alpha_is_dropped():
    colors = np.random.default_rng(0).integers(0, 256, (4, 6, 4), dtype=np.uint8)
    for channels in (3, 4):
        mask = decode_mask(saved(Image.fromarray(colors[..., :channels])))
        assert mask.in_color
        np.testing.assert_array_equal(mask.values, colors[..., :3])
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(colors[..., :2], "LA"))).values, colors[..., 0])


def test_the_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # the image is to be turned clockwise
    np.testing.assert_array_equal(decode_mask(saved(Image.fromarray(IDS), exif=exif)).values, np.rot90(IDS, -1))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: saved(Image.fromarray(IDS), "JPEG"), "JPEG file does not keep"),
        (lambda: saved(Image.fromarray(np.stack([IDS] * 3, -1)), "WEBP", lossless=True), "WEBP file does not keep"),
        (lambda: saved(Image.fromarray(IDS.astype(np.float32)), "TIFF"), "of PIL mode F"),
        (lambda: saved(Image.fromarray(np.stack([IDS] * 4, -1), "CMYK"), "TIFF"), "of PIL mode CMYK"),
        (lambda: saved(Image.fromarray(IDS))[:50], "truncated or damaged"),
        (lambda: b"", "empty"),
        (lambda: b"no image", "no image"),
    ],
)
def test_a_file_that_is_no_mask_is_named(data, says):
    with pytest.raises(DataError, match=says) as caught:
        decode_mask(data(), where="masks/a.png")
    assert caught.value.where == "masks/a.png"


def test_a_real_mask(shared_data):
    path = next((shared_data / "segmentation" / "camvid" / "val" / "masks").iterdir())
    mask = decode_mask(path.read_bytes())
    np.testing.assert_array_equal(mask.values, np.array(Image.open(path)))
    assert mask.values.max() <= 11
    assert mask.palette[:2].tolist() == [[128, 128, 128], [128, 0, 0]]
