"""Training and evaluation images: what is random, what stays, and that targets move with the image."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.images import policies
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, rows
from lockstep_recipes.tasks.vision.images.augment import AugmentOptions, eval_image, train_image
from lockstep_recipes.tasks.vision.images.options import ColorJitterOptions, RandAugmentOptions, RandomErasingOptions
from packages.recipes.tests.tasks.vision.images.images import colours, extent, rectangle
from tests.selection import mainly

PLAIN = {"crop": "resize", "flip": 0.0}
EVERYTHING = {
    "vertical_flip": 0.3,
    "randaugment": {"magnitude": 15},
    "color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "random_erasing": {"probability": 0.5},
}


def options(**keys):
    return AugmentOptions.model_validate(keys)


def trained(seed, picture, size=40, **keys):
    torch.manual_seed(seed)
    return train_image(picture, size, options(**keys))


def same(one, other):
    pairs = [(one.image, other.image), (one.mask, other.mask), (one.boxes, other.boxes)]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


# ---- options


def test_options_are_written_as_in_yaml():
    read = options(
        scale=[0.25, 1], color_jitter={"brightness": 0.4}, randaugment={}, random_erasing={"area": [0.1, 0.2]}
    )
    assert read.scale == (0.25, 1)
    assert read.randaugment == RandAugmentOptions(operations=2, magnitude=9)
    assert read.color_jitter == ColorJitterOptions(brightness=0.4)
    assert AugmentOptions.model_validate(read.model_dump(mode="json")) == read


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scale": [0.5, 0.2]}, "the smaller first"),
        ({"scale": [0.5, 1.2]}, "at most 1"),
        ({"scale": [0.5]}, "scale"),
        ({"scale": ["0.1", 1]}, "valid number"),
        ({"ratio": [0, 1]}, "positive"),
        ({"flip": 1.5}, "less than or equal to 1"),
        ({"fill": 256}, "less than or equal to 255"),
        ({"crop": "random"}, "random_resized"),
        ({"flips": 0.5}, "Extra inputs"),
        ({"randaugment": {}, "trivialaugment": True}, "not both"),
        ({"randaugment": {"magnitude": 31}}, "less than or equal to 30"),
    ],
)
def test_options_that_cannot_be_meant_are_errors(keys, message):
    with pytest.raises(ValidationError, match=message):
        options(**keys)


# ---- training


@pytest.mark.cases("keys2-size1-3")
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("size", mainly([(24, 40)], [17, (24, 40), 64]))
@pytest.mark.parametrize("keys", [{}, PLAIN, {"crop": "shift"}, EVERYTHING, {"trivialaugment": True}])
def test_results_have_the_size_and_the_memory_of_a_batch(keys, size, channels):
    pixels = np.ascontiguousarray(colours(50, 70)[..., :channels])
    for seed in range(20):
        picture = AnnotatedImage.from_pixels(pixels, torch.ones(50, 70, dtype=torch.uint8))
        result = trained(seed, picture, size, **keys)
        assert result.size == ((size, size) if isinstance(size, int) else size)
        assert tuple(result.mask.shape) == result.size
        assert result.image.shape[0] == channels
        assert result.image.dtype == torch.uint8
        assert rows(result.image).is_contiguous()
    np.testing.assert_array_equal(pixels, colours(50, 70)[..., :channels])


@pytest.mark.cases("keys0")
@pytest.mark.parametrize("keys", [{}, {"crop": "shift"}, EVERYTHING, {"trivialaugment": True}])
def test_pictures_depend_on_torchs_generator_alone(keys):
    import random

    picture = rectangle()
    pictures = []
    for other in range(2):
        np.random.seed(other)
        random.seed(other)
        state = np.random.get_state()[1].copy(), random.getstate()
        pictures.append([trained(seed, picture, **keys) for seed in range(10)])
        assert (np.random.get_state()[1] == state[0]).all()
        assert random.getstate() == state[1]
    assert all(same(one, other) for one, other in zip(*pictures, strict=True))
    assert not all(same(pictures[0][0], other) for other in pictures[0][1:])


GEOMETRY = [
    {"flip": 0.5, "vertical_flip": 0.5},
    {"crop": "shift", "shift": 9},
    {"crop": "resize", "randaugment": {"operations": 3, "magnitude": 12}},
    {"crop": "resize", "trivialaugment": True},
    {"scale": [0.5, 1], **EVERYTHING, "random_erasing": None},
]


@pytest.mark.cases("keys0")
@pytest.mark.parametrize("keys", GEOMETRY)
def test_mask_and_image_move_alike(keys):
    """Also under colour operations: the rectangle has other colours than the rest, or the image has one colour."""
    for seed in range(60):
        pixels = np.zeros((60, 80, 3), np.uint8)
        pixels[15:40, 20:50] = 200
        mask = torch.from_numpy((pixels[..., 0] > 0).astype(np.int64))
        result = trained(seed, AnnotatedImage.from_pixels(pixels, mask), (60, 80), **{"fill": 0, **keys})
        grey = result.image.float().mean(0)
        inside, outside = grey[result.mask == 1], grey[result.mask == 0]
        if len(inside) > 50 and len(outside) > 50:
            apart = inside.median() - outside.median()
            wrong = ((grey - outside.median()).abs() < 0.3 * apart.abs()) & (result.mask == 1)
            wrong |= ((grey - inside.median()).abs() < 0.3 * apart.abs()) & (result.mask == 0)
            assert wrong.sum() <= 0.1 * len(inside), (seed, apart)


@pytest.mark.cases("keys1")
@pytest.mark.parametrize("keys", [*GEOMETRY[:2], {"scale": [0.3, 1]}])
def test_boxes_and_mask_move_alike(keys):
    for seed in range(60):
        result = trained(seed, rectangle(), (60, 80), **keys, min_visible=0.0)
        if (result.mask == 3).sum() > 20:
            assert result.boxes[0].tolist() == pytest.approx(extent(result.mask == 3), abs=1.0)
            assert result.box_indices.tolist() == [0]


@pytest.mark.cases("keys1")
@pytest.mark.parametrize("keys", [{"randaugment": {"magnitude": 20}}, {"trivialaugment": True}])
def test_boxes_contain_the_mask(keys):
    for seed in range(60):
        result = trained(seed, rectangle(), (60, 80), crop="resize", min_visible=0.0, **keys)
        if (result.mask == 3).any():
            left, top, right, bottom = extent(result.mask == 3)
            box = result.boxes[0].tolist()
            assert box[0] <= left + 1
            assert box[1] <= top + 1
            assert box[2] >= right - 1
            assert box[3] >= bottom - 1


def test_places_that_no_pixel_reaches_are_ignored_in_the_mask():
    for seed in range(20):
        result = trained(seed, rectangle(), (60, 80), crop="shift", shift=10, flip=0.0, fill=90)
        ignored = result.mask == 255
        assert (result.image[:, ignored] == 90).all()
        assert (result.image[:, ~ignored] != 90).all()


@pytest.mark.exhaustive
def test_crops_have_the_area_and_the_shape_that_were_asked_for(monkeypatch):
    from lockstep_recipes.tasks.vision.images import geometry

    seen, original = [], geometry.crop
    monkeypatch.setattr(
        geometry,
        "crop",
        lambda picture, region, *more, **keys: seen.append(region) or original(picture, region, *more, **keys),
    )
    for seed in range(400):
        trained(seed, AnnotatedImage.from_pixels(colours(375, 500)), 8)
    areas = np.array([height * width for _, _, height, width in seen]) / (375 * 500)
    shapes = np.array([width / height for _, _, height, width in seen])
    assert 0.075 <= areas.min() < 0.12
    assert 0.9 < areas.max() <= 1
    assert 0.74 <= shapes.min() < 0.77
    assert 1.3 < shapes.max() <= 1.35
    assert abs(np.log(shapes).mean()) < 0.03
    assert {0 <= top <= 375 - height and 0 <= left <= 500 - width for top, left, height, width in seen} == {True}


def test_long_pictures_give_their_middle():
    picture = AnnotatedImage.from_pixels(colours(4, 400))
    result = trained(0, picture, (8, 8), scale=[0.9, 1], flip=0.0)
    assert result.image[0].float().mean() == pytest.approx(127, abs=3)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 33), st.integers(0, 10**6))
def test_pictures_of_any_size_can_be_augmented(height, width, size, seed):
    picture = AnnotatedImage.from_pixels(colours(height, width), boxes=torch.tensor([[0.0, 0, width, height]]))
    for keys in (EVERYTHING, {"crop": "shift", "trivialaugment": True}):
        assert trained(seed, picture, size, **keys).size == (size, size)


def test_erasing_hides_a_rectangle_of_the_image_alone():
    erasing = {"probability": 1.0, "area": [0.1, 0.2], "content": "fill"}
    noise = {"probability": 1.0, "area": [0.1, 0.2]}
    original = rectangle()
    for seed in range(20):
        result = trained(seed, original, (60, 80), **PLAIN, random_erasing=erasing, fill=33)
        assert 0.09 < (result.image == 33).all(0).float().mean() < 0.21
        assert torch.equal(result.mask, original.mask)
        noisy = trained(seed, original, (60, 80), **PLAIN, random_erasing=noise)
        changed = (noisy.image != original.image).any(0)
        assert 0.09 < changed.float().mean() < 0.21
        assert len(noisy.image[:, changed].unique()) > 200
    assert same(original, rectangle())


def test_probabilities_are_kept():
    def share(changed, **keys):
        return np.mean([changed(trained(seed, rectangle(), (60, 80), **keys)) for seed in range(150)])

    def moved(picture):
        return not torch.equal(picture.mask, rectangle().mask)

    def coloured(picture):
        return not torch.equal(picture.image, rectangle().image)

    assert share(moved, crop="resize", flip=0.5) == pytest.approx(0.5, abs=0.08)
    assert share(moved, crop="resize", flip=0.0, vertical_flip=0.2) == pytest.approx(0.2, abs=0.08)
    jitter = {"probability": 0.8, "brightness": 0.4}
    assert share(coloured, **PLAIN, color_jitter=jitter) == pytest.approx(0.8, abs=0.08)
    erasing = RandomErasingOptions(probability=0.25).model_dump()
    assert share(coloured, **PLAIN, random_erasing=erasing) == pytest.approx(0.25, abs=0.08)


# ---- policies


def test_the_operations_are_those_of_the_paper():
    paper = {
        *("Identity", "AutoContrast", "Equalize", "Rotate", "Solarize", "Color", "Posterize"),
        *("Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY"),
    }
    assert set(policies.RANDAUGMENT) == set(policies.TRIVIALAUGMENT) == paper


@pytest.mark.parametrize("operations", [policies.RANDAUGMENT, policies.TRIVIALAUGMENT])
def test_magnitude_0_changes_nothing_and_30_something(operations):
    picture = AnnotatedImage.from_pixels(colours() // 2 + 20)
    for name, operation in operations.items():
        for negative in (True, False):
            weak, strong = (
                policies._apply(operation, picture, level, negative=negative, options=options(), mask_fill=0)
                for level in (0, 30)
            )
            assert name in ("AutoContrast", "Equalize") or same(weak, picture), name
            assert name == "Identity" or not same(strong, picture), name


def test_all_operations_are_drawn_equally_often(monkeypatch):
    drawn = []
    monkeypatch.setattr(policies, "_apply", lambda operation, picture, *_, **__: drawn.append(operation) or picture)
    torch.manual_seed(0)
    picture = rectangle()
    for _ in range(2000):
        policies.rand_augment(picture, operations=2, magnitude=9, options=options(), mask_fill=0)
    counts = [drawn.count(operation) for operation in policies.RANDAUGMENT.values()]
    assert sum(counts) == 4000
    assert 200 < min(counts) <= max(counts) < 380


# ---- evaluation


@pytest.mark.parametrize(
    ("height", "width", "whole"),
    [
        (375, 500, (256, 341)),
        (500, 375, (341, 256)),
        (256, 256, (256, 256)),
        (100, 33, (775, 256)),
        (40, 2000, (256, 12800)),
    ],
)
def test_the_centre_is_cut_out_as_pil_does_it(height, width, whole):
    pixels = colours(height, width)
    result = eval_image(AnnotatedImage.from_pixels(pixels), 224, resize=256)
    top, left = (whole[0] - 224) // 2, (whole[1] - 224) // 2
    pil = Image.fromarray(pixels).resize(whole[::-1], Image.Resampling.BILINEAR)
    pil = pil.crop((left, top, left + 224, top + 224))
    assert np.abs(rows(result.image).numpy().astype(int) - np.asarray(pil).astype(int)).max() <= 2
    assert rows(result.image).is_contiguous()


@pytest.mark.parametrize(("height", "width"), [(50, 67), (41, 90), (53, 40), (40, 40), (40, 41), (40, 43), (99, 41)])
def test_the_centre_is_that_of_the_image_processor_of_exported_models(height, width):
    transformers = pytest.importorskip("transformers")
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    cut = transformers.BitImageProcessorPil(**sizes, resample=2, do_rescale=False, do_normalize=False)
    pixels = colours(height, width)
    theirs = np.asarray(cut(Image.fromarray(pixels))["pixel_values"][0]).astype(int)
    ours = eval_image(AnnotatedImage.from_pixels(pixels), 32, resize=40).image.numpy().astype(int)
    assert np.abs(ours - theirs).max() <= 2


def test_targets_follow_in_evaluation():
    result = eval_image(rectangle(), 40, resize=50)
    assert result.boxes[0].tolist() == pytest.approx(extent(result.mask == 3), abs=1)
    assert result.boxes[0].tolist() == pytest.approx(extent(result.image[0] >= 100), abs=1)


def test_without_a_shorter_side_the_whole_picture_is_resized():
    result = eval_image(AnnotatedImage.from_pixels(colours()), 20, resize=None)
    pil = Image.fromarray(colours()).resize((20, 20), Image.Resampling.BILINEAR)
    assert np.abs(rows(result.image).numpy().astype(int) - np.asarray(pil).astype(int)).max() <= 1
    untouched = AnnotatedImage.from_pixels(colours(48, 48))
    assert torch.equal(eval_image(untouched, 48, resize=None).image, untouched.image)


def test_a_cut_larger_than_the_picture_is_an_error():
    with pytest.raises(UsageError, match="resized to 200 pixels, but the crop needs 224"):
        eval_image(rectangle(), 224, resize=200)


def test_evaluation_draws_no_random_numbers():
    state = torch.get_rng_state()
    eval_image(rectangle(), 40, resize=50)
    assert torch.equal(torch.get_rng_state(), state)
