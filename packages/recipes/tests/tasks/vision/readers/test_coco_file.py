"""COCO annotation files: everything comes out as the file says it, and faults are said with file, id and value."""

import json
import pickle

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.readers.coco_file import read_coco

POLYGON = [[1.0, 1.0, 9.5, 1.0, 9.5, 6.0]]
RLE = {"counts": [3, 5, 40], "size": [6, 8]}


def content(**changes):
    """Two images, three annotations and two classes, with ids that have gaps and no order."""
    whole = {
        "info": {"description": "a test"},
        "images": [
            {"id": 70, "file_name": "b.jpg", "height": 30, "width": 40},
            {"id": 9, "file_name": "a.jpg", "height": 20, "width": 10},
            {"id": 11, "file_name": "without.jpg"},
        ],
        "categories": [{"id": 90, "name": "tree"}, {"id": 3, "name": "car"}],
        "annotations": [
            {
                "id": 5,
                "image_id": 9,
                "category_id": 90,
                "bbox": [1, 2.5, 3, 4],
                "area": 7.25,
                "iscrowd": 0,
                "segmentation": POLYGON,
            },
            {"id": 2, "image_id": 70, "category_id": 3, "bbox": [-1, 0, 50, 60], "iscrowd": 1, "segmentation": RLE},
            {"id": 4, "image_id": 9, "category_id": 3, "bbox": [0, 0, 2, 2]},
        ],
    }
    return whole | changes


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def changed(place, **fields):
    """The annotations, one of them with other fields; None takes a field away."""
    annotations = content()["annotations"]
    annotations[place] = {name: value for name, value in (annotations[place] | fields).items() if value is not None}
    return content(annotations=annotations)


def test_everything_is_as_in_the_file(tmp_path):
    read = read_coco(write(tmp_path / "a.json", content()), key="data.train")
    assert read.image_ids.tolist() == [70, 9, 11]
    assert [read.file_names[i] for i in range(3)] == ["b.jpg", "a.jpg", "without.jpg"]
    assert read.sizes.tolist() == [[30, 40], [20, 10], [0, 0]]
    assert (read.category_ids.tolist(), read.classes) == ([3, 90], ("car", "tree"))
    assert read.ids.tolist() == [2, 5, 4]
    assert read.images.tolist() == [0, 1, 1]
    assert read.labels.tolist() == [0, 1, 0]
    assert read.boxes.tolist() == [[-1, 0, 50, 60], [1, 2.5, 3, 4], [0, 0, 2, 2]]
    assert read.area.tolist() == [3000, 7.25, 4]
    assert read.crowd.tolist() == [True, False, False]
    assert [read.of_image(i) for i in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 3)]
    assert "annotation 5" in read.where(1)
    assert "a.jpg" in read.where(1)
    assert read.notes == ()


def test_segmentations_are_kept_where_they_are_wanted(tmp_path):
    path = write(tmp_path / "a.json", content())
    read = pickle.loads(pickle.dumps(read_coco(path, key="data.train", segmentations=True)))
    assert [read.segmentation(i) for i in range(3)] == [RLE, POLYGON, None]
    with pytest.raises(ValueError, match="segmentations=True"):
        read_coco(path, key="data.train").segmentation(0)


def test_boxes_may_be_absent_where_they_are_not_needed(tmp_path):
    path = write(tmp_path / "a.json", changed(0, bbox=None))
    assert np.isnan(read_coco(path, key="data.train", boxes=False).boxes[1]).all()


def test_objects_elsewhere_with_an_image_id_are_no_annotations(tmp_path):
    extra = content(info={"image_id": 1, "bbox": "nothing"})
    assert len(read_coco(write(tmp_path / "a.json", extra), key="data.train").ids) == 3


def test_an_annotation_with_the_id_0_is_noted(tmp_path):
    read = read_coco(write(tmp_path / "a.json", changed(0, id=0)), key="data.train")
    assert "id 0" in read.notes[0]


IMAGE, CAR = {"id": 1, "file_name": "c.jpg"}, {"id": 3, "name": "car"}
FAULTS = {
    "empty file": ("  \n", "the file is empty"),
    "no JSON": ('{"images": [', "is not JSON"),
    "a list": ([{"image_id": 1, "id": 1}], "a list, as in result files"),
    "no annotations": (content(annotations=[]), "`annotations` is empty"),
    "no categories": ({"images": [IMAGE], "annotations": []}, "`annotations` is empty"),
    "no part": ({"annotations": []}, "`images` is missing"),
    "image without id": (content(images=[{"file_name": "a.jpg"}]), "image entry 0, counted from 0: its id is None"),
    "image with a text as id": (content(images=[{"id": "a", "file_name": "a.jpg"}]), "its id is 'a'"),
    "image without file": (content(images=[{"id": 9}]), "image 9: its file_name is None"),
    "images with one id": (content(images=[IMAGE, IMAGE]), "2 images have the id 1"),
    "categories with one id": (content(categories=[CAR, CAR | {"name": "tree"}]), "2 categories have the id 3"),
    "categories with one name": (content(categories=[CAR, CAR | {"id": 4}]), "2 categories have the name 'car'"),
    "annotations with one id": (changed(1, id=4), "2 annotations have the id 4"),
    "annotation without id": (changed(1, id=None), "an annotation of image 70: it has no id"),
    "annotation without image": (changed(1, image_id=None), "annotation 2 (entry 1 of annotations"),
    "annotation of another image": (changed(1, image_id=8), "annotation 2: it belongs to image 8"),
    "annotation of no class": (
        changed(1, category_id=8),
        "annotation 2: it has category 8, but the file declares 3 (c",
    ),
    "annotation without box": (changed(1, bbox=None), "annotation 2: it has no bbox"),
    "a box of three": (changed(1, bbox=[1, 2, 3]), "annotation 2: its bbox is [1, 2, 3]"),
    "a box of texts": (changed(1, bbox=["1", "2", "3", "4"]), "annotation 2: its bbox is ['1', "),
    "an id that is no integer": (changed(1, id=1.5), "its id is 1.5"),
    "an id that is too large": (changed(1, image_id=2**70), "its image_id is 11805"),
    "crowd": (changed(1, iscrowd="yes"), "annotation 2: its iscrowd is 'yes'"),
    "numbers as annotations": (content(annotations=[0]), "entry 0 of annotations"),
    "an area that is too large": (changed(1, area=10**400), "annotation 2: its area is 1000"),
    "area": (changed(1, area="3"), "annotation 2: its area is '3'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_errors_with_file_id_and_value(tmp_path, name):
    data, text = FAULTS[name]
    path = write(tmp_path / "a.json", data)
    with pytest.raises(DataError) as caught:
        read_coco(path, key="data.train")
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.remedy


def test_several_faults_of_a_kind_are_counted(tmp_path):
    data = content()
    for annotation in data["annotations"]:
        annotation["category_id"] = 1
    with pytest.raises(DataError, match=r"annotation 5: it has category 1, .* \(and 2 more like this\)"):
        read_coco(write(tmp_path / "a.json", data), key="data.train")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match=r"data.eval: cannot be read"):
        read_coco(tmp_path / "none.json", key="data.eval")


@pytest.mark.parametrize("both", [True, False])
def test_images_may_have_an_image_id(tmp_path, both):
    image = {"image_id": 5, "file_name": "a.png", "height": 9, "width": 9} | ({"id": 5} if both else {})
    row = {"id": 1, "image_id": 5, "category_id": 1, "bbox": [1, 1, 3, 3]}
    content = {"images": [image], "annotations": [row], "categories": [{"id": 1, "name": "cell"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    found = read_coco(tmp_path / "a.json", key="data.train")
    assert (found.image_ids.tolist(), found.boxes.tolist()) == ([5], [[1, 1, 3, 3]])
    assert len(found.notes) == (not both)
