"""Class names in YAML files stay as they are written."""

import pytest
import yaml

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.readers.yaml_names import load_names
from lockstep_recipes.tasks.vision.readers.box_layouts import find_layout
from lockstep_recipes.tasks.vision.readers.class_table import read_class_table

WRITTEN = ["no", "on", "yes", "null", "007", "7", "1e3", "1.0", "2020-01-02", "true", "0x1F", "1_000", "12:30", ".inf"]


@pytest.mark.parametrize("loads", [lambda text: load_names(text)["names"], None], ids=["list", "table"])
def test_names_are_what_was_written(tmp_path, loads):
    (tmp_path / "classes.yaml").write_text("".join(f"- {name}\n" for name in WRITTEN))
    if loads is None:
        assert read_class_table(str(tmp_path / "classes.yaml")).names == WRITTEN
    else:
        assert list(map(str, loads(f"names: [{', '.join(WRITTEN)}]"))) == WRITTEN


def test_names_of_ids_and_colours_are_what_was_written(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text("{0: no, 1: null, 2: 007}")
    assert read_class_table(str(path)).names == ["no", "null", "007"]
    path.write_text("{classes: {off: [0, 0, 0], on: [255, 0, 0]}, ignore_index: null}")
    table = read_class_table(str(path))
    assert (table.names, table.ignored) == (["off", "on"], ())


def test_the_names_of_yolo_are_what_was_written(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").touch()
    (tmp_path / "data.yaml").write_text("train: images\nval: null\nnames: [no, null, 007]\n")
    layout = find_layout(str(tmp_path), key="data.train", split="train")
    assert layout.names == ("no", "null", "007")
    (tmp_path / "data.yaml").write_text("train: images\nnames: [no, ~]\n")
    with pytest.raises(DataError, match="`names` is"):
        find_layout(str(tmp_path), key="data.train", split="train")


def test_a_byte_order_mark_is_not_part_of_a_class(tmp_path):
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images" / "a.jpg").touch()
    (tmp_path / "classes.txt").write_text("cat\ndog\n", encoding="utf-8-sig")
    assert find_layout(str(tmp_path), key="data.train", split="train").names == ("cat", "dog")


def test_a_key_that_occurs_twice_is_an_error():
    with pytest.raises(yaml.YAMLError, match="'road' occurs more than once"):
        load_names("road: [1, 2, 3]\nsky: [2, 3, 4]\nroad: [4, 5, 6]\n")
