"""The cache of decoded images gives what the decoder gives, whoever fills it, and whenever its writers die."""

import contextlib
import errno
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.configs import config_file
from lockstep.core.data.cache_options import CacheOptions
from lockstep.core.errors import DataError, UsageError
from lockstep.sampling.of_data import labels_of
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.images import cache as cache_module
from lockstep_recipes.tasks.vision.images import cache_slabs
from lockstep_recipes.tasks.vision.images.cache import DecodedCache, folder_name, reduced
from lockstep_recipes.tasks.vision.images.decode import decode
from lockstep_recipes.tasks.vision.readers.decoded_images import DecodedImages
from lockstep_recipes.tasks.vision.readers.image_records import read_image_records
from tests.processes import HANG_S, ROOT
from tests.selection import mainly

fork = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")


def picture(index, channels=3):
    """The pixels of image `index`. Sizes differ."""
    draw = np.random.default_rng(index)
    return draw.integers(0, 256, (5 + index % 7, 9 + index % 3, channels), dtype=np.uint8)


def absent():
    raise AssertionError("the image should be in the cache")


def get(cache, index, channels=3):
    return cache.pixels(index, lambda: picture(index, channels))


def fill(cache, indices):
    for index in indices:
        np.testing.assert_array_equal(get(cache, index), picture(index))


def assert_whole(cache, indices):
    for index in indices:
        np.testing.assert_array_equal(cache.pixels(index, absent), picture(index))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def test_pixels_are_decoded_once(folder):
    cache = DecodedCache(folder, 20)
    assert 3 not in cache
    fill(cache, range(20))
    assert 3 in cache
    assert_whole(cache, range(20))
    assert_whole(DecodedCache(folder, 20), range(20))  # and in the next run
    assert cache.summary().startswith(f"decoded images: 20 of 20 in {folder}, ")
    assert [path.name for path in sorted(folder.iterdir())] == ["00000.slab", "index"]


@pytest.mark.parametrize("channels", [1, 3])
def test_each_caller_gets_pixels_of_its_own(folder, channels):
    cache = DecodedCache(folder, 3, channels=channels)
    get(cache, 1, channels)
    kept = cache.pixels(1, absent)
    kept[:] = 0  # a task may change what it gets
    np.testing.assert_array_equal(cache.pixels(1, absent), picture(1, channels))


def test_an_error_of_the_decoder_comes_through_and_leaves_nothing(folder):
    cache = DecodedCache(folder, 3)

    def fail():
        raise DataError("truncated", where="a.jpg")

    with pytest.raises(DataError, match=r"a\.jpg"):
        cache.pixels(1, fail)
    assert 1 not in cache
    with pytest.raises(UsageError, match=r"the decoder returned float64 \(2, 2, 3\)"):
        cache.pixels(1, lambda: np.zeros((2, 2, 3)))
    with pytest.raises(UsageError, match="the decoder returned a list"):
        cache.pixels(1, list)


def test_views_and_negative_strides_are_kept_as_they_look(folder):
    cache = DecodedCache(folder, 2)
    wide = picture(5)
    for _ in range(2):
        np.testing.assert_array_equal(cache.pixels(0, lambda: wide[::-1, 2:6]), wide[::-1, 2:6])


# ---- several processes


def _fill_all(folder, count, start, results):
    cache = DecodedCache(folder, count)
    decoded = 0
    for step in range(count):
        index = (start + step) % count

        def read(index=index):
            nonlocal decoded
            decoded += 1
            return picture(index)

        np.testing.assert_array_equal(cache.pixels(index, read), picture(index))
    results.put((decoded, cache.stopped))


def run_children(*targets):
    children = [fork.Process(target=target, args=arguments) for target, *arguments in targets]
    for child in children:
        child.start()
    return children


def test_two_processes_fill_at_once(folder):
    count = 400
    results = fork.Queue()
    children = run_children(*((_fill_all, folder, count, start, results) for start in (0, count // 2)))
    decoded = [results.get(timeout=HANG_S) for _ in children]
    for child in children:
        child.join()
    assert [stopped for _, stopped in decoded] == [None, None]
    assert count <= sum(number for number, _ in decoded) <= 2 * count
    assert_whole(DecodedCache(folder, count), range(count))


def test_forked_workers_do_not_write_into_the_slab_of_their_parent(folder):
    cache = DecodedCache(folder, 90)
    fill(cache, range(10))

    def work(part):
        fill(cache, range(part, 90, 3))

    children = run_children((work, 0), (work, 1))
    fill(cache, range(2, 90, 3))
    for child in children:
        child.join(HANG_S)
        assert child.exitcode == 0
    assert_whole(cache, range(90))
    assert len(list(folder.glob("*.slab"))) >= 2  # a worker may use the slab of another that has ended


def test_a_copy_for_another_process_opens_the_same_cache(folder):
    cache = DecodedCache(folder, 4, options=CacheOptions(limit_bytes=10_000, shorter_side=6))
    get(cache, 0)
    copy = pickle.loads(pickle.dumps(cache))
    assert (copy.options.limit_bytes, copy.options.shorter_side) == (10_000, 6)
    copy.pixels(0, absent)


def _die_in_the_middle(folder, count):
    cache = DecodedCache(folder, count)
    fill(cache, range(7))
    places = {"data": 1, "head": 2, "entry": 3}
    writes = 0
    write = os.pwrite

    def half(handle, content, offset):
        nonlocal writes
        writes += 1
        if writes == places[os.environ["DIE_AT"]]:
            write(handle, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, content, offset)

    os.pwrite = half
    get(cache, 7)


@pytest.mark.parametrize("place", ["data", "head", "entry"])
def test_a_process_is_killed_in_the_middle_of_a_write(folder, place, monkeypatch):
    monkeypatch.setenv("DIE_AT", place)
    (child,) = run_children((_die_in_the_middle, folder, 20))
    child.join(HANG_S)
    assert child.exitcode == -signal.SIGKILL
    cache = DecodedCache(folder, 20)
    assert 7 not in cache
    assert_whole(cache, range(7))
    fill(cache, range(7, 20))
    assert_whole(cache, range(20))
    assert len(list(folder.glob("*.slab"))) == 1  # the rest of the slab of the killed process is used


SLOWLY = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from lockstep_recipes.tasks.vision.images.cache import DecodedCache
from packages.recipes.tests.tasks.vision.images.test_cache import get
cache = DecodedCache(Path(sys.argv[1]), 5000)
for index in range(5000):
    get(cache, index)
    if index == 50:
        print("some", flush=True)
"""


@pytest.mark.exhaustive  # as test_a_process_is_killed_in_the_middle_of_a_write
def test_a_process_is_killed_at_any_instant(folder):
    root = str(ROOT)
    with subprocess.Popen(
        [sys.executable, "-c", SLOWLY.format(root=root), str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "some\n"
        time.sleep(0.01)
        process.kill()
    cache = DecodedCache(folder, 5000)
    there = [index for index in range(5000) if index in cache]
    assert len(there) > 50
    assert_whole(cache, there)
    fill(cache, range(0, 5000, 7))


# ---- the machine stops


def test_after_a_restart_of_the_machine_pixels_are_compared_once(folder, monkeypatch):
    cache = DecodedCache(folder, 8)
    fill(cache, range(8))
    slab = folder / "00000.slab"
    content = bytearray(slab.read_bytes())
    start = content.find(picture(3).tobytes())
    content[start : start + picture(3).nbytes] = bytes(picture(3).nbytes)  # never reached the disk
    slab.write_bytes(content)
    monkeypatch.setattr(cache_module, "_boot", lambda: 12345)
    later = DecodedCache(folder, 8)
    crc32, compared = zlib.crc32, []
    monkeypatch.setattr(zlib, "crc32", lambda data: compared.append(1) or crc32(data))
    assert_whole(later, [0, 1, 2])
    np.testing.assert_array_equal(get(later, 3), picture(3))
    assert_whole(later, range(8))
    before = len(compared)
    assert_whole(later, range(8))
    assert len(compared) - before == 8  # of the entries only


def test_after_a_restart_no_published_pixels_are_written_over(folder, monkeypatch):
    cache = DecodedCache(folder, 12)
    fill(cache, range(6))
    del cache
    with (folder / "00000.slab").open("r+b") as file:  # the newest head was lost
        file.seek(8)
        file.write((16).to_bytes(8, "little"))
    monkeypatch.setattr(cache_module, "_boot", lambda: 12345)
    later = DecodedCache(folder, 12)
    assert_whole(later, range(6))
    fill(later, range(6, 12))
    assert_whole(later, range(12))


# ---- limits


@pytest.mark.parametrize("limit", mainly([40_000], [4096, 40_000, 100_000]))
def test_the_limit_of_bytes_is_kept(folder, limit, monkeypatch):
    monkeypatch.setattr(cache_slabs, "_SMALLEST", 8192)
    count = 2000  # about 430 KB
    caches = [DecodedCache(folder, count, options=CacheOptions(limit_bytes=limit)) for _ in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(count):
            np.testing.assert_array_equal(get(caches[index % 2], index), picture(index))
        again = DecodedCache(folder, count, options=CacheOptions(limit_bytes=limit))
        told_before = len(told)
        fill(again, range(count))
    assert sum(path.stat().st_size for path in folder.glob("*.slab")) <= limit
    assert again.bytes_on_disk() <= limit
    held = sum(index in again for index in range(count))
    assert held * 250 > limit // 2
    assert told_before == 1
    assert "is full" in str(told[0].message)
    assert "training continues" in str(told[0].message)
    assert "is full" in again.summary()


def test_a_picture_larger_than_a_slab_is_not_kept(folder):
    cache = DecodedCache(folder, 2, options=CacheOptions(limit_bytes=100))
    get(cache, 1)
    assert 1 not in cache
    assert cache.stopped is None


def test_processes_without_a_slab_go_on_and_look_again(folder, monkeypatch):
    monkeypatch.setattr(cache_slabs, "_TRY_AGAIN", 3)
    first, second = (DecodedCache(folder, 20, options=CacheOptions(limit_bytes=8000)) for _ in range(2))
    get(first, 0)
    fill(second, range(1, 4))
    assert [index in second for index in range(4)] == [True, False, False, False]
    first._slabs.close()
    fill(second, range(4, 8))
    assert second.stopped is None
    assert 7 in second


def test_the_shorter_side_is_limited_with_and_without_space(folder):
    large = np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(large).resize((31, 20), Image.Resampling.BILINEAR))  # 30.5, rounded
    for limit in (None, 1):
        cache = DecodedCache(folder / str(limit), 3, options=CacheOptions(limit_bytes=limit, shorter_side=20))
        for _ in range(2):
            np.testing.assert_array_equal(cache.pixels(0, lambda: large), expected)
    assert (0 in cache) is False
    np.testing.assert_array_equal(get(cache, 1), picture(1))  # small images stay
    assert reduced(large.transpose(1, 0, 2), 20).shape == (31, 20, 3)
    assert reduced(large[:, :, :1], 20).shape == (20, 31, 1)


# ---- folders and disks that fail


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written .*training continues") as told:
        cache = DecodedCache(tmp_path / "file" / "cache", 10)
    assert len(told) == 1
    fill(cache, range(10))
    fill(cache, range(10))
    assert "cannot be written" in cache.summary()


def test_only_the_first_rank_of_a_machine_tells(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCAL_RANK", "3")
    fill(DecodedCache(tmp_path / "file" / "cache", 10), range(3))


def test_a_full_disk_is_one_warning_for_all_processes(folder, monkeypatch):
    caches = [DecodedCache(folder, 30) for _ in range(3)]
    fill(caches[0], range(10))
    write = os.pwrite

    def full(handle, content, offset):
        if len(content) > 40:  # pixels
            write(handle, content[: len(content) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(RuntimeWarning, match="No space left on device") as told:
        [fill(cache, range(30)) for cache in caches]
    assert len(told) == 1
    assert_whole(caches[1], range(10))
    monkeypatch.undo()
    fill(DecodedCache(folder, 30), range(30))  # the next run finds space
    assert_whole(DecodedCache(folder, 30), range(30))


def test_a_part_of_the_disk_stays_free(folder, monkeypatch):
    free = os.statvfs(folder.parent)
    monkeypatch.setattr(cache_slabs, "_KEPT_FREE", (free.f_bavail + 1) * free.f_frsize)
    monkeypatch.setattr(os, "fstatvfs", lambda handle: os.statvfs_result((1, 1, *[1 << 40] * 2, 0, *[0] * 5)))
    cache = DecodedCache(folder, 3)
    with pytest.warns(RuntimeWarning, match="of the disk free"):
        fill(cache, range(3))
    assert 0 not in cache


def test_somebody_deletes_the_cache_and_begins_another(folder):
    cache = DecodedCache(folder, 10)
    fill(cache, range(5))
    cache._open.clear()
    shutil.rmtree(folder)
    other = DecodedCache(folder, 10)
    for index in range(10):
        other.pixels(index, lambda: np.zeros((5, 9, 3), np.uint8))
    with contextlib.suppress(RuntimeWarning):
        fill(cache, range(10))  # never the pixels of the other


def test_few_files_are_open_at_a_time(folder, monkeypatch):
    monkeypatch.setattr(cache_slabs, "_SMALLEST", 4096)
    cache = DecodedCache(folder, 200, options=CacheOptions(limit_bytes=200_000))
    fill(cache, range(200))
    cache._most_open = 3
    assert_whole(cache, [*range(200), *reversed(range(200))])
    assert len(cache._open) <= 3 < len(list(folder.glob("*.slab")))


def test_the_name_of_the_folder_stands_for_the_content():
    names = {
        folder_name(digest, channels=channels, shorter_side=side)
        for digest in ("a" * 32, "b" * 32)
        for channels in (1, 3)
        for side in (None, 256)
    }
    assert len(names) == 8


# ---- data sets


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "root"))
    for number in range(8):
        path = tmp_path / "set" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number).repeat(4, 0).repeat(4, 1)).save(path, quality=90)
    return read_image_records(str(tmp_path / "set"), "train", ClassificationOptions())


def test_samples_are_the_same_with_and_without_the_cache(records):
    without = DecodedImages(records)
    with_cache = DecodedImages(records, cache=CacheOptions(10**9))
    for _ in range(2):
        for index in range(len(records)):
            expected, sample = without[index], with_cache[index]
            np.testing.assert_array_equal(sample.pixels, expected.pixels)
            assert (sample.label, sample.name) == (expected.label, expected.name)
    np.testing.assert_array_equal(without[3].pixels, decode(records[3].data))
    assert without.where(3) == records.where(3)
    assert labels_of(with_cache).tolist() == [sample.label for sample in without]
    assert "8 of 8" in with_cache.cache.summary()


def test_a_file_that_changes_begins_another_cache(records, tmp_path):
    first = DecodedImages(records, cache=CacheOptions())
    first[0]
    os.utime(tmp_path / "set/a/0.jpg", ns=(1, 1))
    assert DecodedImages(records, cache=CacheOptions()).cache.folder != first.cache.folder
    assert DecodedImages(records, channels=1, cache=CacheOptions())[0].pixels.shape == (20, 36, 1)


def test_pictures_of_another_folder_never_come_out_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for part, value in (("train", 0), ("val", 255)):  # equal names, sizes and times
        for label in "ab":
            path = tmp_path / "data" / part / label / "0.bmp"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (4, 4), (value,) * 3).save(path)
            os.utime(path, (1_577_836_800, 1_577_836_800))
    for split, value in (("train", 0), ("eval", 255)):
        records = read_image_records(str(tmp_path / "data"), split, ClassificationOptions())
        data = DecodedImages(records, cache=CacheOptions())
        assert all((data[index].pixels == value).all() for index in (0, 1))


def test_a_damaged_picture_is_named(records, tmp_path):
    path = tmp_path / "set/a/0.jpg"
    path.write_bytes(path.read_bytes()[:300])
    for cache in (None, CacheOptions()):
        with pytest.raises(DataError, match=r"set/a/0\.jpg"):
            DecodedImages(records, cache=cache)[0]


def test_loader_workers_fill_the_cache(records):
    data = DecodedImages(records, cache=CacheOptions())
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
    sums = [int(sample.pixels.sum()) for sample in loader]
    assert sums == [int(DecodedImages(records)[index].pixels.sum()) for index in range(8)]
    assert "8 of 8" in data.cache.summary()


def test_real_pictures_are_bit_identical(shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    root = shared_data / "classification" / "bccd_cells"
    records = read_image_records(str(root), "eval", ClassificationOptions())
    data = DecodedImages(records, cache=CacheOptions())
    for _ in range(2):
        for index in range(len(records)):
            np.testing.assert_array_equal(data[index].pixels, decode(records[index].data))


def test_a_source_of_png_files_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "root"))
    file = io.BytesIO()
    Image.fromarray(picture(1)).save(file, "PNG")
    (tmp_path / "set/a").mkdir(parents=True)
    (tmp_path / "set/a/1.png").write_bytes(file.getvalue())
    data = DecodedImages(
        read_image_records(str(tmp_path / "set"), "train", ClassificationOptions()), cache=CacheOptions()
    )
    for _ in range(2):
        np.testing.assert_array_equal(data[0].pixels, picture(1))


# ---- the config


def test_the_keys_of_the_config():
    with pytest.raises(UsageError, match="cache_size needs cache: decoded"):
        config_file.load("digits", ["data.cache_size=256"])
    config = config_file.load("digits", ["data.cache=decoded", "data.cache_size=256", "data.cache_gb=0.5"])
    assert (config.data.cache, config.data.cache_size, config.data.cache_gb) == ("decoded", 256, 0.5)
