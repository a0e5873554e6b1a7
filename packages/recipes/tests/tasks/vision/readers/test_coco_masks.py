"""Masks that are drawn from COCO annotations: the pixels of pycocotools, and faults by annotation id."""

import copy
import json
import warnings

import numpy as np
import pytest
from PIL import Image

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.readers.coco_masks import _runs
from lockstep_recipes.tasks.vision.readers.masked_images import read_masked_images
from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions

mask_api = pytest.importorskip("pycocotools.mask")

HEIGHT, WIDTH = 12, 16
SQUARE = [2, 2, 8, 2, 8, 8, 2, 8]
WIDE = [1, 4, 15, 4, 15, 6, 1, 6]
CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}]


def annotation(number, segmentation, category=7, image=1, **more):
    return {"id": number, "image_id": image, "category_id": category, "segmentation": segmentation, **more}


def content(*annotations, categories=CATEGORIES):
    images = [
        {"id": 1, "file_name": "a.png", "height": HEIGHT, "width": WIDTH},
        {"id": 9, "file_name": "b.png"},  # its size is in the image only
    ]
    return {"images": images, "annotations": list(annotations), "categories": categories}


@pytest.fixture
def write(tmp_path):
    """Writes a COCO file beside its images and returns its path."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "images" / "a.png")
    Image.new("RGB", (5, 4)).save(tmp_path / "images" / "b.png")

    def write(*annotations, name="train.json", **options):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        path = tmp_path / "annotations" / name
        path.write_text(json.dumps(content(*annotations, **options)))
        return path

    return write


def read(path, split="train", names=None, cache=None, **options):
    options = SegmentationOptions(images=str(images_of(path)), **options)
    return read_masked_images(str(path), split, options, names=names, cache=cache)


def images_of(path):
    return path.parent.parent / "images" if path.suffix else path / "images"


def region(segmentation, height=HEIGHT, width=WIDTH):
    """As pycocotools' `COCO.annToMask` draws it."""
    encoded = mask_api.frPyObjects(segmentation, height, width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return mask_api.decode(mask_api.merge(encoded) if isinstance(encoded, list) else encoded).astype(bool)


def rle(mask):
    """Uncompressed RLE: lengths of runs of 0 and 1, column by column."""
    flat = mask.T.reshape(-1).astype(int)
    changes = np.flatnonzero(np.diff(np.concatenate([[0], flat]))).tolist()
    counts = np.diff([0, *changes, len(flat)]).tolist()
    return {"size": list(mask.shape), "counts": counts}


# ---- what is drawn


def test_polygons_are_drawn_as_pycocotools_draws_them(write):
    two = [SQUARE, [10, 1, 14.5, 1.2, 12, 9.7]]
    data = read(write(annotation(1, two)))
    np.testing.assert_array_equal(data[0].mask, np.where(region(two), 2, 0))
    assert data.classes == ["background", "dog", "cat"]  # by category id
    np.testing.assert_array_equal(data[1].mask, np.zeros((4, 5)))
    assert data[0].pixels.shape == (HEIGHT, WIDTH, 3)
    assert data.where(1).endswith("b.png")


def test_later_annotations_lie_over_earlier_ones(write):
    data = read(write(annotation(5, [SQUARE]), annotation(2, [WIDE], 3)))
    np.testing.assert_array_equal(data[0].mask, np.where(region([WIDE]), 1, np.where(region([SQUARE]), 2, 0)))
    data = read(write(annotation(2, [WIDE], 3), annotation(5, [SQUARE])))
    np.testing.assert_array_equal(data[0].mask, np.where(region([SQUARE]), 2, np.where(region([WIDE]), 1, 0)))


def test_groups_lie_below_others_wherever_they_are_in_the_file(write):
    crowd = rle(region([WIDE]))
    data = read(write(annotation(1, [SQUARE]), annotation(2, crowd, 3, iscrowd=1)))
    np.testing.assert_array_equal(data[0].mask, np.where(region([SQUARE]), 2, np.where(region([WIDE]), 1, 0)))


@pytest.mark.parametrize("compressed", [False, True])
def test_run_length_encodings(write, compressed):
    wanted = np.random.default_rng(0).integers(0, 2, (HEIGHT, WIDTH)).astype(bool)
    encoded = rle(wanted)
    if compressed:
        encoded = mask_api.encode(np.asfortranarray(wanted.astype(np.uint8)))
        encoded["counts"] = encoded["counts"].decode()
    data = read(write(annotation(1, encoded)))
    data.check()
    np.testing.assert_array_equal(data[0].mask == 2, wanted)


def test_polygons_that_reach_over_the_edge_are_cut_off(write):
    shape = [[-5, -3, 20, -3, 20, 5, -5, 5]]
    data = read(write(annotation(1, shape)))
    data.check()
    np.testing.assert_array_equal(data[0].mask == 2, region(shape))
    assert (data[0].mask[:4] == 2).all()


def test_a_category_may_be_the_background(write):
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "background"}]
    data = read(write(annotation(1, [SQUARE], 1), categories=categories))
    assert data.classes == ["cat", "background"]
    np.testing.assert_array_equal(data[0].mask, np.where(region([SQUARE]), 0, 1))


def test_without_a_background_pixels_without_annotation_are_ignored(write):
    data = read(write(annotation(1, [SQUARE]), annotation(2, [WIDE], 3)), classes=["cat", "dog"])
    assert data.classes == ["cat", "dog"]
    np.testing.assert_array_equal(data[0].mask, np.where(region([WIDE]), 1, np.where(region([SQUARE]), 0, -1)))


@pytest.mark.parametrize("ignore", [["dog"], [3]])
@pytest.mark.parametrize("classes", [None, ["background", "cat"]])
def test_categories_can_be_ignored(write, ignore, classes):
    data = read(write(annotation(1, [SQUARE]), annotation(2, [WIDE], 3)), ignore=ignore, classes=classes)
    assert data.classes == ["background", "cat"]
    np.testing.assert_array_equal(data[0].mask, np.where(region([WIDE]), -1, np.where(region([SQUARE]), 1, 0)))


def test_evaluation_data_have_the_numbers_of_training(write):
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "eel"}]
    path = write(annotation(1, [SQUARE], 1), name="val.json", categories=categories)
    data = read(path, "eval", names=["background", "dog", "cat"])  # no eel is annotated
    assert data.classes == ["background", "dog", "cat"]
    np.testing.assert_array_equal(data[0].mask, np.where(region([SQUARE]), 2, 0))
    assert read(path, "eval", names=["background", "cat"], ignore=["dog"])[0].mask.max() == 1
    path = write(annotation(1, [SQUARE], 1), annotation(4, [WIDE], 2), categories=categories)
    fault(path, "annotation 4", "category 'eel' is not among the 3 classes", names=["background", "dog", "cat"])
    ignored = read(path, "eval", names=["background", "dog", "cat"], ignore=["eel"])[0].mask
    np.testing.assert_array_equal(ignored == -1, region([WIDE]))


def test_a_folder_with_annotations(write):
    path = write(annotation(1, [SQUARE]), name="instances_train.json")
    root = path.parent.parent
    data = read_masked_images(str(root), "train", SegmentationOptions())
    np.testing.assert_array_equal(data[0].mask, np.where(region([SQUARE]), 2, 0))


def test_pixels_are_counted_and_cached(write):
    from lockstep.core.data.cache_options import CacheOptions

    path = write(annotation(1, [SQUARE]), annotation(2, [WIDE], 3), annotation(3, [[0, 0, 3, 0, 3, 3, 0, 3]], image=9))
    found = read(path).check()
    assert sum(found.counts) == HEIGHT * WIDTH + 4 * 5
    assert found.counts[1] == region([WIDE]).sum()
    data = read(path, cache=CacheOptions())
    for _ in range(2):
        np.testing.assert_array_equal(data[0].mask, read(path)[0].mask)
    before = data.masks.digest()
    path.write_text(path.read_text() + "\n")
    assert read(path).masks.digest() != before


# ---- faults


def fault(path, *texts, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options).check()
    for text in texts:
        assert str(text) in str(caught.value), str(caught.value)
    return str(caught.value)


NAN = float("nan")
BAD = {
    "two points": ([[1, 2, 3, 4]], "polygon 0 has 2 points: [1, 2, 3, 4]"),
    "second of two points": ([SQUARE, [1, 2, 3, 4]], "polygon 1 has 2 points"),
    "no point": ([[]], "polygon 0 has 0 points"),
    "odd": ([[*SQUARE, 3]], "9 numbers"),
    "nan": ([[*SQUARE, 3, NAN]], "coordinate nan"),
    "too large": ([[*SQUARE, 3, 1e10]], "coordinate 10000000000.0"),
    "RLE of no size": ({"size": None, "counts": [192]}, "its RLE has None pixels"),
    "text": ([[*SQUARE, 3, "4"]], "coordinate '4'"),
    "flat": (SQUARE, "polygon 0 is 2"),
    "missing": (None, "no segmentation"),
    "empty": ([], "no segmentation"),
    "outside": ([[20, 1, 30, 1, 30, 9]], "outside its image of 16x12"),
    "RLE of another size": ({"size": [WIDTH, HEIGHT], "counts": [192]}, "its RLE has [16, 12] pixels"),
    "RLE too short": ({"size": [HEIGHT, WIDTH], "counts": [100, 20]}, "add up to 120, but its image has 192"),
    "negative RLE": ({"size": [HEIGHT, WIDTH], "counts": [200, -8]}, "integers of 0 or more"),
    "RLE without size": ({"counts": [192]}, "size"),
    "RLE of a number": ({"size": [HEIGHT, WIDTH], "counts": 3}, "counts of its RLE are 3"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_segmentations_are_named_before_training_and_when_they_are_read(write, kind):
    segmentation, says = BAD[kind]
    path = write(annotation(1, [SQUARE]), annotation(31, segmentation))
    said = fault(path, path, "annotation 31", says)
    with pytest.raises(DataError) as caught:
        read(path)[0]
    assert str(caught.value) == said


def test_polygons_that_are_shares_of_the_picture_are_an_error(write):
    shares = [value / side for value, side in zip(SQUARE, (WIDTH, HEIGHT) * 4, strict=True)]
    path = write(annotation(4, [shares]), annotation(5, [shares]), annotation(6, [SQUARE]))
    fault(path, "annotation 4", "2 of 3 segmentations are inside the first pixel", "from 0 to 1 (normalised)")
    read(write(annotation(4, [shares]), annotation(5, [SQUARE]))).check()  # one of two may be so small


def test_damaged_compressed_encodings(write):
    wanted = np.asfortranarray(np.random.default_rng(0).integers(0, 2, (HEIGHT, WIDTH), dtype=np.uint8))
    counts = mask_api.encode(wanted)["counts"].decode()
    for damaged in (counts[:-1], counts[1:], counts + "1", counts.replace(counts[5], "z"), "\u20ac"):
        path = write(annotation(31, {"size": [HEIGHT, WIDTH], "counts": damaged}))
        fault(path, "annotation 31", "its RLE")


def test_runs_of_compressed_encodings():
    """Against pycocotools, also for long runs and for runs that become shorter."""
    draw = np.random.default_rng(0)
    for share in (0.01, 0.5, 0.999):
        for size in ((1, 1), (7, 3), (300, 200)):
            wanted = np.asfortranarray(draw.random(size) < share, dtype=np.uint8)
            assert _runs(mask_api.encode(wanted)["counts"].decode()) == rle(wanted.astype(bool))["counts"]


def test_a_picture_of_another_size_than_the_file_says(write):
    path = write(annotation(1, [SQUARE]))
    broken = copy.deepcopy(content(annotation(1, [SQUARE])))
    broken["images"][0].update(height=WIDTH, width=HEIGHT)
    path.write_text(json.dumps(broken))
    fault(path, path, "image 1 (a.png)", "16x12 pixels (height x width), but its image 12x16")


def test_a_picture_that_is_not_there(write, tmp_path):
    path = write(annotation(1, [SQUARE]))
    (tmp_path / "images" / "b.png").unlink()
    fault(path, "there is no file", "b.png", "task.images")


def test_a_class_that_the_file_lacks(write):
    path = write(annotation(1, [SQUARE]))
    fault(path, "category 'cat' is not among the 2 classes", "did you mean cats?", classes=["background", "cats"])
    fault(path, "ignore has 'cow'", ignore=["cow"])
