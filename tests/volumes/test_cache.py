"""The cache of volumes: the same values, read by slice, whole or absent after a kill, one decoding for many processes."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from lockstep.data.cache import CACHE_VARIABLE
from lockstep.errors import DataError
from lockstep.volumes import cache
from lockstep.volumes.cache import cached_volume, content_address
from lockstep.volumes.read import read_volume
from tests.volumes import scans

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


def mapped(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_a_volume_is_decoded_once(scan, monkeypatch):
    plain = read_volume(scan)
    first, key = cached_volume(scan)
    monkeypatch.setattr(cache, "read_volume", None)
    again, same_key = cached_volume(scan)
    assert key == same_key
    for volume in (first, again):
        assert_same(volume, plain)
        assert mapped(volume.slices)
        assert type(volume.slices) is np.ndarray
        assert not volume.slices.flags.writeable


def test_the_address_is_that_of_the_content(scan, tmp_path):
    copy = tmp_path / "elsewhere" / "b.nii.gz"
    copy.parent.mkdir()
    shutil.copy(scan, copy)
    assert cached_volume(copy)[1] == cached_volume(scan)[1]
    assert len(list((tmp_path / "cache").glob("volume-*/slices.npy"))) == 1
    folder = scans.write_dicom(tmp_path / "one", scans.voxels())
    other = shutil.copytree(folder, tmp_path / "two")
    for number, file in enumerate(sorted(other.iterdir())):
        file.rename(other / f"{9 - number}.dcm")
    assert content_address(folder) == content_address(other)
    assert content_address(folder) != content_address(scan)


def test_another_content_or_reading_is_another_volume(scan):
    keys = [cached_volume(scan)[1], cached_volume(scan, distance_mm=6.0)[1], cached_volume(scan, allow_gaps=True)[1]]
    assert cached_volume(scan, distance_mm=6.0)[0].spacing[0] == 6
    scans.write_nifti(scan, scans.voxels(12, seed=1))
    os.utime(scan, ns=(1, 1))
    keys.append(cached_volume(scan)[1])
    assert len(set(keys)) == 4
    np.testing.assert_array_equal(cached_volume(scan)[0].slices, scans.voxels(12, seed=1))


def test_without_a_cache_nothing_is_written(scan, root):
    volume, key = cached_volume(scan, keep=False)
    assert not list(root.glob("volume-*/slices.npy"))
    kept, same = cached_volume(scan)
    assert_same(volume, kept)
    assert key == same


def test_a_full_disk_is_a_warning(scan, monkeypatch):
    usage = type("Usage", (), {"free": 1 << 20, "total": 1 << 40})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage)
    with pytest.warns(RuntimeWarning, match="no more space"):
        volume, _ = cached_volume(scan)
    assert_same(volume, read_volume(scan))


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
import numpy as np
from lockstep.volumes import cache
save, read = np.save, cache.read_volume
def slow(*args):
    save(*args)
    print("written", flush=True)
    if sys.argv[2] == "hang":
        import time
        time.sleep(60)
def counted(*args, **options):
    print("decoded", flush=True)
    return read(*args, **options)
np.save, cache.read_volume = slow, counted
print(int(cache.cached_volume(Path(sys.argv[1]))[0].slices.astype(int).sum()), flush=True)
"""


def reader(scan, mode):
    return subprocess.Popen([sys.executable, "-c", _READ, str(scan), mode], stdout=subprocess.PIPE, text=True)


def test_a_kill_in_the_middle_of_a_write(scan, root):
    with reader(scan, "hang") as process:
        assert process.stdout.readline() == "decoded\n"
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert list(root.glob(".staging-volume-*/slices.npy"))
    volume, _ = cached_volume(scan)
    assert_same(volume, read_volume(scan))
    assert not list(root.glob(".staging-volume-*"))


def test_many_processes_decode_once(scan):
    processes = [reader(scan, "go") for _ in range(3)]
    lines = [line for process in processes for line in process.communicate()[0].split()]
    assert lines.count("decoded") == 1
    assert lines.count(str(int(read_volume(scan).slices.astype(int).sum()))) == 3
    assert all(process.returncode == 0 for process in processes)
