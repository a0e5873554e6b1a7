"""Images with masks come out of folders and data sets exactly as they were saved, and faults are said with file and
value."""

import json
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.data.fingerprint import fingerprint
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.vision.readers.mask_layouts import evaluation_source_with_masks
from lockstep_recipes.tasks.vision.readers.masked_images import (
    ClassPixels,
    MaskedImage,
    masked_inputs,
    read_masked_images,
    unseen_classes,
)
from lockstep_recipes.tasks.vision.segmentation.options import SegmentationOptions

NAMES = ["sky", "road", "tree"]
SIZES = [(6, 8), (8, 6), (5, 5), (9, 4)]  # height, width


def read(source, split="train", **options):
    given = {name: options.pop(name, None) for name in ("names", "cache", "palette")}
    return read_masked_images(str(source), split, SegmentationOptions(**({"classes": NAMES} | options)), **given)


def fault(source, *texts, split="train", **options):
    with pytest.raises(DataError) as caught:
        read(source, split, **options).check()
    for text in texts:
        assert str(text) in str(caught.value), str(caught.value)
    return caught.value


def picture(size, seed):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def ids(size, seed, classes=3):
    return np.random.default_rng(100 + seed).integers(0, classes, size, dtype=np.uint8)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def make(root, sizes=SIZES, seed=0):
    """A folder of images and masks of different sizes."""
    for number, size in enumerate(sizes):
        save(root / "images" / f"{number}.png", picture(size, seed + number))
        save(root / "masks" / f"{number}.png", ids(size, seed + number))
    return root


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "set")


def check_samples(data, seed=0):
    assert len(data) == len(SIZES)
    for number, (size, sample) in enumerate(zip(SIZES, map(data.__getitem__, range(len(data))), strict=True)):
        assert isinstance(sample, MaskedImage)
        np.testing.assert_array_equal(sample.pixels, picture(size, seed + number))
        np.testing.assert_array_equal(sample.mask, ids(size, seed + number))
        assert sample.mask.dtype == np.int16


# ---- sources


def test_a_folder_of_pictures_and_masks(folder):
    data = read(folder)
    check_samples(data)
    assert data.classes == NAMES
    assert data.where(1) == str(folder / "images" / "1.png")
    assert data[1].name == "1.png"
    assert data.notes == ()


def test_parts_of_a_folder(tmp_path):
    make(tmp_path / "set" / "train")
    make(tmp_path / "set" / "val", seed=50)
    check_samples(read(tmp_path / "set"))
    check_samples(read(tmp_path / "set", "eval"), seed=50)
    check_samples(read(tmp_path / "set" / "val"), seed=50)
    shutil.rmtree(tmp_path / "set" / "val")
    fault(tmp_path / "set", "there is train/, but none of val/", split="eval")


def test_parts_inside_of_the_two_folders(tmp_path):
    for part, seed in (("training", 0), ("validation", 50)):
        make(tmp_path / part, seed=seed)
        for kind in ("images", "masks"):
            (tmp_path / "set" / kind).mkdir(parents=True, exist_ok=True)
            (tmp_path / part / kind).rename(tmp_path / "set" / kind / part)
    check_samples(read(tmp_path / "set"))
    check_samples(read(tmp_path / "set", "eval"), seed=50)
    assert evaluation_source_with_masks(str(tmp_path / "set")) == str(tmp_path / "set")
    shutil.rmtree(tmp_path / "set" / "masks" / "validation")
    fault(tmp_path / "set", "there is no folder masks/validation/", split="eval")


def test_folders_in_folders_and_other_suffixes(tmp_path):
    pixels, mask = picture((4, 6), 0), ids((4, 6), 0)
    (tmp_path / "images" / "a" / "b").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "images" / "a" / "b" / "x.y.BMP")
    save(tmp_path / "masks" / "a" / "b" / "x.y.tif", mask)
    (tmp_path / "images" / ".hidden.png").write_bytes(b"")
    data = read(tmp_path)
    assert len(data) == 1
    np.testing.assert_array_equal(data[0].mask, mask)
    assert data[0].name == "a/b/x.y.BMP"


@pytest.mark.parametrize("named", [False, True])
def test_a_data_set_of_datasets(tmp_path, named):
    datasets = pytest.importorskip("datasets")
    columns = ("left", "right") if named else ("image", "mask")
    rows = {name: [] for name in columns}
    for number, size in enumerate(SIZES):
        rows[columns[0]].append(Image.fromarray(picture(size, number)))
        rows[columns[1]].append(Image.fromarray(ids(size, number)))
    features = datasets.Features({name: datasets.Image() for name in columns})
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": data, "validation": data}).save_to_disk(tmp_path / "saved")
    options = {"columns": {"image": "left", "mask": "right"}} if named else {}
    for split, source in (("train", tmp_path / "saved"), ("eval", f"{tmp_path / 'saved'}:validation")):
        found = read(source, split, **options)
        check_samples(found)
        assert sum(found.check().counts) == sum(height * width for height, width in SIZES)
        assert "row 1" in found.where(1)
    if named:
        fault(tmp_path / "saved", "mask")


def test_a_class_file_beside_the_masks(tmp_path):
    make(tmp_path / "set" / "train")
    (tmp_path / "set" / "classes.json").write_text('{"classes": ["sky", "void", "tree"], "ignore_index": 1}')
    data = read(tmp_path / "set", classes=None)
    assert data.classes == ["sky", "tree"]
    np.testing.assert_array_equal(data[0].mask, np.array([0, -1, 1])[ids(SIZES[0], 0)])
    assert read(tmp_path / "set" / "train", classes=None).classes == ["sky", "tree"]
    (tmp_path / "set" / "train" / "classes.txt").write_text("a\nb\nc\n")  # the nearer file wins
    assert read(tmp_path / "set", classes=None).classes == ["a", "b", "c"]
    assert read(tmp_path / "set", classes=["x", "y", "z"]).classes == ["x", "y", "z"]
    assert read(tmp_path / "set", classes=None, ignore=["b"]).classes == ["a", "c"]


def test_colours_of_the_palette_and_of_the_table(tmp_path):
    image = Image.frombytes("P", (6, 4), ids((4, 6), 0).tobytes())
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    save(tmp_path / "images" / "a.png", picture((4, 6), 0))
    (tmp_path / "masks").mkdir()
    image.save(tmp_path / "masks" / "a.png")
    assert read(tmp_path).colors == [(10, 20, 30), (40, 50, 60), (70, 80, 90)]
    np.testing.assert_array_equal(read(tmp_path)[0].mask, ids((4, 6), 0))
    own = {"sky": [10, 20, 30], "road": [40, 50, 60], "tree": [1, 2, 3]}
    assert read(tmp_path, classes=own).colors[2] == (1, 2, 3)


def test_masks_in_colour_and_with_16_bits(tmp_path):
    colors = {"sky": [128, 128, 128], "road": [128, 64, 128], "tree": [0, 0, 7]}
    for number, size in enumerate(SIZES):
        save(tmp_path / "images" / f"{number}.png", picture(size, number))
        save(tmp_path / "masks" / f"{number}.png", np.array(list(colors.values()), np.uint8)[ids(size, number)])
    check_samples(read(tmp_path, classes=colors))
    for number, size in enumerate(SIZES):
        save(tmp_path / "masks" / f"{number}.png", np.array([0, 300, 65535], np.uint16)[ids(size, number)])
    check_samples(read(tmp_path, classes={"sky": 0, "road": 300, "tree": 65535}))


def test_evaluation_data_have_the_numbers_of_training(folder):
    data = read(folder, "eval", classes=["sky", "road", "tree"], names=["tree", "bush", "sky", "road"])
    assert data.classes == ["tree", "bush", "sky", "road"]
    np.testing.assert_array_equal(data[0].mask, np.array([2, 3, 0])[ids(SIZES[0], 0)])
    assert len(set(data.colors)) == 4
    fault(folder, "class 'tree' is not among the 2 classes", split="eval", names=["sky", "road"])


def test_pictures_to_predict(folder):
    data = masked_inputs([str(folder / "images")], classes=NAMES, colors=[(0, 0, 0)] * 3)
    assert len(data) == 4
    assert data[1].mask is None
    np.testing.assert_array_equal(data[1].pixels, picture(SIZES[1], 1))
    assert data.classes == NAMES
    assert data.check().masks == 0
    with pytest.raises(UsageError):
        masked_inputs(["nothing.png"], classes=NAMES, colors=[(0, 0, 0)] * 3)


# ---- faults


def test_a_picture_without_a_mask_and_a_mask_without_a_picture(folder):
    (folder / "masks" / "2.png").rename(folder / "masks" / "2b.png")
    fault(folder, folder / "images" / "2.png", "this image has no mask", "did you mean 2b?")
    save(folder / "masks" / "2.png", ids(SIZES[2], 2))
    fault(folder, folder / "masks" / "2b.png", "this mask has no image")


def test_two_files_of_one_name(folder):
    save(folder / "images" / "2.bmp", picture(SIZES[2], 2))
    fault(folder, folder / "images", "2.png", "2.bmp", "the same name except for the suffix")


def test_a_mask_of_another_size_is_found_before_training_and_when_it_is_read(folder):
    save(folder / "masks" / "1.png", ids((6, 8), 1))
    said = fault(folder, folder / "masks" / "1.png", "mask of", folder / "images" / "1.png", "6x8", "8x6", "EXIF")
    with pytest.raises(DataError) as caught:
        read(folder)[1]
    assert str(caught.value) == str(said)
    save(folder / "masks" / "3.png", ids((2, 2), 3))
    fault(folder, "1 other masks also differ")
    read(folder)[0]


def test_the_orientation_of_a_picture_counts_for_its_size(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(picture(SIZES[0], 0)).copy()).save(folder / "images" / "0.png", exif=exif)
    data = read(folder)
    data.check()
    check_samples(data)


def test_ids_out_of_range(folder):
    mask = ids(SIZES[2], 2)
    mask[3, 1] = 77
    save(folder / "masks" / "2.png", mask)
    fault(folder, folder / "masks" / "2.png", "77", "row 3, column 1", "task.ignore=[77]")
    with pytest.raises(DataError, match="77"):
        read(folder)[2]
    assert read(folder, ignore=[77])[2].mask[3, 1] == -1
    read(folder)[1]


@pytest.mark.parametrize("second", [1, 255])
def test_masks_of_two_ids_need_no_names(folder, second):
    for number, size in enumerate(SIZES):
        save(folder / "masks" / f"{number}.png", ids(size, number, 2) * np.uint8(second))
    data = read(folder, classes=None)
    assert list(data.classes) == ["background", "object"]
    for number, size in enumerate(SIZES):
        np.testing.assert_array_equal(data[number].mask, ids(size, number, 2))
    assert any(f"using task.classes='{{background: 0, object: {second}}}'" in note for note in data.notes)
    evaluated = read(folder, "eval", classes=None, names=data.classes)
    np.testing.assert_array_equal(evaluated[1].mask, ids(SIZES[1], 1, 2))


def test_classes_that_are_not_known(folder):
    fault(folder, folder / "masks" / "0.png", "the class names are unknown", "ids 0, 1, 2", classes=None)
    save(folder / "masks" / "0.png", picture(SIZES[0], 0))
    fault(folder, "colour images", classes=None)


def test_folders_that_are_none(tmp_path):
    fault(tmp_path / "nothing", "no such file or folder")
    (tmp_path / "images").mkdir()
    fault(tmp_path, "there is no folder masks/")
    (tmp_path / "masks").mkdir()
    fault(tmp_path, "there is no image")
    (tmp_path / "file.csv").write_text("a")
    fault(tmp_path / "file.csv", "data.train is not a source of images with masks")


def test_two_files_of_classes_beside_each_other(folder):
    for name in ("classes.txt", "classes.json"):
        (folder / name).write_text('["sky", "road", "tree"]')
    error = fault(folder, "classes.json and classes.txt", classes=None)
    assert error.where == str(folder)
    assert read(folder, classes=str(folder / "classes.json")).classes == NAMES


def test_a_description_of_a_data_set_is_no_file_of_classes_and_is_passed_over(folder):
    for content in ("train: images/train\nval: images/val\nnc: 2\n", "path: .\ntrain: [a, b]\n"):
        (folder / "classes.yaml").write_text(content)
        (folder / "classes.txt").unlink(missing_ok=True)
        fault(folder, "the class names are unknown", "classes.yaml describes the folders", classes=None)
        (folder / "classes.txt").write_text("\n".join(NAMES))
        found = read(folder, classes=None)
        assert found.classes == NAMES
        assert "classes.yaml describes the folders of a data set but does not name classes: it is not used" in str(
            found.notes
        )
    (folder / "classes.yaml").write_text("train: 1\nsky: 0\n")  # classes with ids, one of which is a train
    fault(folder, "classes.yaml and classes.txt", classes=None)


def test_damaged_and_lossy_files(folder):
    content = (folder / "masks" / "0.png").read_bytes()
    for damaged, says in ((content[:-30], "damaged"), (b"", "empty")):
        (folder / "masks" / "0.png").write_bytes(damaged)
        error = fault(folder, folder / "masks" / "0.png", says, "remove both the image and its mask")
        assert "on_error" not in str(error)  # the check before training has no such policy
        with pytest.raises(DataError, match=r"data\.on_error=skip"):
            read(folder)[0]
    (folder / "masks" / "0.png").unlink()
    Image.fromarray(ids(SIZES[0], 0)).save(folder / "masks" / "0.jpg")
    fault(folder, folder / "masks" / "0.jpg", "does not keep the values")


# ---- counts


def test_pixels_are_counted_by_class(folder):
    pixels = np.concatenate([ids(size, number).reshape(-1) for number, size in enumerate(SIZES)])
    counts = np.bincount(pixels, minlength=3).tolist()
    found = read(folder).check()
    assert (found.counts, found.ignored, found.masks, found.of_masks) == (counts, 0, 4, 4)
    found = read(folder, ignore=["road"]).check()
    assert (found.counts, found.ignored) == ([counts[0], counts[2]], counts[1])


def test_at_most_so_many_masks_are_read_spaced_evenly(folder):
    save(folder / "masks" / "1.png", np.full(SIZES[1], 99, np.uint8))  # would be an error
    found = read(folder).check(most=2)
    assert found.masks == 2
    assert found.of_masks == 4
    pixels = np.concatenate([ids(SIZES[number], number).reshape(-1) for number in (0, 2)])
    assert found.counts == np.bincount(pixels, minlength=3).tolist()


def test_classes_that_occur_in_evaluation_only():
    def pixels(counts, masks=5):
        return ClassPixels(counts, ignored=0, masks=masks, of_masks=5)

    assert unseen_classes(pixels([3, 0, 0]), pixels([1, 2, 0]), NAMES) == ["road"]
    assert unseen_classes(pixels([3, 0, 0], masks=4), pixels([1, 2, 0]), NAMES) == []


def test_evaluation_data_that_belong_to_training_data(tmp_path):
    make(tmp_path / "set" / "train")
    assert evaluation_source_with_masks(str(tmp_path / "set")) is None
    make(tmp_path / "set" / "val")
    assert evaluation_source_with_masks(str(tmp_path / "set")) == str(tmp_path / "set")
    assert evaluation_source_with_masks(str(tmp_path / "set" / "train")) is None
    coco = tmp_path / "coco" / "annotations"
    coco.mkdir(parents=True)
    (coco / "instances_train.json").write_text("{}")
    assert evaluation_source_with_masks(str(coco.parent)) is None
    (coco / "instances_val.json").write_text("{}")
    assert evaluation_source_with_masks(str(coco.parent)) == str(coco.parent)


# ---- the cache, and processes


def test_the_cache_gives_the_same_samples_and_ignored_pixels(folder):
    options = {"ignore": ["road"], "cache": CacheOptions()}
    plain, data = read(folder, ignore=["road"]), read(folder, **options)
    for _ in range(2):
        for index in range(len(data)):
            np.testing.assert_array_equal(data[index].pixels, plain[index].pixels)
            np.testing.assert_array_equal(data[index].mask, plain[index].mask)
            assert data[index].mask.dtype == np.int16
    assert all(index in data.cache and index in data.mask_cache for index in range(4))
    again = read(folder, **options)
    shutil.rmtree(folder / "masks")
    (folder / "masks").mkdir()
    np.testing.assert_array_equal(again[0].mask, np.array([0, -1, 1])[ids(SIZES[0], 0)])


def test_another_meaning_of_ids_has_another_cache(folder):
    first = read(folder, cache=CacheOptions())
    first[0]
    other = read(folder, cache=CacheOptions(), classes={"tree": 2, "road": 1, "sky": 0})
    np.testing.assert_array_equal(other[0].mask, np.array([2, 1, 0])[ids(SIZES[0], 0)])
    assert first.cache.folder == other.cache.folder
    assert first.mask_cache.folder != other.mask_cache.folder


def test_masks_are_reduced_with_their_pictures_in_training_only(tmp_path):
    mask = ids((40, 60), 0)
    save(tmp_path / "images" / "a.png", picture((40, 60), 0))
    save(tmp_path / "masks" / "a.png", mask)
    for _ in range(2):
        sample = read(tmp_path, cache=CacheOptions(shorter_side=10))[0]
        assert sample.pixels.shape == (10, 15, 3)
        np.testing.assert_array_equal(sample.mask, mask[2::4, 2::4])
    assert read(tmp_path, "eval", cache=CacheOptions(shorter_side=10))[0].mask.shape == (40, 60)


def test_a_mask_of_another_size_is_found_behind_the_cache_too(folder):
    save(folder / "masks" / "1.png", ids((4, 4), 1))
    data = read(folder, cache=CacheOptions())
    for _ in range(2):
        with pytest.raises(DataError, match="the mask has 4x4 pixels"):
            data[1]


def test_a_limit_of_the_cache_is_shared_by_pictures_and_masks(folder):
    data = read(folder, cache=CacheOptions(limit_bytes=4000))
    assert (data.cache.options.limit_bytes, data.mask_cache.options.limit_bytes) == (3000, 1000)


def test_more_than_255_classes_are_not_cached_but_right(folder):
    names = [f"c{number}" for number in range(300)]
    save(folder / "masks" / "0.png", np.full(SIZES[0], 299, np.uint16))
    data = read(folder, classes=names, cache=CacheOptions())
    assert data.mask_cache is None
    assert (data[0].mask == 299).all()


def _read_in_worker(data, index):
    return data[index]


@pytest.mark.parametrize("cache", [None, CacheOptions()])
def test_worker_processes_and_pickles(folder, cache):
    data = read(folder, cache=cache)
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(copy[2].mask, data[2].mask)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        sample = pool.apply(_read_in_worker, (data, 3))
    np.testing.assert_array_equal(sample.mask, data[3].mask)


def test_digest_and_fingerprint_change_with_a_mask(folder):
    before, print_before = read(folder).masks.digest(), fingerprint(read(folder))
    assert read(folder).masks.digest() == before
    save(folder / "masks" / "0.png", 2 - ids(SIZES[0], 0))
    assert read(folder).masks.digest() != before
    assert fingerprint(read(folder)) != print_before


# ---- real data


def test_camvid(shared_data):
    root = shared_data / "segmentation" / "camvid"
    train, evaluation = read(root, classes=None), read(root, "eval", classes=None)
    assert (len(train), len(evaluation)) == (60, 20)
    assert train.classes[:2] == ["Sky", "Building"]
    assert len(train.classes) == 11
    assert train.colors[0] == (128, 128, 128)
    found = evaluation.check()
    assert sum(found.counts) + found.ignored == 20 * 480 * 360
    assert min(found.counts) > 0
    mask = np.array(Image.open(root / "val" / "masks" / f"{evaluation[3].name[:-4]}.png")).astype(int)
    np.testing.assert_array_equal(evaluation[3].mask, np.where(mask == 11, -1, mask))


def test_nuclei(shared_data):
    data = read(shared_data / "segmentation" / "nuclei", classes=["background", "nucleus"])
    assert len(data) == 40
    assert len({sample.pixels.shape for sample in map(data.__getitem__, range(40))}) > 2
    found = data.check()
    assert 0.1 < found.counts[1] / sum(found.counts) < 0.2


def with_palette(path, values, colors):
    image = Image.fromarray(values.astype(np.uint8))
    image.putpalette([part for color in colors for part in color])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


BLACK, RED, BLUE = (0, 0, 0), (200, 0, 0), (0, 0, 200)


def test_a_palette_that_numbers_colours_differently_is_read_by_colour(tmp_path):
    mask = np.zeros((6, 6), np.int64)
    mask[1:3, 1:3] = 1
    for number, (values, colors) in enumerate(((mask, (BLACK, RED)), (1 - mask, (RED, BLACK)), (mask, (BLACK, RED)))):
        save(tmp_path / "images" / f"{number}.png", picture((6, 6), number))
        with_palette(tmp_path / "masks" / f"{number}.png", values, colors)
    data = read(tmp_path, classes=None)
    assert [int((sample.mask == 1).sum()) for sample in map(data.__getitem__, range(3))] == [4, 4, 4]
    assert data.palette == {"background": BLACK, "object": RED}
    # evaluation data whose first mask is the odd one
    other = read(tmp_path, classes=["background", "object"], palette={"background": RED, "object": BLACK})
    assert [int((sample.mask == 1).sum()) for sample in map(other.__getitem__, range(3))] == [32, 32, 32]


def test_a_palette_with_an_unknown_colour_for_a_class_is_an_error(tmp_path):
    mask = np.eye(6)
    for number, colors in enumerate(((BLACK, RED), (BLACK, BLUE))):
        save(tmp_path / "images" / f"{number}.png", picture((6, 6), number))
        with_palette(tmp_path / "masks" / f"{number}.png", mask, colors)
    fault(tmp_path, "1.png", "[0, 0, 200]", "[200, 0, 0]", "masks: ids", classes=["background", "object"])
    names = {"classes": ["background", "object"], "masks": "ids"}
    (tmp_path / "classes.yaml").write_text(json.dumps(names))
    assert read(tmp_path, classes=None)[1].mask.sum() == 6


@pytest.mark.parametrize("ending", ["_mask", "_segmentation", "-gt", "_Label"])
@pytest.mark.parametrize("place", ["masks", "labels", "SegmentationClass"])
def test_masks_with_usual_endings_in_usual_folders_are_read_with_a_note(tmp_path, ending, place):
    folder = make(tmp_path / "set")
    for path in (folder / "masks").iterdir():
        path.rename(path.with_name(f"{path.stem}{ending}.png"))
    (folder / "masks").rename(folder / place)
    data = read(folder)
    check_samples(data)
    data.check()
    assert f"the masks are named NAME{ending}, and belong to the images NAME" in data.notes
    assert ("masks are read from labels/" in data.notes) == (place == "labels")
    (folder / place / f"0{ending}.png").unlink()
    with pytest.raises(DataError, match="this image has no mask"):
        read(folder)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, bool, np.float32])
def test_masks_may_be_arrays_of_numpy(folder, dtype):
    for number, size in enumerate(SIZES):
        (folder / "masks" / f"{number}.png").unlink()
        np.save(folder / "masks" / f"{number}.npy", (ids(size, number) % (2 if dtype is bool else 3)).astype(dtype))
    data = read(folder)
    assert not any("left out" in note for note in data.notes)
    assert data.check().masks == len(SIZES)
    if dtype is not bool:
        check_samples(data)
    np.save(folder / "masks" / "1.npy", np.full(SIZES[1], 0.5))
    fault(folder, "1.npy", "float64", "save integers")


def test_grey_masks_that_were_saved_as_rgb_are_ids(folder):
    for number, size in enumerate(SIZES):
        save(folder / "masks" / f"{number}.png", np.repeat(ids(size, number)[..., None], 3, axis=2))
    data = read(folder)
    check_samples(data)
    assert any("saved as RGB" in note for note in data.notes)
    assert data.masks.form().kind == "grey"
    save(folder / "masks" / "0.png", picture(SIZES[0], 0))
    fault(folder, "0.png", "colour")


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_a_mask_that_was_drawn_before_the_image_was_turned_is_turned(tmp_path, orientation):
    from lockstep_recipes.tasks.vision.images.decode import turned

    pixels, mask = picture((6, 8), 0), ids((6, 8), 0)
    (tmp_path / "images").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "images" / "0.png", exif=exif)
    save(tmp_path / "masks" / "0.png", mask)
    data = read(tmp_path)
    data.check()
    np.testing.assert_array_equal(data[0].pixels, turned(pixels, orientation))
    np.testing.assert_array_equal(data[0].mask, turned(mask, orientation))
