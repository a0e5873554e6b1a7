"""Images with boxes: COCO, VOC and YOLO files give the same samples, and faults are said with file, id and value."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.detection.options import DetectionOptions
from lockstep_recipes.tasks.vision.readers.boxed_images import evaluation_part, read_boxed_images

SIZES = {"a": (20, 30), "b": (40, 24), "c": (16, 16)}  # height, width
# left, top, right, bottom by image and class; c has no boxes
BOXES = {"a": [("car", (2, 3, 12, 9)), ("tree", (0, 0, 30, 20))], "b": [("tree", (4, 5, 10, 25))], "c": []}
NAMES = ["car", "tree"]
IDS = {"a": 70, "b": 9, "c": 11}


def pictures(folder, mode="RGB"):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (height, width) in SIZES.items():
        pixels = np.random.default_rng(len(stem) + height).integers(0, 255, (height, width), dtype=np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        image.save(folder / f"{stem}.png")
    return folder


def coco(folder, split="train", **changes):
    pictures(folder / "images" / split)
    boxes = [(stem, *box) for stem in SIZES for box in BOXES[stem]]
    content = {
        "images": [
            {"id": IDS[stem], "file_name": f"{stem}.png", "height": size[0], "width": size[1]}
            for stem, size in SIZES.items()
        ],
        "categories": [{"id": 7, "name": "tree"}, {"id": 3, "name": "car"}],
        "annotations": [
            {
                "id": 100 - number,
                "image_id": IDS[stem],
                "category_id": {"car": 3, "tree": 7}[name],
                "bbox": [left, top, right - left, bottom - top],
                "area": (right - left) * (bottom - top),
                "iscrowd": 0,
            }
            for number, (stem, name, (left, top, right, bottom)) in enumerate(boxes)
        ],
    }
    content["annotations"][0] |= changes.pop("first", {})
    (folder / "annotations").mkdir(exist_ok=True)
    file = folder / "annotations" / f"instances_{split}.json"
    file.write_text(json.dumps(content | changes))
    return file


def voc(folder, difficult=(), **changes):
    pictures(folder / "JPEGImages")
    (folder / "Annotations").mkdir(exist_ok=True)
    for stem, (height, width) in SIZES.items():
        objects = "".join(
            f"<object><name>{name}</name><difficult>{int(name in difficult)}</difficult><bndbox><xmin>{left + 1}</xmin>"
            f"<ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
            for name, (left, top, right, bottom) in BOXES[stem]
        )
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{stem}.png</filename>{size}{objects}</annotation>"
        for old, new in changes.get(stem, {}).items():
            text = text.replace(old, new)
        (folder / "Annotations" / f"{stem}.xml").write_text(text)
    return folder


def yolo(folder, split="train"):
    pictures(folder / "images" / split)
    (folder / "labels" / split).mkdir(parents=True, exist_ok=True)
    for stem, (height, width) in SIZES.items():
        lines = [
            f"{NAMES.index(name)} {(left + right) / 2 / width:.9f} {(top + bottom) / 2 / height:.9f} "
            f"{(right - left) / width:.9f} {(bottom - top) / height:.9f}"
            for name, (left, top, right, bottom) in BOXES[stem]
        ]
        if lines:
            (folder / "labels" / split / f"{stem}.txt").write_text("\n".join(lines) + "\n")
    (folder / "data.yaml").write_text(yaml.safe_dump({"train": "images/train", "val": "images/val", "names": NAMES}))
    return folder


def read(source, split="train", classes=None, cache=None, **options):
    return read_boxed_images(str(source), split, DetectionOptions(**options), classes=classes, cache=cache)


def plain(data):
    """Boxes with names, by the stem of the image."""
    return {
        Path(sample.name).stem: [
            (data.classes[label], tuple(np.round(box, 4).tolist()))
            for box, label in zip(sample.boxes, sample.labels, strict=True)
        ]
        for sample in map(data.__getitem__, range(len(data)))
    }


def fault(source, *texts, split="train", **options):
    with pytest.raises(DataError) as caught:
        read(source, split, **options)
    for text in texts:
        assert str(text) in str(caught.value), str(caught.value)
    assert caught.value.remedy
    return caught.value


MAKERS = {"coco": coco, "voc": voc, "yolo": yolo}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_formats_give_the_same_samples(tmp_path, kind):
    MAKERS[kind](tmp_path)
    data = read(tmp_path)
    assert plain(data) == BOXES
    assert data.classes == NAMES
    assert data.class_counts() == {"car": 1, "tree": 2}
    assert sorted(data.counts.tolist()) == [0, 1, 2]
    for number in range(len(data)):
        sample = data[number]
        height, width = SIZES[Path(sample.name).stem]
        assert sample.pixels.shape == (height, width, 3)
        assert sample.size == data.size(number) == (height, width)
        assert sample.boxes.dtype == np.float32
        assert sample.boxes.shape == (len(sample.labels), 4)
        assert (sample.labels.dtype, sample.crowd.dtype, sample.area.dtype) == (np.int64, bool, np.float32)
        expected = (sample.boxes[:, 2] - sample.boxes[:, 0]) * (sample.boxes[:, 3] - sample.boxes[:, 1])
        assert np.allclose(sample.area, expected)
        assert Path(data.where(number)).is_file()
    assert data[0].image_id == (70 if kind == "coco" else 1)
    assert data.category_ids.tolist() == ([3, 7] if kind == "coco" else [1, 2])


@pytest.mark.parametrize("kind", [*MAKERS, "yolo without a YAML file", "yolo with path"])
def test_the_source_may_be_a_relative_path(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    folder = Path("cells/blood")
    MAKERS[kind.partition(" ")[0]](folder)
    if kind.endswith("file"):
        (folder / "data.yaml").unlink()
    elif kind.endswith("path"):
        (folder / "data.yaml").write_text("path: .\ntrain: images/train\nnames: [car, tree]\n")
    sources = [folder, folder / "data.yaml"] if kind == "yolo" else [folder]
    for source in sources:
        data = read(source)
        assert [len(boxes) for boxes in plain(data).values()] == [len(boxes) for boxes in BOXES.values()]
    assert data.pictures.digest() == read(tmp_path / folder).pictures.digest()


def test_the_ground_truth_is_exactly_the_files_own(tmp_path):
    first = {"bbox": [-4.5, -3, 70, 80.25], "area": 11.5, "iscrowd": 1}
    file = coco(tmp_path, first=first)
    data = read(file)
    written = json.loads(file.read_text())
    made = data.ground_truth()

    def by_id(entries):
        return sorted(entries, key=lambda entry: entry["id"])

    assert by_id(made["annotations"]) == by_id(written["annotations"])
    assert by_id(made["categories"]) == by_id(written["categories"])
    assert [entry["id"] for entry in made["images"]] == [70, 9, 11]
    assert json.loads(json.dumps(made)) == made
    sample = data[0]
    assert sample.boxes[0].tolist() == [0, 0, 30, 20]  # cut off for training
    assert sample.crowd.tolist() == [True, False]
    assert "extend beyond the edge" in data.notes[0]
    assert "annotation 100" in data.notes[0]


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA"])
def test_pictures_of_all_kinds_are_rgb(tmp_path, mode):
    coco(tmp_path)
    pictures(tmp_path / "images/train", mode)
    expected = np.array(Image.open(tmp_path / "images/train/a.png").convert("RGB"))
    assert np.array_equal(read(tmp_path)[0].pixels, expected)
    assert read(tmp_path, channels=1)[0].pixels.shape == (20, 30, 1)


def test_the_cache_gives_the_same_samples_and_reduces_boxes_with_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    coco(tmp_path)
    data, kept = read(tmp_path), read(tmp_path, cache=CacheOptions())
    for _ in range(2):
        for number in range(3):
            for value, other in zip(data[number], pickle.loads(pickle.dumps(kept))[number], strict=True):
                assert np.array_equal(value, other)
    assert "3 of 3" in kept.cache.summary()
    small = read(tmp_path, cache=CacheOptions(shorter_side=10))
    for _ in range(2):
        sample = small[0]
        assert sample.pixels.shape == (10, 15, 3)
        assert sample.boxes.tolist() == [[1, 1.5, 6, 4.5], [0, 0, 15, 10]]
        assert sample.size == (20, 30)
        assert sample.area.tolist() == [60, 600]


# ---- classes


def test_classes_are_found_by_name(tmp_path):
    coco(tmp_path)
    data = read(tmp_path, classes=["bush", "tree", "car"])
    assert data.classes == ["bush", "tree", "car"]
    assert data.category_ids.tolist() == [-1, 7, 3]
    assert plain(data) == BOXES


@pytest.mark.parametrize("kind", MAKERS)
def test_a_class_that_training_lacks_is_an_error(tmp_path, kind):
    MAKERS[kind](tmp_path)
    place = {"coco": "annotation 99", "voc": "a.xml: box 2", "yolo": "a.txt: box 2"}[kind]
    fault(tmp_path, "'tree' is not among the 1 classes", place, classes=["car"])


def test_a_category_without_boxes_may_be_unknown(tmp_path):
    categories = [{"id": 7, "name": "tree"}, {"id": 3, "name": "car"}, {"id": 8, "name": "none"}]
    coco(tmp_path, categories=categories)
    assert plain(read(tmp_path, classes=NAMES)) == BOXES


# ---- formats


def test_voc_counts_pixels_from_1_and_marks_difficult_objects(tmp_path):
    voc(tmp_path, difficult=["tree"])
    one = {"a": {"<xmin>3</xmin>": "<xmin>12</xmin>", "<ymin>4</ymin>": "<ymin>9</ymin>"}}
    sample = read(tmp_path)[0]
    assert sample.crowd.tolist() == [False, True]
    assert read(tmp_path, difficult=True)[0].crowd.tolist() == [False, False]
    voc(tmp_path, **one)
    assert read(tmp_path)[0].boxes[0].tolist() == [11, 8, 12, 9]  # a single pixel, the last of the box before


@pytest.mark.parametrize("side", ["xmin", "ymin"])
def test_voc_files_that_count_from_0_are_not_shifted(tmp_path, side):
    old = {"xmin": "<xmin>5</xmin>", "ymin": "<ymin>6</ymin>"}[side]
    changes = {"b": {old: f"<{side}>0</{side}>"}}
    data = read(voc(tmp_path, **changes))
    first = 0.0 if side == "xmin" else 5.0, 0.0 if side == "ymin" else 6.0
    assert plain(data)["b"] == [("tree", (*first, 10.0, 25.0))]
    assert plain(data)["a"][0] == ("car", (3.0, 4.0, 12.0, 9.0))
    assert "xmin or ymin is 0 or less in 1 boxes" in data.notes[0]
    assert "b.xml" in data.notes[0]
    assert not read(voc(tmp_path)).notes


def test_voc_has_lists_of_splits(tmp_path):
    voc(tmp_path)
    lists = tmp_path / "ImageSets/Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("c\na\n")
    (lists / "val.txt").write_text("b 1\n")
    assert list(plain(read(tmp_path))) == ["c", "a"]
    assert list(plain(read(tmp_path, "eval", classes=NAMES))) == ["b"]
    assert evaluation_part(str(tmp_path)) == str(tmp_path)
    (lists / "val.txt").write_text("d\n")
    fault(tmp_path, "d.xml, from the list of the split, does not exist", split="eval")


def test_voc_sizes_that_are_missing_are_read_from_the_pictures(tmp_path):
    voc(tmp_path, a={"<size>": "<shape>", "</size>": "</shape>"})
    assert read(tmp_path).size(0) == SIZES["a"]


def test_yolo_reads_polygons_and_pictures_without_file(tmp_path):
    yolo(tmp_path)
    (tmp_path / "labels/train/c.txt").write_text("1 0.25 0.5 0.75 0.5 0.5 1\n\n")
    assert plain(read(tmp_path))["c"] == [("tree", (4, 8, 12, 16))]
    (tmp_path / "labels/train/b.txt").unlink()
    data = read(tmp_path)
    assert plain(data)["b"] == []
    assert "1 of 3 images have no label file" in data.notes[0]


@pytest.mark.parametrize("names", [NAMES, {0: "car", 1: "tree"}])
def test_yolo_files_with_paths(tmp_path, names):
    yolo(tmp_path / "set")
    yolo(tmp_path / "set", "val")
    (tmp_path / "set/list.txt").write_text("images/train/b.png\n")
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"path": "set", "train": ["list.txt"], "val": "images/val", "names": names}))
    assert list(plain(read(file))) == ["b"]
    assert len(read(file, "eval")) == 3
    assert evaluation_part(str(file)) == str(file)
    (tmp_path / "set/data.yaml").unlink()
    assert read(tmp_path / "set").classes == ["0", "1"]
    (tmp_path / "set/classes.txt").write_text("car\ntree\n")
    assert plain(read(tmp_path / "set")) == BOXES


def test_parts_in_folders_with_the_annotations_beside_the_pictures(tmp_path):
    """As Roboflow writes them."""
    for split in ("train", "valid"):
        file = coco(tmp_path / "made")
        (tmp_path / split).mkdir()
        for picture in (tmp_path / "made/images/train").iterdir():
            picture.rename(tmp_path / split / picture.name)
        file.rename(tmp_path / split / "_annotations.coco.json")
    (tmp_path / "made/annotations").rmdir()
    for split, part in (("train", "train"), ("eval", "valid")):
        data = read(tmp_path, split)
        assert plain(data) == BOXES
        assert data.pictures.root == tmp_path / part
    assert evaluation_part(str(tmp_path)) == str(tmp_path)


def test_a_source_without_an_evaluation_part(tmp_path):
    coco(tmp_path / "coco")
    voc(tmp_path / "voc")
    yolo(tmp_path / "yolo")
    (tmp_path / "yolo/data.yaml").unlink()
    for kind in MAKERS:
        assert evaluation_part(str(tmp_path / kind)) is None
    assert evaluation_part(str(tmp_path / "coco/annotations/instances_train.json")) is None
    fault(tmp_path / "coco", "data.eval: there are no evaluation images", split="eval")


def test_a_file_of_yolo_is_never_passed_over(tmp_path):
    """Without it, the list of training images would give way to all images of the folder."""
    yolo(tmp_path)
    file = tmp_path / "data.yaml"
    (tmp_path / "list.txt").write_text("images/train/b.png\n")
    file.write_text("train: list.txt\nval: images/lost\nnc: 2\n")
    assert list(plain(read(tmp_path))) == ["b"]
    for source in (str(tmp_path), str(file)):
        assert evaluation_part(source) == source
    fault(tmp_path, "data.yaml: there is no", "images/lost", split="eval")
    file.write_text("names: [car, tree\ntrain: list.txt\n")
    fault(tmp_path, "data.yaml: this is not readable as YAML")


def test_pictures_elsewhere(tmp_path):
    file = coco(tmp_path / "coco")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "coco/images/train").rename(elsewhere)
    fault(file, "there is no file", "image 70", "task.images")
    assert plain(read(file, images=str(elsewhere))) == BOXES


# ---- faults

BAD = {
    "nan": ([float("nan"), 0, 3, 4], "has a number that is not finite"),
    "endless": ([0, 0, 3, float("inf")], "has a number that is not finite"),
    "no width": ([2, 2, 0, 5], "has no area"),
    "negative": ([9, 9, -3, 4], "has no area"),
    "outside": ([30, 2, 5, 5], "is outside its image"),
    "above": ([3, -5, 5, 5], "is outside its image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_boxes_are_errors_or_are_left_out(tmp_path, name):
    box, text = BAD[name]
    coco(tmp_path, first={"bbox": box})
    fault(tmp_path, "annotation 100", "a.png", text, "image 30 x 20", "task.on_bad_boxes=skip")
    data = read(tmp_path, on_bad_boxes="skip")
    assert plain(data) == BOXES | {"a": BOXES["a"][1:]}
    assert sorted(entry["id"] for entry in data.ground_truth()["annotations"]) == [98, 99]
    assert "1 bad boxes are left out. The first" in data.notes[0]
    assert text in data.notes[0]


def many_boxes(tmp_path, bbox, area=None):
    """A COCO file with 30 boxes; `bbox` and `area` get left, top, width and height."""
    boxes = [(1 + n % 5, 2 + n % 3, 4 + n % 7, 5 + n % 5) for n in range(30)]
    rows = [{"id": n + 1, "image_id": IDS["a"], "category_id": 3, "bbox": bbox(*box)} for n, box in enumerate(boxes)]
    for row, box in zip(rows, boxes, strict=True) if area else ():
        row["area"] = area(*box)
    return coco(tmp_path, annotations=rows)


def corners(left, top, width, height):
    return [left, top, left + width, top + height]


def sides(left, top, width, height):
    return [left, top, width, height]


def test_boxes_of_corners_in_a_coco_file_are_an_error(tmp_path):
    asked = "are these left, top, right, bottom? COCO has left, top, width, height"
    file = many_boxes(tmp_path, lambda *box: [side * 1.6 for side in corners(*box)])
    for on_bad in ("raise", "skip"):
        fault(file, "of 30 boxes extend beyond the edge", asked, "annotation 3 ", on_bad_boxes=on_bad)
    file = many_boxes(tmp_path, corners, lambda left, top, width, height: width * height)
    fault(file, "30 of 30 boxes have the area of a box of left, top, right and bottom", asked)
    assert len(read(many_boxes(tmp_path, sides, lambda left, top, width, height: 0.8 * width * height)).labels) == 30
    assert len(read(many_boxes(tmp_path, sides)).labels) == 30


def test_boxes_that_are_shares_of_the_picture_are_an_error(tmp_path):
    """COCO by sides and by corners, few boxes and many, and VOC; `skip` does not allow them."""

    def shares(left, top, width, height):
        return [left / 30, top / 20, width / 30, height / 20]

    file = many_boxes(tmp_path / "sides", shares)
    for on_bad in ("raise", "skip"):
        fault(file, "30 of 30 boxes are inside the first pixel", "from 0 to 1 (normalised)", on_bad_boxes=on_bad)
    fault(many_boxes(tmp_path / "corners", lambda *box: shares(*corners(*box))), "30 of 30 boxes are inside the first")
    mixed = iter(range(30))
    file = many_boxes(tmp_path / "mixed", lambda *box: shares(*box) if next(mixed) % 7 == 0 else list(box))
    fault(file, "5 of 30 boxes are inside the first pixel", "annotation 1 ")
    coco(tmp_path / "one", annotations=[{"id": 1, "image_id": 70, "category_id": 3, "bbox": [0.1, 0.2, 0.3, 0.4]}])
    fault(tmp_path / "one", "1 of 1 boxes are inside the first pixel")
    file = coco(tmp_path / "small", first={"bbox": [0, 0, 1, 1]})  # one of three may be so small
    assert len(read(file).labels) == 3
    shares_of = {
        f"<{axis}{end}>{edge}<": f"<{axis}{end}>{edge / 50}<"
        for axis in "xy"
        for end in ("min", "max")
        for edge in range(1, 41)
    }
    voc(tmp_path / "voc", a=shares_of, b=shares_of)
    fault(tmp_path / "voc", "are inside the first pixel", "normalised")


def test_few_boxes_are_judged_where_most_of_them_reach_over_the_edge(tmp_path):
    rows = [
        {"id": number + 1, "image_id": IDS["a"], "category_id": 3, "bbox": corners(14 + number, 9, 8, 8)}
        for number in range(4)
    ]
    fault(
        coco(tmp_path, annotations=rows), "4 of 4 boxes extend beyond the edge", "are these left, top, right, bottom?"
    )


def test_boxes_of_yolo_in_pixels_are_an_error_that_says_so(tmp_path):
    yolo(tmp_path)
    (tmp_path / "labels/train/a.txt").write_text("0 7 6 10 6\n1 15 10 12 8\n0 9 9 4 4\n")
    fault(tmp_path, "YOLO's numbers are fractions of the image, from 0 to 1: are these pixels?")


def test_many_boxes_over_the_edge_are_an_error_that_can_be_allowed(tmp_path):
    file = many_boxes(tmp_path, lambda left, top, width, height: [left - 4, top, 40, 30])
    fault(file, "30 of 30 boxes extend beyond the edge", "Check the numbers", "task.on_bad_boxes=skip")
    data = read(file, on_bad_boxes="skip")
    assert len(data.labels) == 30
    assert "extend beyond the edge" in data.notes[0]
    file = many_boxes(tmp_path, sides, lambda left, top, width, height: 3 * width * height)
    fault(file, "30 of 30 boxes have an area that is larger than width x height")
    assert len(read(file, on_bad_boxes="skip").labels) == 30


def test_an_area_that_is_not_finite_is_an_error(tmp_path):
    coco(tmp_path, first={"area": float("nan")})
    fault(tmp_path, "annotation 100", "area nan")


def test_no_box_at_all_is_an_error(tmp_path):
    yolo(tmp_path)
    for stem in "ab":
        (tmp_path / f"labels/train/{stem}.txt").write_text("\n")
    fault(tmp_path, "data.train does not contain any boxes")


def test_a_picture_of_another_size_is_an_error(tmp_path):
    coco(tmp_path)
    Image.new("RGB", (20, 30)).save(tmp_path / "images/train/a.png")
    data = read(tmp_path)
    with pytest.raises(DataError, match=r"has 30 x 20 pixels .* says 20 x 30\n.*EXIF"):
        data[0]


def test_a_missing_picture_is_an_error(tmp_path):
    file = coco(tmp_path)
    (tmp_path / "images/train/b.png").unlink()
    fault(tmp_path, "there is no file", "b.png", file, "image 9")


XML = {
    "no XML": ("<annotation>", "<annotation", "not readable as XML"),
    "no name": ("<name>tree</name>", "", "b.xml: box 1: the object has no name"),
    "no corner": ("<xmax>10</xmax>", "", "b.xml: box 1: bndbox/xmax is missing"),
    "a text": ("<ymin>6</ymin>", "<ymin>six</ymin>", "b.xml: box 1: bndbox/ymin is 'six'"),
    "not finite": ("<ymin>6</ymin>", "<ymin>nan</ymin>", "b.xml: box 1: the box [4, nan, 6, nan]"),
    "no area": ("<xmax>10</xmax>", "<xmax>4</xmax>", "b.xml: box 1: the box [4, 5, 0, 20] has no area"),
}


@pytest.mark.parametrize("name", XML)
def test_faults_of_voc_files(tmp_path, name):
    old, new, text = XML[name]
    voc(tmp_path, b={old: new})
    fault(tmp_path, text, "b.xml")


def test_voc_annotations_without_picture(tmp_path):
    voc(tmp_path)
    (tmp_path / "JPEGImages/b.png").unlink()
    fault(tmp_path, "b.xml: there is no image for it")
    (tmp_path / "Annotations/b.xml").unlink()
    Image.new("L", (3, 3)).save(tmp_path / "JPEGImages/d.png")
    assert "1 images in" in read(tmp_path).notes[0]
    Image.new("L", (3, 3)).save(tmp_path / "JPEGImages/a.bmp")
    fault(tmp_path, "two images have the stem 'a'")


LINES = {
    "words": ("car 0.5 0.5 0.1 0.1", "b.txt:2: the line is 'car 0.5"),
    "few": ("0 0.5 0.5 0.1", "b.txt:2: the line has 4 numbers"),
    "scores": ("0 0.5 0.5 0.1 0.1 0.9", "b.txt:2: the line has 6 numbers"),
    "class": ("2 0.5 0.5 0.1 0.1", "b.txt:2: the class is 2, but must be 0 to 1"),
    "half a class": ("0.5 0.5 0.5 0.1 0.1", "b.txt:2: the class is 0.5"),
    "pixels": ("0 30 30 10 10", "b.txt: box 2: the box [600, 1000, 240, 400] is outside"),
    "not finite": ("0 nan 0.5 0.1 0.1", "b.txt: box 2: the box [nan"),
}


@pytest.mark.parametrize("name", LINES)
def test_faults_of_yolo_files(tmp_path, name):
    line, text = LINES[name]
    yolo(tmp_path)
    with (tmp_path / "labels/train/b.txt").open("a") as file:
        file.write(line)
    fault(tmp_path, text)


def test_a_picture_that_is_named_twice_is_an_error(tmp_path):
    voc(tmp_path / "voc")
    (tmp_path / "voc/ImageSets/Main").mkdir(parents=True)
    (tmp_path / "voc/ImageSets/Main/train.txt").write_text("a\nb\na\n")
    fault(tmp_path / "voc", "names the image a more than once")
    yolo(tmp_path / "yolo")
    file = tmp_path / "yolo/data.yaml"
    file.write_text(yaml.safe_dump({"train": ["images/train", "list.txt"], "names": NAMES}))
    (tmp_path / "yolo/list.txt").write_text("./images/train/b.png\n")
    fault(file, "more than once", "images/train/b.png")


def test_yolo_labels_that_are_elsewhere_are_an_error(tmp_path):
    yolo(tmp_path)
    (tmp_path / "labels").rename(tmp_path / "texts")
    fault(tmp_path, "none of the 3 images has a label file", "DIR/labels/a.txt")


def test_yolo_labels_without_picture_are_an_error(tmp_path):
    yolo(tmp_path)
    (tmp_path / "images/train/b.png").unlink()
    fault(tmp_path, "b.txt", "there is no image for this")


def test_a_source_that_is_not_there_and_one_that_is_nothing(tmp_path):
    coco(tmp_path / "cells")
    fault(tmp_path / "cels", "no such file or folder", "did you mean cells? Give a COCO annotation file (.json), or")
    (tmp_path / "empty").mkdir()
    fault(tmp_path / "empty", "there are no training images with boxes", "annotations/*.json")
    (tmp_path / "a.yaml").write_text("names: [a, a]\n")
    fault(tmp_path / "a.yaml", "`names` is ['a', 'a']")


# ---- real data


def test_blood_cells(shared_data):
    folder = shared_data / "detection/bccd"
    data = read(folder)
    assert (len(data), data.class_counts()) == (60, {"RBC": 642, "WBC": 63, "Platelets": 64})
    assert evaluation_part(str(folder)) == str(folder)
    evaluation = read(folder, "eval", classes=data.classes)
    assert (len(evaluation), len(evaluation.labels)) == (20, 243)
    sample = data[59]
    assert sample.pixels.shape == (480, 640, 3)
    assert (sample.boxes[:, 2:] > sample.boxes[:, :2]).all()


def test_blood_cells_with_boxes_of_corners_are_an_error(shared_data, tmp_path):
    folder = shared_data / "detection/bccd"
    content = json.loads((folder / "annotations/instances_train.json").read_text())
    for row in content["annotations"]:
        left, top, width, height = row["bbox"]
        row["bbox"] = [left, top, left + width, top + height]
    (tmp_path / "train.json").write_text(json.dumps(content))
    asked = "are these left, top, right, bottom?"
    fault(tmp_path / "train.json", "of 769 boxes extend beyond the edge", asked, images=str(folder / "images/train"))


def test_pycocotools_finds_the_same_in_the_ground_truth_as_in_the_file(tmp_path):
    """Also with crowds, boxes over the edge, areas of their own, and images without boxes."""
    pytest.importorskip("pycocotools", reason="pycocotools is not installed")
    import contextlib
    import io

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    random = np.random.default_rng(0)
    annotations = [
        {
            "id": int(number),
            "image_id": int(random.choice([70, 9])),
            "category_id": int(random.choice([3, 7])),
            "bbox": [*random.uniform(-3, 15, 2).round(2).tolist(), *random.uniform(4, 20, 2).round(2).tolist()],
            "area": float(random.uniform(5, 300)),
            "iscrowd": int(random.random() < 0.2),
        }
        for number in random.permutation(60) + 1
    ]
    file = coco(tmp_path, annotations=annotations)
    results = [
        {
            "image_id": entry["image_id"],
            "category_id": entry["category_id"],
            "bbox": (np.array(entry["bbox"]) + random.normal(0, 1.5, 4)).tolist(),
            "score": float(random.random()),
        }
        for entry in annotations * 2
    ]
    made, stats = COCO(), []
    with contextlib.redirect_stdout(io.StringIO()):
        made.dataset = read(file, on_bad_boxes="skip").ground_truth()
        made.createIndex()
        for truth in (COCO(str(file)), made):
            evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            stats.append(evaluation.stats)
    assert np.array_equal(*stats)
    assert 0.05 < stats[0][0] < 0.95


def poses(folder, each, *, declared, points=4):
    """YOLO's files with keypoints after each box. The first keypoint of each object is not visible: 0 0."""
    yolo(folder)
    for file in (folder / "labels" / "train").iterdir():
        lines = []
        for line in file.read_text().splitlines():
            number, x, y, *size = line.split()
            numbers = [float(x), float(y)] if each == 2 else [float(x), float(y), 2]
            hidden = [0] * each
            lines.append(" ".join(map(str, [number, x, y, *size, *hidden, *(numbers * (points - 1))])))
        file.write_text("\n".join(lines))
    if declared:
        content = yaml.safe_load((folder / "data.yaml").read_text()) | {"kpt_shape": [points, each]}
        (folder / "data.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.mark.parametrize("each", [2, 3])
def test_yolo_poses_are_boxes(tmp_path, each):
    expected = plain(read(yolo(tmp_path / "a")))
    assert plain(read(poses(tmp_path / "b", each, declared=True))) == expected
    with pytest.raises(DataError, match=rf"look like boxes with 4 keypoints(?s:.*)kpt_shape: \[4, {each}\]"):
        read(poses(tmp_path / "c", each, declared=False))
    file = next((tmp_path / "b" / "labels" / "train").iterdir())
    file.write_text(file.read_text() + "\n0 0.5 0.5 0.6 0.6 0.7")
    with pytest.raises(DataError, match=f"or {5 + 4 * each} with the keypoints of kpt_shape"):
        read(tmp_path / "b")
