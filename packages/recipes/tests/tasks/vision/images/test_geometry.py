"""Geometry against PIL and plain NumPy; image, mask and boxes move alike."""

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.images import geometry
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, contiguous, rows, stack_images
from packages.recipes.tests.tasks.vision.images.images import colours, extent, rectangle

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def numbers(picture):
    return rows(picture.image).numpy().astype(int)


def levels_apart(picture, pil):
    return np.abs(numbers(picture) - np.asarray(pil).astype(int).reshape(numbers(picture).shape)).max()


def assert_alike(picture, tolerance=1):
    """The rectangle is at the same place in image, mask and box, up to `tolerance` pixels."""
    box = picture.boxes[0].tolist()
    assert box == pytest.approx(extent(picture.image[0] >= 100), abs=tolerance)
    assert box == pytest.approx(extent(picture.mask == 3), abs=tolerance)


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("size", [(24, 32), (48, 64), (31, 17), (100, 150), (7, 200), (1, 1)])
def test_resize_is_pils(size, interpolation):
    pixels = colours()
    picture = geometry.resize(AnnotatedImage.from_pixels(pixels), size, interpolation=interpolation)
    assert picture.size == size
    assert picture.image.dtype == torch.uint8
    mixed = interpolation == "bicubic" and (size[0] < 48) != (size[1] < 64)  # PIL begins with the other side
    assert mixed or levels_apart(picture, Image.fromarray(pixels).resize(size[::-1], FILTERS[interpolation])) <= 2


@pytest.mark.parametrize("interpolation", FILTERS)
def test_a_crop_that_is_resized_is_pils(interpolation):
    pixels = colours(375, 500)
    cut = geometry.crop(AnnotatedImage.from_pixels(pixels), (50, 60, 260, 300))
    picture = geometry.resize(cut, (224, 224), interpolation=interpolation)
    pil = Image.fromarray(pixels).crop((60, 50, 360, 310)).resize((224, 224), FILTERS[interpolation])
    assert levels_apart(picture, pil) <= 1


def test_grey_pictures_are_resized_as_pil_does():
    pixels = colours()[..., 2:]
    cut = geometry.crop(AnnotatedImage.from_pixels(np.ascontiguousarray(pixels)), (3, 5, 40, 50))
    picture = geometry.resize(cut, (20, 30))
    assert picture.image.shape == (1, 20, 30)
    pil = Image.fromarray(pixels[..., 0]).crop((5, 3, 55, 43)).resize((30, 20), Image.Resampling.BILINEAR)
    assert levels_apart(picture, pil) <= 1


def test_masks_are_resized_as_pil_does():
    mask = torch.from_numpy(colours()[..., 2].astype(np.int64))
    for size in [(24, 32), (31, 17), (100, 150), (48, 64), (1, 1)]:
        moved = geometry.resize(AnnotatedImage.from_pixels(colours(), mask), size).mask
        lines, columns = ((np.arange(side) + 0.5) / side for side in size)
        expected = mask.numpy()[(lines * 48 + 1e-9).astype(int)][:, (columns * 64 + 1e-9).astype(int)]
        np.testing.assert_array_equal(moved.numpy(), expected)
        pil = Image.fromarray(mask.numpy().astype(np.uint8)).resize(size[::-1], Image.Resampling.NEAREST)
        assert size == (1, 1) or (moved.numpy() == np.asarray(pil)).mean() > 0.95  # PIL rounds some centres down
        assert moved.dtype == torch.int64


@pytest.mark.cases("bilinear")
@pytest.mark.parametrize("interpolation", FILTERS)
def test_resize_crop_is_resize_and_crop(interpolation):
    draw = np.random.default_rng(1)
    for _ in range(150):
        height, width, tall, wide = (int(side) for side in draw.integers(1, 90, 4))
        top, left = int(draw.integers(0, tall)), int(draw.integers(0, wide))
        region = (top, left, int(draw.integers(1, tall - top + 1)), int(draw.integers(1, wide - left + 1)))
        picture = AnnotatedImage.from_pixels(
            draw.integers(0, 256, (height, width, 3), np.uint8),
            torch.from_numpy(draw.integers(0, 9, (height, width))),
            torch.tensor([[0.0, 0.0, width / 2, height], [width / 3, height / 4, width, height]]),
        )
        both = geometry.crop(geometry.resize(picture, (tall, wide), interpolation=interpolation), region)
        at_once = geometry.resize_crop(picture, (tall, wide), region, interpolation=interpolation)
        assert (both.image.int() - at_once.image.int()).abs().max() <= 1, (picture.size, (tall, wide), region)
        assert torch.equal(both.mask, at_once.mask)
        torch.testing.assert_close(both.boxes, at_once.boxes)
        assert torch.equal(both.box_indices, at_once.box_indices)


def test_crop_is_a_part_of_the_same_memory():
    picture = rectangle()
    part = geometry.crop(picture, (10, 20, 30, 40))
    assert part.image.data_ptr() == picture.image[:, 10:, 20:].data_ptr()
    assert part.boxes.tolist() == [[0, 5, 30, 30]]
    assert_alike(part, 0)


@pytest.mark.parametrize("region", [(0, 0, 61, 80), (0, 0, 60, 81), (-1, 0, 10, 10), (0, 0, 0, 10)])
def test_a_region_outside_of_the_picture_is_an_error(region):
    with pytest.raises(ValueError, match="region"):
        geometry.crop(rectangle(), region)


@pytest.mark.parametrize(
    "move",
    [
        lambda p: geometry.crop(p, (5, 7, 50, 60)),
        lambda p: geometry.crop(p, (20, 30, 40, 50)),
        lambda p: geometry.flip(p),
        lambda p: geometry.flip(p, vertical=True),
        lambda p: geometry.flip(geometry.flip(p), vertical=True),
        lambda p: geometry.pad(p, top=3, left=5, bottom=7, right=11, mask_fill=9),
        lambda p: geometry.affine(p, ((1, 0, 9), (0, 1, -4))),
        lambda p: geometry.affine(p, ((1, 0, -40), (0, 1, 30))),
    ],
)
def test_moves_by_whole_pixels_are_exact(move):
    moved = move(rectangle())
    assert_alike(moved, 0)
    assert set(moved.image.unique().tolist()) == {0, 200}


@pytest.mark.parametrize(
    "move",
    [
        lambda p: geometry.resize(p, (120, 160)),
        lambda p: geometry.resize(p, (30, 100)),
        lambda p: geometry.resize(geometry.crop(p, (5, 10, 45, 55)), (70, 70)),
        lambda p: geometry.resize_crop(p, (90, 110), (10, 15, 70, 70)),
        lambda p: geometry.affine(p, ((1.3, 0, -5), (0, 0.8, 6))),
        lambda p: geometry.affine(p, ((1, 0.3, 0), (0, 1, 0))),
        lambda p: geometry.affine(p, ((1, 0, 0), (-0.2, 1, 10))),
        lambda p: geometry.affine(p, geometry.about((40, 30), geometry.rotation(90))),
        lambda p: geometry.affine(p, geometry.about((40, 30), geometry.rotation(20))),
    ],
)
def test_image_mask_and_boxes_move_alike(move):
    assert_alike(move(rectangle()), 1.5)


def test_rotation_and_shear_are_pils():
    pixels = colours()
    picture = AnnotatedImage.from_pixels(pixels, torch.from_numpy(pixels[..., 2].astype(np.int64)))
    turn = geometry.about((32, 24), geometry.rotation(25))
    for matrix in (turn, ((1, 0.3, 0), (0, 1, 0)), ((1, 0, 0), (-0.25, 1, 0)), ((0.8, 0.1, 3.3), (0, 1.4, -2.2))):
        moved = geometry.affine(picture, matrix, fill=50, mask_fill=255)
        inverse = np.linalg.inv(np.array([*matrix, (0, 0, 1)]))[:2].reshape(-1)
        pil = Image.fromarray(pixels).transform((64, 48), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)
        inner = np.asarray(
            Image.new("L", (64, 48), 255).transform(
                (64, 48), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR
            )
        )
        whole = np.asarray(Image.fromarray(inner).reduce(1)) == 255
        whole[1:-1, 1:-1] &= np.minimum.reduce(
            [whole[:-2, 1:-1], whole[2:, 1:-1], whole[1:-1, :-2], whole[1:-1, 2:]]
        )  # PIL repeats the pixels at the edge
        apart = np.abs(numbers(moved) - np.asarray(pil).astype(int)).max(-1)
        assert apart[1:-1, 1:-1][whole[1:-1, 1:-1]].max() <= 2
        nearest = Image.fromarray(pixels[..., 2]).transform(
            (64, 48), Image.Transform.AFFINE, inverse, Image.Resampling.NEAREST, fillcolor=255
        )
        assert (moved.mask.numpy() == np.asarray(nearest)).mean() > 0.995  # rounding at edges of pixels
    turned = np.asarray(Image.fromarray(pixels).rotate(25, Image.Resampling.NEAREST))
    ours = geometry.affine(picture, turn, mask_fill=0).mask.numpy()
    assert (ours == turned[..., 2]).mean() > 0.98  # the same direction as PIL's `rotate`


def test_uncovered_places_get_the_fill():
    moved = geometry.affine(rectangle(), ((1, 0, 20), (0, 1, 0)), fill=77, mask_fill=255)
    assert set(moved.image[:, :, :20].unique().tolist()) == {77}
    assert set(moved.mask[:, :20].unique().tolist()) == {255}
    padded = geometry.pad(rectangle(), top=4, right=2, fill=77, mask_fill=255)
    assert padded.size == (64, 82)
    assert set(padded.image[:, :4].unique().tolist()) == set(padded.image[:, :, -2:].unique().tolist()) == {77}
    assert set(padded.mask[:4].unique().tolist()) == {255}


def test_a_map_that_loses_the_plane_is_an_error():
    with pytest.raises(ValueError, match="inverted"):
        geometry.affine(rectangle(), ((1, 0, 0), (2, 0, 0)))


def test_boxes_that_lose_too_much_are_left_out():
    boxes = torch.tensor([[0.0, 0, 10, 10], [15, 0, 25, 10], [19.5, 0, 29.5, 10], [40, 0, 50, 10], [5, 5, 5, 9]])
    picture = AnnotatedImage.from_pixels(colours(), boxes=boxes)
    cut = geometry.crop(picture, (0, 0, 48, 20), min_visible=0.1)
    assert cut.box_indices.tolist() == [0, 1]
    assert cut.boxes.tolist() == [[0, 0, 10, 10], [15, 0, 20, 10]]
    again = geometry.crop(cut, (0, 12, 48, 8))
    assert again.box_indices.tolist() == [1]
    assert geometry.crop(picture, (0, 0, 48, 20), min_visible=0).box_indices.tolist() == [0, 1, 2]
    assert geometry.crop(picture, (30, 0, 5, 5)).boxes.shape == (0, 4)


def test_a_picture_without_boxes_in_it_stays_without():
    empty = AnnotatedImage.from_pixels(colours(), boxes=torch.zeros(0))
    for moved in (geometry.flip(empty), geometry.resize(empty, (9, 9)), geometry.affine(empty, ((1, 0, 1), (0, 1, 0)))):
        assert moved.boxes.shape == (0, 4)
        assert moved.box_indices.shape == (0,)


def test_targets_of_another_shape_are_errors():
    with pytest.raises(DataError, match="mask"):
        AnnotatedImage.from_pixels(colours(), torch.zeros(64, 48))
    for boxes in (torch.ones(2, 5), torch.tensor([[0, 0, float("nan"), 1]])):
        with pytest.raises(DataError, match="four finite numbers"):
            AnnotatedImage.from_pixels(colours(), boxes=boxes)


def test_the_originals_stay_as_they_were():
    picture, before = rectangle(), rectangle()
    geometry.affine(picture, ((1, 0.1, 5), (0, 1, 5)))
    geometry.flip(picture)
    geometry.resize_crop(picture, (30, 40), (1, 2, 20, 20))
    geometry.pad(picture, top=3)
    assert torch.equal(picture.image, before.image)
    assert torch.equal(picture.mask, before.mask)
    assert torch.equal(picture.boxes, before.boxes)


def test_a_batch_is_channels_last():
    images = [contiguous(geometry.crop(rectangle(), (number, 0, 30, 40))).image for number in range(4)]
    batch = stack_images(images)
    assert batch.shape == (4, 3, 30, 40)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch, torch.stack(images))
