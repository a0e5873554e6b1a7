"""Files of predictions: distinct names for all samples, whole files, and paths that are refused."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep.trainer.predictions import PredictionFiles, distinct_names


@pytest.mark.parametrize(
    ("places", "names"),
    [
        ([], []),
        (["a.png"], ["a"]),
        (["x/a.png", "x/b.png"], ["a", "b"]),
        (["x/a.png", "x/y/a.png"], ["a", "y/a"]),
        (["/x/a.png", "/z/a.png"], ["x/a", "z/a"]),
        (["a.png", "a.jpg", "b.jpg"], ["a.png", "a.jpg", "b"]),
        (["a.png", "A.png"], ["a.png", "A.png-2"]),
        (["a.png", "a.jpg", "a.jpg.bmp"], ["a.png", "a.jpg", "a.jpg-2"]),
        (["t.csv, row 1", "t.csv, row 2"], ["t.csv, row 1", "t.csv, row 2"]),
        (["s.tar: k.png", "predictions.png"], ["s.tar_ k", "predictions-2"]),
        (["sample-00000000", "sample-00000001"], ["sample-00000000", "sample-00000001"]),
    ],
)
def test_names(places, names):
    assert distinct_names(places) == names


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.lists(st.text("abA./-2:", min_size=1, max_size=6), max_size=12))
@example(["a", "a-2", "a", "A"])
def test_names_are_distinct_and_lead_nowhere_else(places):
    names = distinct_names(places)
    assert len({name.casefold() for name in names}) == len(places)
    assert not any(name.startswith("/") or ".." in name.split("/") for name in names)


def test_files_are_whole_and_replace_older_files(tmp_path):
    files = PredictionFiles(tmp_path / "new", ["a", "x/b"])
    for content in (b"old", b"new"):
        files.write(1, {"masks/*.png": content, "*-boxes.json": b"[]"})
    assert (tmp_path / "new/masks/x/b.png").read_bytes() == b"new"
    assert (tmp_path / "new/x/b-boxes.json").exists()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"mask.png": b""}, "the path 'mask.png'"),
        ({"/*.png": b""}, "the path '/"),
        ({"../*.png": b""}, "the path '../"),
        ({"*.png": "text"}, "of type str"),
    ],
)
def test_other_paths_and_contents_are_refused(files, says, tmp_path):
    with pytest.raises(UsageError, match=says) as caught:
        PredictionFiles(tmp_path, ["a"]).write(0, files)
    assert caught.value.where == "Presenter.files"
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_names_the_file(tmp_path):
    (tmp_path / "masks").touch()
    with pytest.raises(UsageError, match="cannot be written") as caught:
        PredictionFiles(tmp_path, ["a"]).write(0, {"masks/*.png": b""})
    assert caught.value.where == str(tmp_path / "masks/a.png")
