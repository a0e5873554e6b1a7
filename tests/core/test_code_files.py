"""Which library a file of code belongs to: real folders count, whatever the folders of users are called."""

import json
import os
import sys
import sysconfig

import pytest
import torch

import lockstep
from lockstep.core import code_files, errors
from lockstep.core.code_files import library_of

LIBRARIES = ("lockstep", "torch", "transformers", "lightning", "pytorch_lightning", "site-packages", "python3.11")


@pytest.fixture(autouse=True)
def nothing_known():
    yield
    library_of.cache_clear()  # sys.path is as before


def test_files_of_users_are_their_own_in_folders_of_any_name(tmp_path):
    for name in LIBRARIES:
        for folder in (tmp_path / name, tmp_path / name / "src", tmp_path / "src" / name / "core" / "devices"):
            folder.mkdir(parents=True)
            (folder / "train.py").touch()
            assert library_of(str(folder / "train.py")) is None, folder
    beside = os.path.dirname(lockstep.__file__) + "_of_mine"
    assert library_of(f"{beside}/train.py") is None
    assert library_of("<stdin>") is library_of("<string>") is None


def test_files_of_libraries_are_known_by_their_real_folders(tmp_path, monkeypatch):
    target, link, cache = (tmp_path / name for name in ("target", "link", "cache"))
    (target / "one-1.0.dist-info").mkdir(parents=True)  # pip install --target
    (target / "alone.py").touch()
    (cache / "two").mkdir(parents=True)
    (target / "two").symlink_to(cache / "two")  # an installer that makes links
    (link).symlink_to(os.path.dirname(lockstep.__file__))
    installed = f"{sysconfig.get_path('purelib')}{os.sep}"
    expected = {
        lockstep.__file__: "lockstep",
        errors.__file__: "lockstep",
        str(link / "core" / "errors.py"): "lockstep",
        torch.__file__: "torch",
        torch.nn.functional.__file__: "torch",
        json.__file__: "python",
        "<frozen runpy>": "python",
        f"{installed}somebody/model.py": "somebody",
        str(target / "one" / "a.py"): "one",
        str(target / "alone.py"): "alone",
        str(target / "two" / "a.py"): "two",
    }
    monkeypatch.setattr(sys, "path", [*sys.path, str(target)])
    assert {file: library_of(file) for file in expected} == expected
    assert not any(map(code_files.is_own_code, expected))


def test_tracebacks_show_the_lines_of_a_user_whose_folder_has_the_name_of_a_library(tmp_path):
    for name in LIBRARIES:
        file = tmp_path / name / "mine.py"
        scope = {"json": json}
        exec(compile("def prepare():\n    return json.loads('{')", str(file), "exec"), scope)
        with pytest.raises(ValueError, match="Expecting") as caught:
            scope["prepare"]()
        assert errors.frame_of_task(caught.value).filename == str(file)
        assert f'"{file}", line 2' in errors.short_traceback(caught.value)
