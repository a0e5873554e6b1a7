"""What values of masks mean, from lists, mappings and files; and class numbers by such tables."""

import json

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.images.mask import MaskValues
from lockstep_recipes.tasks.vision.readers.class_table import read_class_table, usual_color
from lockstep_recipes.tasks.vision.readers.mask_lookup import MaskLookup

SKY, ROAD = (128, 128, 128), (128, 64, 128)


def entries(table):
    return [(entry.name, entry.id, entry.color) for entry in table.classes]


def ignored(table):
    return [(entry.name, entry.id, entry.color) for entry in table.ignored]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (["sky", "road"], [("sky", 0, None), ("road", 1, None)]),
        ([0, "1"], [("0", 0, None), ("1", 1, None)]),
        ({"sky": list(SKY), "road": list(ROAD)}, [("sky", 0, SKY), ("road", 1, ROAD)]),
        ({"background": 0, "nucleus": 255}, [("background", 0, None), ("nucleus", 255, None)]),
        ({"sky": {"id": 7, "color": list(SKY)}, "road": {"id": 2}}, [("sky", 7, SKY), ("road", 2, None)]),
        ({"1": "road", "0": "sky", "10": "tree"}, [("sky", 0, None), ("road", 1, None), ("tree", 10, None)]),
        ({1: "road", 0: "sky"}, [("sky", 0, None), ("road", 1, None)]),
        ({"classes": ["sky", "road"], "colors": {"road": list(ROAD)}}, [("sky", 0, None), ("road", 1, ROAD)]),
        ({"train": "a", "val": ["b"], "nc": 2, "names": ["sky", "road"]}, [("sky", 0, None), ("road", 1, None)]),
        ({"path": "x", "train": "a", "names": {0: "sky", 1: "road"}}, [("sky", 0, None), ("road", 1, None)]),
        ({"train": 6, "car": 7}, [("train", 6, None), ("car", 7, None)]),
    ],
)
def test_every_way_to_write_classes(content, expected, tmp_path):
    assert entries(read_class_table(content)) == expected
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(content))
    assert entries(read_class_table(str(file))) == expected
    yaml_file = tmp_path / "classes.yaml"
    yaml_file.write_text(json.dumps(content))
    assert entries(read_class_table(str(yaml_file))) == expected


def test_the_description_of_a_yolo_data_set_without_names_is_said_so():
    with pytest.raises(DataError, match="describes the folders of a YOLO data set, but does not have a list `names`"):
        read_class_table({"train": "images/train", "val": "images/val"})


def test_text_files(tmp_path):
    names = tmp_path / "classes.txt"
    names.write_text("sky\n\n  dirt road \nroad\r\n")
    assert entries(read_class_table(str(names))) == [("sky", 0, None), ("dirt road", 1, None), ("road", 2, None)]
    colors = tmp_path / "label_colors.txt"  # as CamVid writes it
    colors.write_text("128 128 128\tsky\n128 64 128\t\troad\n")
    assert entries(read_class_table(str(colors))) == [("sky", 0, SKY), ("road", 1, ROAD)]


@pytest.mark.parametrize("ignore", [["void"], [1], "void", 1])
def test_ignored_classes_keep_their_ids_and_the_others_are_numbered_without_gaps(ignore):
    table = read_class_table({"classes": ["sky", "void", "road"], "ignore": ignore})
    assert entries(table) == [("sky", 0, None), ("road", 2, None)]
    assert ignored(table) == [("void", 1, None)]
    lookup = MaskLookup(table)
    np.testing.assert_array_equal(lookup(ids([[0, 1, 2]]), where=""), [[0, -1, 1]])


def test_ids_and_colours_without_a_name_are_ignored():
    table = read_class_table({"classes": {"sky": list(SKY)}, "ignore": [[0, 0, 0]], "ignore_index": 255})
    assert ignored(table) == [("ignored", -1, (0, 0, 0)), ("ignored", 255, None)]
    lookup = MaskLookup(table)
    np.testing.assert_array_equal(lookup(ids([[0, 255]]), where=""), [[0, -1]])
    colors = np.array([[SKY, (0, 0, 0)]], dtype=np.uint8)
    np.testing.assert_array_equal(lookup(MaskValues(colors), where=""), [[0, -1]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "there are no classes"),
        ({}, "there are no classes"),
        (["sky", "sky"], "the name 'sky' is given to several"),
        ({"sky": 3, "road": 3}, "the id 3 is given to several"),
        ({"sky": list(SKY), "road": list(SKY)}, "the colour .128, 128, 128. is given to several"),
        ({"sky": [1, 2]}, "the colour of 'sky' is .1, 2."),
        ({"sky": [1, 2, 256]}, "the colour of 'sky'"),
        ({"sky": -1}, "class 'sky' is -1"),
        ({"sky": {"colour": [1, 2, 3]}}, "class 'sky' is"),
        ([True, "off"], "True is not a class name"),
        (["sky", ""], "'' is not a class name"),
        (3, "the classes are 3"),
        ({"classes": ["sky"], "ignore": ["skyy"]}, "ignore has 'skyy'"),
        ({"classes": ["sky"], "ignore": ["sky"]}, "every class is ignored"),
        ({"classes": ["sky"], "colors": {"road": [1, 2, 3]}}, "colors has 'road'"),
        ({"classes": ["sky"], "colors": [[1, 2, 3]]}, "colors is .*1, 2, 3"),
        ({"classes": ["sky"], "ignored": [3]}, "unknown key 'ignored'"),
        ({"classes": ["sky"], "masks": "color"}, "masks is 'color'"),
    ],
)
def test_faults_name_file_and_value(content, says, tmp_path):
    with pytest.raises(DataError, match=says) as caught:
        read_class_table(content)
    assert caught.value.where == "task.classes"
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=says) as caught:
        read_class_table(str(file))
    assert caught.value.where == str(file)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("255 0 a\n0 255 0 b\n\n0 0 255 c\n", 1, "'255 0 a' has no colour"),
        ("255 0 0 a\n\nb\n", 3, "'b' has no colour"),
        ("255 0 0 a\n0 255 0 a\n", 2, "the name 'a' is given to several"),
    ],
)
def test_faults_of_text_files_name_the_line(text, line, says, tmp_path):
    (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=says) as caught:
        read_class_table(str(tmp_path / "classes.txt"))
    assert str(caught.value.where).endswith(f"classes.txt, line {line}")


@pytest.mark.parametrize("value", [["a", "b"], {"a": 0, "b": 1}])
def test_a_misspelt_key_is_no_class(value):
    with pytest.raises(DataError, match="unknown key 'clases'") as caught:
        read_class_table({"clases": value, "ignore_index": 255})
    assert "did you mean classes?" in str(caught.value)
    assert read_class_table({"glasses": [1, 2, 3], "face": {"id": 4}}).names == ["glasses", "face"]


def test_files_that_are_none(tmp_path):
    (tmp_path / "classes.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_class_table(str(tmp_path / "classes.json"))
    with pytest.raises(DataError, match=r"did you mean classes\.json"):
        read_class_table(str(tmp_path / "clases.json"))
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(DataError, match="not valid YAML"):
        read_class_table(str(tmp_path / "a.yaml"))


# ---- colours to draw with


def test_colours_are_the_tables_then_the_palettes_then_usual_ones():
    table = read_class_table({"sky": {"id": 4}, "road": list(ROAD), "tree": 9})
    palette = np.arange(15).reshape(5, 3)
    assert table.colors(palette) == [(12, 13, 14), ROAD, usual_color(2)]
    assert table.colors() == [usual_color(0), ROAD, usual_color(2)]
    same = np.zeros((256, 3), dtype=np.uint8)
    assert read_class_table(["sky", "road"]).colors(same) == [usual_color(0), usual_color(1)]


def test_usual_colours_are_those_of_pascal_voc():
    assert [usual_color(number) for number in (0, 1, 2, 3, 15, 20)] == [
        (0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (192, 128, 128), (0, 64, 128),
    ]  # fmt: skip
    assert len({usual_color(number) for number in range(256)}) == 256


# ---- class numbers


def ids(values, palette=None, dtype=np.uint8):
    return MaskValues(np.array(values, dtype=dtype), palette)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_ids_become_class_numbers(dtype):
    lookup = MaskLookup(read_class_table({"classes": {"a": 7, "b": 200, "c": 0}, "ignore": [255]}))
    numbers = lookup(ids([[7, 200], [0, 255]], dtype=dtype), where="")
    assert numbers.dtype == np.int16
    np.testing.assert_array_equal(numbers, [[0, 1], [2, -1]])


def test_large_and_negative_ids():
    lookup = MaskLookup(read_class_table({"classes": {"a": 1_000_000, "b": 3}, "ignore": [-1]}))
    np.testing.assert_array_equal(lookup(ids([[-1, 3, 1_000_000]], dtype=np.int32), where=""), [[-1, 1, 0]])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_unknown_ids_are_named_with_their_place(dtype):
    lookup = MaskLookup(read_class_table({"classes": ["a", "b"], "ignore": [9]}))
    with pytest.raises(DataError) as caught:
        lookup(ids([[0, 1, 9], [1, 12, 7], [0, 7, 0]], dtype=dtype), where="masks/x.png")
    text = str(caught.value)
    for part in ("masks/x.png", "7, 12", "3 pixels", "row 1, column 1", "0 (a), 1 (b)", "ignored ids are 9"):
        assert part in text, text


def test_black_and_white_masks_get_a_hint():
    with pytest.raises(DataError, match=r"task.classes='{background: 0, nucleus: 255}'"):
        MaskLookup(read_class_table(["background", "nucleus"]))(ids([[0, 255]]), where="x")


def test_colours_become_class_numbers():
    lookup = MaskLookup(read_class_table({"sky": list(SKY), "road": list(ROAD), "x": [0, 0, 1]}))
    colors = np.array([[SKY, (0, 0, 1)], [ROAD, SKY]], dtype=np.uint8)
    np.testing.assert_array_equal(lookup(MaskValues(colors), where=""), [[0, 2], [1, 0]])
    colors[1, 1] = 127
    with pytest.raises(
        DataError, match=r"1 colours that do not belong to a class: \[127, 127, 127\] \(1 pixels.*row 1, column 1"
    ):
        lookup(MaskValues(colors), where="m.png")


def test_colours_without_a_table_of_colours():
    with pytest.raises(DataError, match="the classes have no colours"):
        MaskLookup(read_class_table(["a", "b"]))(MaskValues(np.array([[ROAD]], np.uint8)), where="m.png")


PALETTE = np.array([ROAD, SKY, (0, 0, 0)], dtype=np.uint8)


def test_a_palette_that_contradicts_the_colours_is_an_error_where_it_is_used():
    content = {"classes": {"sky": list(SKY), "road": list(ROAD), "void": [0, 0, 0]}}
    lookup = MaskLookup(read_class_table(content))
    np.testing.assert_array_equal(lookup(ids([[2, 2]], PALETTE), where=""), [[2, 2]])
    with pytest.raises(DataError, match=r"id 0 is 'sky', but its colour in the palette.*'road'"):
        lookup(ids([[0, 2]], PALETTE), where="m.png")
    by_color = MaskLookup(read_class_table({**content, "masks": "colors"}))
    np.testing.assert_array_equal(by_color(ids([[0, 1, 2]], PALETTE), where=""), [[1, 0, 2]])
    by_id = MaskLookup(read_class_table({**content, "masks": "ids"}))
    np.testing.assert_array_equal(by_id(ids([[0, 1, 2]], PALETTE), where=""), [[0, 1, 2]])


def test_numbers_are_places_among_the_classes_of_training():
    table = read_class_table({"classes": ["road", "sky"]})
    lookup = MaskLookup(table, ["sky", "tree", "road"])
    np.testing.assert_array_equal(lookup(ids([[0, 1]]), where=""), [[2, 0]])
    with pytest.raises(DataError, match="class 'road' is not among the 2 classes of the training data"):
        MaskLookup(table, ["sky", "tree"])
