"""Decoding against PIL: every mode, every orientation, and files that are no images."""

import io
import struct
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.vision.images import decode as module
from lockstep_recipes.tasks.vision.images.decode import decode, image_size
from lockstep_recipes.tasks.vision.readers.image_files import is_image
from lockstep_recipes.tasks.vision.readers.image_shards import read_shards
from packages.recipes.tests.tasks.vision.images.images import colours, encode
from packages.recipes.tests.tasks.vision.readers.test_image_records import shard

RGB = Image.fromarray(colours())
GREY = RGB.convert("L")
PALETTE = RGB.quantize(16)
ALPHA = Image.merge("RGBA", (*RGB.split(), GREY))


def palette_with_transparency():
    return encode(PALETTE, "PNG", transparency=bytes(range(0, 256, 16)))


def animation():
    return encode(RGB.quantize(8), "GIF", save_all=True, append_images=[GREY.quantize(8)], duration=10)


def reference(data, mode="RGB"):
    """What PIL gives: upright, and without transparency."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        pixels = np.array(image.convert("RGBA").convert(mode) if image.mode in ("P", "PA") else image.convert(mode))
    return pixels[..., None] if mode == "L" else pixels


CASES = {
    "jpeg": lambda: encode(RGB, "JPEG", quality=90),
    "progressive jpeg": lambda: encode(RGB, "JPEG", quality=90, progressive=True),
    "jpeg without subsampling": lambda: encode(RGB, "JPEG", quality=90, subsampling=0),
    "jpeg of RGB": lambda: encode(RGB, "JPEG", quality=90, keep_rgb=True),
    "grey jpeg": lambda: encode(GREY, "JPEG", quality=90),
    "CMYK jpeg": lambda: encode(RGB.convert("CMYK"), "JPEG", quality=90),
    "png": lambda: encode(RGB, "PNG"),
    "grey png": lambda: encode(GREY, "PNG"),
    "1-bit png": lambda: encode(RGB.convert("1"), "PNG"),
    "palette": lambda: encode(PALETTE, "PNG"),
    "palette with transparency": palette_with_transparency,
    "palette with a transparent colour": lambda: encode(PALETTE, "PNG", transparency=3),
    "RGBA": lambda: encode(ALPHA, "PNG"),
    "LA": lambda: encode(ALPHA.convert("LA"), "PNG"),
    "animated gif": animation,
    "tiff": lambda: encode(RGB, "TIFF"),
    "CMYK tiff": lambda: encode(RGB.convert("CMYK"), "TIFF"),
    "bmp": lambda: encode(RGB, "BMP"),
    "webp": lambda: encode(RGB, "WEBP", lossless=True),
}


@pytest.fixture(params=["simplejpeg", "PIL alone"])
def decoders(request, monkeypatch):
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(module, "_simplejpeg", lambda: None)


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", CASES)
def test_pixels_are_those_of_pil(case, channels, decoders):
    data = CASES[case]()
    pixels = decode(data, channels=channels)
    assert pixels.shape == (48, 64, channels)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, reference(data, "RGB" if channels == 3 else "L"))
    assert image_size(data) == (48, 64)


def test_ordinary_jpegs_do_not_need_pil(monkeypatch):
    pytest.importorskip("simplejpeg")
    monkeypatch.setattr(module, "opened", None)
    monkeypatch.setattr(Image, "open", None)
    data = encode(RGB, "JPEG")
    assert decode(data).shape == (48, 64, 3)
    assert image_size(data) == (48, 64)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_pictures_are_turned_upright(kind, orientation, decoders):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(RGB, kind, exif=exif)
    expected = reference(data)
    assert expected.shape == ((48, 64, 3) if orientation < 5 else (64, 48, 3))
    np.testing.assert_array_equal(decode(data), expected)
    assert decode(data).flags.c_contiguous
    assert image_size(data) == expected.shape[:2]


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures_of_one_row_become_tensors(size, orientation):
    """NumPy calls such an image contiguous, also where it is read backwards."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(RGB.resize(size), "PNG", exif=exif)
    assert torch.from_numpy(decode(data)).tolist() == reference(data).tolist()


@pytest.mark.parametrize("orientation", [0, 9, 60000])
def test_an_orientation_that_does_not_exist_is_upright(orientation, decoders):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decode(encode(RGB, "JPEG", exif=exif)).shape == (48, 64, 3)


def test_damaged_exif_data_does_not_spoil_a_picture(decoders):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(RGB, "JPEG", exif=exif)
    assert decode(data.replace(b"Exif\0\0MM", b"Exif\0\0XX").replace(b"Exif\0\0II", b"Exif\0\0XX")).shape == (48, 64, 3)


def test_xmp_may_give_the_orientation(decoders):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encode(RGB, "JPEG", xmp=xmp)
    assert decode(data).shape == (64, 48, 3) == reference(data).shape


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_are_scaled_and_rounded(kind, channels):
    values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    pixels = decode(encode(Image.fromarray(values), kind), channels=channels)
    assert pixels.shape == (64, 64, channels)
    expected = np.floor(values.astype(np.float64) * 255 / 65535 + 0.5)
    for channel in range(channels):
        np.testing.assert_array_equal(pixels[..., channel], expected)


def test_32_bits_are_read_only_where_16_would_do():
    fits = Image.fromarray(np.full((4, 5), 65535, np.int32))
    assert decode(encode(fits, "TIFF")).min() == 255
    with pytest.raises(DataError, match="65536"):
        decode(encode(Image.fromarray(np.full((4, 5), 65536, np.int32)), "TIFF"))
    with pytest.raises(DataError, match="floating-point"):
        decode(encode(Image.fromarray(np.ones((4, 5), np.float32)), "TIFF"), where="x.tif")


@pytest.mark.parametrize("case", ["jpeg", "grey jpeg", "CMYK jpeg", "png", "palette", "tiff", "webp"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_truncated_files_are_errors(case, share, decoders):
    data = CASES[case]()
    with pytest.raises(DataError, match=r"a\.file.*\n  remedy") as error:
        decode(data[: int(share * len(data))], where="a.file")
    assert error.value.where == "a.file"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"path,label\na.jpg,1\n" * 20, r"not an image.*380 bytes that start with b'path,label"),
        (b"\xff\xd8\xff\xe0", "not an image|damaged"),
        (b"\xff\xd8" + b"\xff" * 100, "not an image|damaged"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "not an image|damaged"),
    ],
)
@pytest.mark.parametrize("read", [decode, image_size])
def test_files_that_are_no_pictures_are_errors(read, data, message, decoders):
    with pytest.raises(DataError, match=message):
        read(data)


def bomb_png(side=20_000):
    """A PNG whose header promises side x side pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_000, 20_000])  # PIL warns of the first, and refuses the second
@pytest.mark.parametrize("read", [decode, image_size])
def test_decompression_bombs_are_errors(read, side):
    with pytest.raises(DataError, match="too large") as error:
        read(bomb_png(side))
    assert "MAX_IMAGE_PIXELS" in error.value.remedy


def test_the_limit_of_pil_holds_for_jpegs(monkeypatch, decoders):
    data = encode(RGB, "JPEG")
    for limit, refused in ((48 * 64 - 1, True), (48 * 64, False), (None, False)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        if refused:
            with pytest.raises(DataError, match="too large"):
                decode(data)
        else:
            assert decode(data).shape == (48, 64, 3)


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(UsageError, match="4 channels"):
        decode(encode(RGB, "PNG"), channels=4)


def test_real_photographs_are_decoded_as_pil_does(shared_data):
    files = [*sorted((shared_data / "classification/bccd_cells/val").rglob("*.jpg"))[:10]]
    files += sorted((shared_data / "segmentation/camvid/val/images").iterdir())[:5]
    for file in files:
        data = file.read_bytes()
        np.testing.assert_array_equal(decode(data, where=str(file)), reference(data))
        assert image_size(data) == reference(data).shape[:2]


# ---- HEIC


@pytest.fixture
def heic(monkeypatch):
    """A HEIC file, and what stands in for pillow-heif: PIL then reads files of this kind as a PNG after 12 bytes."""
    data = b"\0\0\0\x0cftypheic" + encode(RGB, "PNG")
    registered = []

    class Opener:
        @staticmethod
        def register_heif_opener():
            registered.append(True)
            plain = Image.open

            def opened(file, *rest):
                content = file.read()
                return plain(io.BytesIO(content[12:] if content[4:8] == b"ftyp" else content), *rest)

            monkeypatch.setattr(Image, "open", opened)

    module.reads_heif.cache_clear()
    yield data, lambda: monkeypatch.setitem(sys.modules, "pillow_heif", Opener), registered
    module.reads_heif.cache_clear()


def test_heic_is_read_where_pillow_heif_is_installed(heic):
    data, install, registered = heic
    install()
    assert np.array_equal(decode(data), np.asarray(RGB))
    assert image_size(data) == RGB.size[::-1]
    assert is_image("IMG_1.HEIC")
    assert registered == [True]


def test_heic_in_a_shard_is_read_where_pillow_heif_is_installed(heic, monkeypatch, tmp_path):
    data, install, _ = heic
    made = str(shard(tmp_path / "s.tar", [("a.HEIC", data), ("b.png", encode(RGB, "PNG"))]))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    pictures, _, _, notes = read_shards(made, label="label", labelled=False)
    assert len(pictures) == 1
    assert notes == ("left out: 1 member of 1 shard without an image",)
    module.reads_heif.cache_clear()
    install()
    pictures, _, _, notes = read_shards(made, label="label", labelled=False)  # not by the index of before
    assert (len(pictures), notes) == (2, ())
    assert np.array_equal(decode(pictures.read(0)), np.asarray(RGB))


def test_heic_without_pillow_heif_is_an_error_that_names_it(heic, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(DataError, match=r"HEIC image, which needs pillow-heif(?s:.*)pip install pillow-heif"):
        decode(heic[0], where="a.heic")
    assert not is_image("IMG_1.HEIC")
