"""The cache of volumes: the same values by slice, whole or absent after a kill, one decoding for many processes."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.cache_folder import CACHE_VARIABLE
from lockstep.core.data.fingerprint import fingerprint
from lockstep.core.errors import DataError
from lockstep_recipes.tasks.ct.volumes import cache
from lockstep_recipes.tasks.ct.volumes.cache import cached_volume, content_address
from lockstep_recipes.tasks.ct.volumes.read import read_volume
from lockstep_recipes.tasks.ct.volumes.slices import Slices
from packages.recipes.tests.tasks.ct.volumes import scans

pytest.importorskip("nibabel")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def scan(tmp_path):
    return scans.write_nifti(tmp_path / "a.nii.gz", scans.voxels(12))


def assert_same(one, other):
    np.testing.assert_array_equal(one.slices, other.slices)
    np.testing.assert_array_equal(one.positions, other.positions)
    assert (one.spacing, one.notes) == (other.spacing, other.notes)


def test_a_volume_is_decoded_once(scan, monkeypatch):
    plain = read_volume(scan)
    first = cached_volume(scan)
    monkeypatch.setattr(cache, "read_volume", None)
    again = cached_volume(scan)
    assert first.address == again.address
    for volume in (first, again):
        assert_same(volume, plain)


def test_slices_are_read_as_an_array_is_indexed(scan):
    plain, kept, memory = read_volume(scan).slices, cached_volume(scan).slices, cached_volume(scan, keep=False).slices
    for slices in (kept, memory):
        assert (slices.shape, slices.size, len(slices), slices.dtype) == (plain.shape, plain.size, 12, plain.dtype)
        for places in (3, -1, np.int64(2), slice(2, 9, 3), slice(None), np.array([7, 0, 7]), [1, 2], np.array([], int)):
            np.testing.assert_array_equal(slices[places], plain[places])
            assert slices[places].shape == plain[places].shape
        slices[2][:] = 0  # the caller's own
        np.testing.assert_array_equal(slices, plain)
        with pytest.raises(IndexError):
            slices[12]
    assert fingerprint([kept]) == fingerprint([Slices(plain)])  # with or without a cache, the data are the same
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(kept))[3:5], plain[3:5])


def test_a_few_slices_read_a_small_part_of_the_file(scan, monkeypatch):
    volume = cached_volume(scan)
    preadv, read = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    chosen = volume.slices[[2, 9]]
    assert sum(read) == chosen.nbytes


def test_a_kept_file_that_was_cut_is_named(scan, root):
    volume = cached_volume(scan)
    (file,) = root.glob("volume-*/slices.npy")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="cached volume cannot be read: the file is too short"):
        volume.slices[11]
    file.unlink()
    with pytest.raises(DataError, match="cached volume cannot be read"):
        cached_volume(scan)


def test_the_address_is_that_of_the_content(scan, tmp_path):
    copy = tmp_path / "elsewhere" / "b.nii.gz"
    copy.parent.mkdir()
    shutil.copy(scan, copy)
    assert cached_volume(copy).address == cached_volume(scan).address
    assert len(list((tmp_path / "cache").glob("volume-*/slices.npy"))) == 1
    folder = scans.write_dicom(tmp_path / "one", scans.voxels())
    other = shutil.copytree(folder, tmp_path / "two")
    for number, file in enumerate(sorted(other.iterdir())):
        file.rename(other / f"{9 - number}.dcm")
    assert content_address(folder) == content_address(other)
    assert content_address(folder) != content_address(scan)


def test_another_content_or_reading_is_another_volume(scan):
    keys = [cached_volume(scan, **options).address for options in ({}, {"distance_mm": 6.0}, {"allow_gaps": True})]
    assert cached_volume(scan, distance_mm=6.0).spacing[0] == 6
    scans.write_nifti(scan, scans.voxels(12, seed=1))
    os.utime(scan, ns=(1, 1))
    keys.append(cached_volume(scan).address)
    assert len(set(keys)) == 4
    np.testing.assert_array_equal(cached_volume(scan).slices, scans.voxels(12, seed=1))


def test_another_file_with_the_same_size_and_date_is_read(tmp_path, root):
    path = tmp_path / "a.npy"
    np.save(path, scans.voxels())
    os.utime(path, ns=(1, 1))
    cached_volume(path)
    np.save(path, scans.voxels(seed=1))
    os.utime(path, ns=(1, 1))
    np.testing.assert_array_equal(cached_volume(path).slices, scans.voxels(seed=1))


def test_without_a_cache_nothing_is_written(scan, root):
    volume = cached_volume(scan, keep=False)
    assert not list(root.glob("volume-*/slices.npy"))
    kept = cached_volume(scan)
    assert_same(volume, kept)
    assert volume.address == kept.address


def test_a_full_disk_is_a_warning(scan, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 20, "total": 1 << 40})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.warns(RuntimeWarning, match="no space left"):
        volume = cached_volume(scan)
    assert_same(volume, read_volume(scan))


def test_a_disk_that_becomes_full_during_the_write_is_a_warning(scan, root, monkeypatch):
    def full(path, array):
        Path(path).write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cache.np, "save", full)
        with pytest.warns(RuntimeWarning, match="no space left"):
            assert_same(cached_volume(scan), read_volume(scan))
    assert not list(root.glob("volume-*/slices.npy"))
    assert not list(root.glob(".staging-*"))
    assert_same(cached_volume(scan), read_volume(scan))


def test_a_damaged_file_leaves_nothing(tmp_path, root):
    path = tmp_path / "a.nii"
    path.write_text("nothing")
    with pytest.raises(DataError, match="not readable"):
        cached_volume(path)
    assert not [
        entry for entry in root.iterdir() if entry.name.startswith("volume-") and entry.name[7:15] != "addresse"
    ]


_READ = """
import sys
from pathlib import Path
from pathlib import Path
import numpy as np
from lockstep_recipes.tasks.ct.volumes import cache
save, read = np.save, cache.read_volume
def slow(*args):
    save(*args)
    print("written", flush=True)
    if sys.argv[2] == "hang":
        import time
        time.sleep(900)
def counted(*args, **options):
    print("decoded", flush=True)
    return read(*args, **options)
np.save, cache.read_volume = slow, counted
print(int(cache.cached_volume(Path(sys.argv[1])).slices[:].astype(int).sum()), flush=True)
"""


def reader(scan, mode):
    return subprocess.Popen([sys.executable, "-c", _READ, str(scan), mode], stdout=subprocess.PIPE, text=True)


def test_a_kill_in_the_middle_of_a_write(scan, root):
    with reader(scan, "hang") as process:
        assert process.stdout.readline() == "decoded\n"
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert list(root.glob(".staging-volume-*/slices.npy"))
    volume = cached_volume(scan)
    assert_same(volume, read_volume(scan))
    assert not list(root.glob(".staging-volume-*"))


@pytest.mark.exhaustive
def test_many_processes_decode_once(scan):
    processes = [reader(scan, "go") for _ in range(3)]
    lines = [line for process in processes for line in process.communicate()[0].split()]
    assert lines.count("decoded") == 1
    assert lines.count(str(int(read_volume(scan).slices.astype(int).sum()))) == 3
    assert all(process.returncode == 0 for process in processes)
