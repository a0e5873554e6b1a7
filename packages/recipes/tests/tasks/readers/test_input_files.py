"""Files, folders and patterns on the command line become files, each once and in a fixed order."""

import os

import pytest

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.readers.input_files import find_files

KINDS = (".jpg", ".png")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.jpg", "a.PNG", "c.txt", "sub/d.jpg", "sub/deep/e.png", ".hidden.jpg", ".cache/f.jpg", "x[1].jpg"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)


def found(*arguments):
    return [str(path) for path in find_files(arguments, KINDS)]


IN_FOLDER = ["a.PNG", "b.jpg", "sub/d.jpg", "sub/deep/e.png", "x[1].jpg"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pictures"], IN_FOLDER),
        (["pictures/b.jpg", "pictures"], ["b.jpg", "a.PNG", "sub/d.jpg", "sub/deep/e.png", "x[1].jpg"]),
        (["pictures/b.jpg", "./pictures/../pictures/b.jpg"], ["b.jpg"]),
        (["pictures/c.txt"], ["c.txt"]),  # the user knows
        (["pictures/*.jpg"], ["b.jpg", "x[1].jpg"]),
        (["pictures/*"], IN_FOLDER),  # with the folders that match, and without c.txt
        (["pictures/**/*.png"], ["sub/deep/e.png"]),
        (["pictures/x[1].jpg"], ["x[1].jpg"]),  # the name of a file is no pattern
        (["pictures/sub/?.jpg"], ["sub/d.jpg"]),
    ],
)
def test_files_that_are_meant(folder, arguments, expected):
    assert found(*arguments) == [os.path.join("pictures", name) for name in expected]


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("nowhere.jpg", "no such file or folder"),
        ("empty", "no file in this folder can be used"),
        ("pictures/*.gif", "no file matches this pattern"),
        ("pictures/*.txt", "1 name matches, but none can be used"),
    ],
)
def test_what_names_no_file_is_an_error(folder, argument, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        found("pictures", argument)
    assert caught.value.where == argument
    assert caught.value.remedy


def test_pipes_are_left_out(folder):
    os.mkfifo("pictures/pipe.png")
    os.symlink("nowhere.png", "pictures/sub/link.png")  # it is an error when it is read
    expected = [*IN_FOLDER[:4], "sub/link.png", "x[1].jpg"]
    assert found("pictures") == found("pictures/*") == [os.path.join("pictures", name) for name in expected]
    with pytest.raises(UsageError, match="is neither a file nor a folder"):
        found("pictures/pipe.png")
