"""What the cache keeps is made once, whole or not at all, whoever else wants it and whenever its maker dies."""

import errno
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.cache_folder import cache_root
from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.readers.cache import cached, digest_of
from tests.processes import HANG_S

OTHER = """
import sys, time
from pathlib import Path
from lockstep_recipes.tasks.readers.cache import cached

place = Path(sys.argv[1])

def make(folder):
    (folder / "half").write_text("by the other")
    (place / "started").touch()
    while not (place / "go").exists():
        time.sleep(0.01)
    (folder / "whole").write_text("by the other")

print(cached("kind", "key", make))
"""


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def other(root, tmp_path):
    """Another process that is in the middle of making `kind-key`, and goes on when there is a file `go`."""
    with subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            while not (tmp_path / "started").exists():
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.fixture
def when_waiting(monkeypatch):
    """Has something done as soon as this process waits for another."""
    pause = time.sleep

    def plan(act):
        def sleep(seconds):
            act()
            pause(seconds)

        monkeypatch.setattr(time, "sleep", sleep)

    return plan


def by_me(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "whole").write_text("by me")


def fails(error):
    def make(folder):
        by_me(folder)
        raise error

    return make


def folders(root):
    """All that is in the cache but lock files."""
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_what_was_made_is_found_and_not_made_again(root):
    folder = cached("kind", "key", by_me)
    assert folder == root / "kind-key"
    assert (folder / "inner" / "whole").read_text() == "by me"
    assert cached("kind", "key", fails(AssertionError("made twice"))) == folder
    assert (folder / "inner" / "whole").read_text() == "by me"
    assert {cached("kind", "another", by_me), cached("another", "key", by_me)} == {
        root / "kind-another",
        root / "another-key",
    }
    shutil.rmtree(root)
    assert (cached("kind", "key", by_me) / "inner" / "whole").read_text() == "by me"


def test_of_two_processes_one_makes_it_and_both_get_it(root, tmp_path, other, when_waiting):
    when_waiting((tmp_path / "go").touch)
    mine = []
    found = cached("kind", "key", mine.append)
    assert mine == []
    assert {path.name: path.read_text() for path in found.iterdir()} == {
        "half": "by the other",
        "whole": "by the other",
    }
    assert other.communicate(timeout=HANG_S)[0].strip() == str(found)
    assert folders(root) == ["kind-key"]


def test_when_the_maker_is_killed_the_one_that_waits_makes_it_whole(root, other, when_waiting):
    assert [name.startswith(".staging-kind-key-") for name in folders(root)] == [True]
    when_waiting(other.kill)
    found = cached("kind", "key", by_me)
    assert other.wait(timeout=HANG_S) == -9
    assert [path.name for path in found.iterdir()] == ["inner"]
    assert (found / "inner" / "whole").read_text() == "by me"
    assert folders(root) == ["kind-key"]


def test_other_keys_do_not_wait(root, other, when_waiting):
    def unwanted():
        raise AssertionError("waits")

    when_waiting(unwanted)
    assert (cached("kind", "another", by_me) / "inner").is_dir()
    assert len(folders(root)) == 2  # the staging folder of the process that still makes its own is left to it


def test_leftovers_of_a_killed_process_are_cleared(root):
    for pid in (1, os.getpid()):
        left = root / f".staging-kind-key-{pid}"
        left.mkdir(parents=True)
        (left / "half").write_text("by one that was killed")
    found = cached("kind", "key", by_me)
    assert [path.name for path in found.iterdir()] == ["inner"]
    assert folders(root) == ["kind-key"]


def test_a_full_disk_is_told_also_by_libraries_that_know_no_oserror(root):
    """`tokenizers` is written in Rust, and raises this."""
    error = Exception("No space left on device (os error 28)")
    with pytest.raises(
        DataError, match=r"cannot be written: No space left on device[\s\S]*set LOCKSTEP_CACHE"
    ) as caught:
        cached("kind", "key", fails(error))
    assert caught.value.where == str(root)
    assert folders(root) == []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), KeyboardInterrupt(), DataError("no hub: refused (os error 111)", where="file:3")],
    ids=lambda error: type(error).__name__,
)
def test_a_make_that_raises_leaves_nothing(root, error):
    with pytest.raises(type(error)) as caught:
        cached("kind", "key", fails(error))
    assert caught.value is error
    assert folders(root) == []
    assert (cached("kind", "key", by_me) / "inner" / "whole").read_text() == "by me"


def test_the_folder_gets_its_name_when_all_its_content_is_on_disk(root, monkeypatch):
    synced = []

    def fsync(handle):
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, (root / "kind-key").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    cached("kind", "key", by_me)
    staging = f".staging-kind-key-{platform.node()}-{os.getpid()}"
    assert set(synced[:-1]) == {("whole", False), ("inner", False), (staging, False)}
    assert synced[-1] == ("cache", True)  # the name


def test_a_full_disk_is_a_data_error_with_a_remedy(root):
    with pytest.raises(DataError, match="No space left on device") as caught:
        cached("kind", "key", fails(OSError(errno.ENOSPC, "No space left on device")))
    assert caught.value.where == str(root)
    assert "free disk space" in caught.value.remedy
    assert "LOCKSTEP_CACHE" in caught.value.remedy
    assert folders(root) == []


def test_a_cache_below_a_file_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="Not a directory") as caught:
        cached("kind", "key", by_me)
    assert caught.value.where == str(tmp_path / "file" / "cache")
    assert "LOCKSTEP_CACHE" in caught.value.remedy


def test_a_cache_that_may_not_be_written_is_a_usage_error(root, monkeypatch):
    def mkdir(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)  # root may write anywhere
    with pytest.raises(UsageError, match="cannot write: Permission denied") as caught:
        cached("kind", "key", by_me)
    assert caught.value.where == str(root)
    assert "LOCKSTEP_CACHE" in caught.value.remedy


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "lockstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "lockstep"


def test_the_key_is_of_a_files_content_and_not_of_its_name_or_time(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("content")
    other.write_text("content")
    os.utime(other, (0, 0))
    key = digest_of("part", files=(one,))
    assert key == digest_of("part", files=(other,)) == digest_of("part", files=(one,))
    assert len(key) == 32
    other.write_text("Content")
    assert digest_of("part", files=(other,)) != key
    assert digest_of("part", files=(one, one)) != key


def test_the_key_tells_parts_apart():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (), (1,), ("1",), (None,), (1, 2), ((1, 2),), ("c", "ab")]
    assert len({digest_of(*one) for one in parts}) == len(parts)


def test_a_file_without_content_to_read_is_a_data_error(tmp_path):
    for path, why in ((tmp_path / "gone", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=why) as caught:
            digest_of(files=(path,))
        assert caught.value.where == str(path)
        assert caught.value.remedy


def test_without_locks_what_another_process_is_writing_is_left_alone(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", no_locks)
    (tmp_path / ".staging-kind-key-other-1").mkdir()
    folder = cached("kind", "key", lambda staging: (staging / "a").write_text("whole"))
    assert (folder / "a").read_text() == "whole"
    assert (tmp_path / ".staging-kind-key-other-1").is_dir()
