"""Scale jitter, letterbox, crops that keep boxes, and mosaic: image, mask and boxes stay together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from lockstep_recipes.tasks.vision.images import geometry
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, rows
from lockstep_recipes.tasks.vision.images.augment import train_image
from lockstep_recipes.tasks.vision.images.mosaic import draw_others, mosaic
from lockstep_recipes.tasks.vision.images.options import AugmentOptions
from packages.recipes.tests.tasks.vision.images.images import colours, extent, rectangle
from tests.selection import mainly

BOX = (20, 15, 50, 40)  # of `rectangle`


def options(**keys):
    return AugmentOptions.model_validate({"crop": "scale_jitter", "flip": 0.0, "fill": 90, **keys})


def jittered(seed, picture, size, fit=None, **keys):
    torch.manual_seed(seed)
    return train_image(picture, size, options(**keys), mask_fill=-1, fit=fit)


def same(one, other):
    names = ("image", "mask", "boxes", "box_indices")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def marked(boxes, height=60, width=80):
    """An image in which box i has the grey level and the mask i + 1, and there is 0 elsewhere."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for number, (left, top, right, bottom) in enumerate(boxes, 1):
        pixels[top:bottom, left:right] = 50 * number
    mask = torch.from_numpy((pixels[..., 0] // 50).astype(np.int64))
    return AnnotatedImage.from_pixels(pixels, mask, torch.tensor(boxes, dtype=torch.float32))


# ---- options


def test_options_are_written_as_in_yaml():
    read = options(jitter=[0.1, 2])
    assert read.jitter == (0.1, 2)
    assert AugmentOptions.model_validate(read.model_dump(mode="json")) == read
    with pytest.raises(ValidationError, match="the smaller first"):
        options(jitter=[2, 0.5])


# ---- letterbox


@pytest.mark.parametrize(
    ("size", "frame", "inner"),
    [
        ((480, 640), (320, 320), (240, 320)),
        ((640, 480), (320, 320), (320, 240)),
        ((30, 40), (320, 320), (240, 320)),
        ((7, 900), (64, 64), (1, 64)),
        ((1, 5000), (64, 64), (1, 64)),
        ((33, 33), (64, 32), (32, 32)),
        ((333, 500), (416, 416), (277, 416)),
    ],
)
def test_the_whole_picture_lies_in_the_upper_left_corner(size, frame, inner):
    pixels = colours(*size)
    mask = torch.arange(size[0] * size[1], dtype=torch.int32).reshape(size)
    whole = torch.tensor([[0.0, 0, size[1], size[0]]])
    result, found = geometry.letterbox(AnnotatedImage.from_pixels(pixels, mask, whole), frame, fill=90, mask_fill=-1)
    assert found == inner == geometry.fitted_size(size, frame)
    assert result.size == tuple(result.mask.shape) == frame
    expected = np.full((*frame, 3), 90)
    expected[: inner[0], : inner[1]] = Image.fromarray(pixels).resize(inner[::-1], Image.Resampling.BILINEAR)
    assert np.abs(rows(result.image).numpy().astype(int) - expected).max() <= 2
    assert ((result.mask == -1).sum() == frame[0] * frame[1] - inner[0] * inner[1]).item()
    assert result.boxes.tolist() == [pytest.approx([0, 0, inner[1], inner[0]])]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 700), st.integers(1, 700))
def test_fitted_sizes_fit_and_touch_the_frame(height, width, tall, wide):
    inner = geometry.fitted_size((height, width), (tall, wide))
    assert 1 <= inner[0] <= tall
    assert 1 <= inner[1] <= wide
    assert inner[0] == tall or inner[1] == wide
    shorter = min(tall / height, wide / width)
    assert abs(inner[0] - height * shorter) <= max(0.5, 1 - height * shorter) + 1e-9
    assert abs(inner[1] - width * shorter) <= max(0.5, 1 - width * shorter) + 1e-9


def test_fit_in_training_is_the_letterbox_of_evaluation():
    result = train_image(rectangle(), 32, options(crop="fit"), mask_fill=-1)
    expected, _ = geometry.letterbox(rectangle(), (32, 32), fill=90, mask_fill=-1)
    assert same(result, expected)


# ---- scale jitter


def test_image_mask_and_boxes_move_alike():
    for seed in range(150):
        result = jittered(seed, rectangle(), (60, 80), min_visible=0.0)
        assert result.size == tuple(result.mask.shape) == (60, 80)
        found = extent(result.mask == 3)
        assert result.boxes[0].tolist() == pytest.approx(found, abs=1.0)
        inside = result.image[0] > 145  # between 90 and 200
        assert extent(inside) == pytest.approx(found, abs=1.0)
        assert (result.image[:, result.mask == -1] == 90).all()
        assert result.box_indices.tolist() == [0]
        assert rows(result.image).is_contiguous()


@pytest.mark.cases("size1-1.0")
@pytest.mark.parametrize("factor", mainly([0.5, 1.0], [0.5, 1.0, 2.0]))
@pytest.mark.parametrize("size", [(48, 64), (64, 64), (40, 100)])
def test_pixels_are_those_of_pil_at_the_drawn_scale(factor, size):
    """What PIL resizes is found somewhere in the frame, or the frame somewhere in what PIL resizes."""
    pixels = colours(48, 64)
    whole = geometry.scaled_size((48, 64), factor * min(size[0] / 48, size[1] / 64))
    large = np.array(Image.fromarray(pixels).resize(whole[::-1], Image.Resampling.BILINEAR)).astype(int)
    places = set()
    for seed in range(12):
        mask = torch.arange(48 * 64, dtype=torch.int64).reshape(48, 64)
        result = jittered(seed, AnnotatedImage.from_pixels(pixels, mask), size, jitter=[factor, factor])
        image, known = rows(result.image).numpy().astype(int), result.mask >= 0
        left, top, right, bottom = extent(known)
        assert known[top:bottom, left:right].all()
        assert (bottom - top, right - left) == (min(whole[0], size[0]), min(whole[1], size[1]))
        seen = image[top:bottom, left:right]
        offsets = [
            (down, across)
            for down in range(max(0, whole[0] - size[0]) + 1)
            for across in range(max(0, whole[1] - size[1]) + 1)
            if np.abs(large[down : down + seen.shape[0], across : across + seen.shape[1]] - seen).max() <= 2
        ]
        assert len(offsets) == 1
        places.add((top, left, *offsets[0]))
    assert (len(places) > 1) == (whole != size)


@pytest.mark.exhaustive  # as test_objects_keep_the_sizes_of_the_whole_frame
def test_scales_and_places_are_uniform():
    sizes, shares = [], []
    for seed in range(600):
        picture = AnnotatedImage.from_pixels(np.zeros((50, 100, 3), np.uint8), torch.zeros(50, 100, dtype=torch.int8))
        left, top, right, bottom = extent(jittered(seed, picture, 100, jitter=[0.2, 0.9]).mask == 0)
        sizes.append((right - left) / 100)
        assert bottom - top == pytest.approx((right - left) / 2, abs=1)
        shares.append([left / (100 - (right - left)), top / (100 - (bottom - top))])
    assert np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([0.2, 0.375, 0.55, 0.725, 0.9], abs=0.04)
    for along in np.array(shares).T:
        assert np.quantile(along, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.06)


def test_pictures_depend_on_torchs_generator_alone():
    picture = rectangle()
    torch.manual_seed(1)
    others = [jittered(seed, picture, 40) for seed in range(10)]
    np.random.seed(3)
    again = [jittered(seed, picture, 40) for seed in range(10)]
    assert all(same(one, other) for one, other in zip(others, again, strict=True))
    assert not all(same(others[0], other) for other in others[1:])
    assert same(picture, rectangle())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 33), st.integers(1, 33), st.integers(0, 10**6))
def test_pictures_of_any_size_can_be_jittered(height, width, tall, wide, seed):
    mask = torch.zeros(height, width, dtype=torch.int8)
    picture = AnnotatedImage.from_pixels(colours(height, width), mask, torch.tensor([[0.0, 0, width, height]]))
    result = jittered(seed, picture, (tall, wide))
    assert result.size == tuple(result.mask.shape) == (tall, wide)
    assert len(result.boxes) == 1
    assert (result.mask == 0).any()


def test_a_mask_that_cannot_hold_the_ignored_value_is_an_error():
    picture = AnnotatedImage.from_pixels(colours(), torch.zeros(48, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8 cannot hold mask_fill=-1"):
        train_image(picture, 8, options(), mask_fill=-1)


# ---- crops that keep boxes

SMALL = [(2, 2, 6, 6), (70, 50, 76, 56)]


@pytest.mark.parametrize(
    "keys", mainly([{"jitter": [1.5, 4]}], [{"jitter": [1.5, 4]}, {"crop": "random_resized", "scale": [0.02, 0.3]}])
)
def test_a_part_has_at_least_one_box(keys):
    losses = []
    for seed in range(150):
        kept = jittered(seed, marked(SMALL), (60, 80), **keys, min_visible=0.5)
        assert len(kept.boxes) >= 1
        loose = jittered(seed, marked(SMALL), (60, 80), **keys, min_visible=0.5, keep_boxes=False)
        losses.append(len(loose.boxes) == 0)
        if not losses[-1]:
            assert same(loose, kept)  # no further number was drawn
    assert 20 < sum(losses) < 149


def test_boxes_that_are_kept_are_visible_and_keep_their_numbers():
    boxes = [(5, 5, 25, 25), (40, 10, 70, 30), (10, 35, 60, 55)]
    for seed in range(100):
        result = jittered(seed, marked(boxes), (60, 80), min_visible=0.3)
        for box, number in zip(result.boxes.tolist(), result.box_indices.tolist(), strict=True):
            assert extent(result.mask == number + 1) == pytest.approx(box, abs=1.0)


def test_a_box_that_no_part_can_show_gives_the_whole_picture():
    picture = rectangle(box=(0, 0, 80, 60))
    for crop, keys in (("random_resized", {"scale": [0.01, 0.02]}), ("scale_jitter", {"jitter": [4, 5]})):
        result = jittered(0, picture, (60, 80), crop=crop, min_visible=0.5, **keys)
        assert result.boxes.tolist() == [[0, 0, 80, 60]]
        assert torch.equal(result.image, picture.image)


# ---- mosaic


def four():
    return [marked([BOX, (0, 0, 9, 9)], *size) for size in ((60, 80), (80, 60), (60, 60), (41, 97))]


def test_four_pictures_with_their_boxes_and_masks():
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        result = mosaic(four(), (60, 80), options(min_visible=0.2), mask_fill=-1)
        assert result.size == tuple(result.mask.shape) == (60, 80)
        assert rows(result.image).is_contiguous()
        assert len(result.boxes) >= 4  # at least one of each
        assert {index // 2 for index in result.box_indices.tolist()} == {0, 1, 2, 3}
        for box, index in zip(result.boxes.tolist(), result.box_indices.tolist(), strict=True):
            left, top, right, bottom = box
            assert 0 <= left < right <= 80
            assert 0 <= top < bottom <= 60
            middle = result.mask[int((top + bottom) / 2), int((left + right) / 2)]
            assert middle == 1 + index % 2
        seen |= set(result.box_indices.tolist())
    assert seen == set(range(8))


def test_the_quarters_are_training_pictures_of_their_own():
    torch.manual_seed(5)
    down, across = (0.25 + 0.5 * torch.rand(2, dtype=torch.float64)).tolist()
    middle, centre = round(40 * down), round(48 * across)
    sizes = [(middle, centre), (middle, 48 - centre), (40 - middle, centre), (40 - middle, 48 - centre)]
    chosen = options(flip=0.5)
    parts = [
        train_image(picture, size, chosen, mask_fill=-1, fit=(40, 48))
        for picture, size in zip(four(), sizes, strict=True)
    ]
    torch.manual_seed(5)
    result = mosaic(four(), (40, 48), chosen, mask_fill=-1)
    images = [torch.cat([rows(part.image) for part in pair], 1) for pair in (parts[:2], parts[2:])]
    assert torch.equal(rows(result.image), torch.cat(images))
    masks = [torch.cat([part.mask for part in pair], 1) for pair in (parts[:2], parts[2:])]
    assert torch.equal(result.mask, torch.cat(masks))
    assert len(result.boxes) == sum(len(part.boxes) for part in parts)


def test_objects_keep_the_sizes_of_the_whole_frame():
    torch.manual_seed(0)
    result = mosaic([rectangle() for _ in range(4)], (60, 80), options(jitter=[1, 1], min_visible=0.999))
    widths = (result.boxes[:, 2] - result.boxes[:, 0]).tolist()
    assert any(width == pytest.approx(30, abs=0.1) for width in widths)


def test_pictures_without_boxes_or_masks():
    plain = [AnnotatedImage.from_pixels(colours()) for _ in range(4)]
    result = mosaic(plain, 32, options())
    assert result.mask is None
    assert result.boxes is None
    empty = [AnnotatedImage.from_pixels(colours(), boxes=torch.zeros(0, 4)) for _ in range(4)]
    assert mosaic(empty, 4, options()).boxes.shape == (0, 4)
    with pytest.raises(ValueError, match="4 images, not 3"):
        mosaic(plain[:3], 32, options())


def test_others_are_drawn_from_all_samples_with_the_probability():
    torch.manual_seed(0)
    drawn = [draw_others(10, 0.3) for _ in range(2000)]
    joined = [others for others in drawn if others]
    assert len(joined) / 2000 == pytest.approx(0.3, abs=0.04)
    counts = np.bincount(np.concatenate(joined), minlength=10)
    assert len(counts) == 10
    assert counts.min() > 0.8 * counts.mean()
    following = []
    for probability in (0.0, 1.0):
        torch.manual_seed(0)
        assert len(draw_others(10, probability)) == 3 * probability
        following.append(float(torch.rand(())))
    assert following[0] == following[1]  # both draw the same numbers
