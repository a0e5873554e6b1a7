"""A machine that has too little of something: which sentence says so, and what goes on all the same."""

import errno
import gc
import math
import multiprocessing
import os
import resource
import signal
import tempfile

import pytest
import torch

from lockstep.core import shortages
from lockstep.core.data import worker_deaths
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import DataError, Preempted
from lockstep.core.parallel import launched
from lockstep.core.parallel.world import join_world
from lockstep.core.shortages import ShortageError
from lockstep.launch import launcher, start
from tests.own_tasks import Plain
from tests.ranks import run_ranks
from tests.runs import config, fit


def full(path=None):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path and str(path))


def temporary_files_in(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n: too many open files: a process may have"),
        (RuntimeError("[enforce fail at loop.cc:48] rv != -1. pipe: Too many open files"), "ulimit -n"),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), "/dev/shm"),
        (full(f"{tempfile.gettempdir()}/pymp-x/listener"), "temporary files cannot be written: No space left"),
    ],
)
def test_what_the_machine_lacks_has_a_sentence_with_the_limit_and_a_remedy(error, expected):
    with pytest.raises(ShortageError, match=expected) as raised, shortages.explained():
        raise error
    assert raised.value.remedy
    assert not raised.value.retryable


@pytest.mark.parametrize("error", [full("/elsewhere/file"), DataError("Too many open files"), RuntimeError("another")])
def test_other_errors_stay_as_they_are(error):
    assert shortages.explanation(error) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's half-made DataLoader
def test_a_training_that_may_open_no_more_files_says_so():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)

    class Opens(Plain):
        def model(self):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))  # before the loader starts its workers
            return super().model()

    try:
        with pytest.raises(ShortageError, match=f"a process may have {free + 2} of them"):
            fit(Opens(), config(data={"workers": 2}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()


class Limits:
    """The limits of a process, instead of those of this process."""

    def __init__(self, monkeypatch, soft, hard, largest=math.inf):
        self.now, self.largest = (soft, hard), largest
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.now)
        monkeypatch.setattr(resource, "setrlimit", self.set)

    def set(self, kind, limits):
        if limits[0] > self.largest:
            raise ValueError("current limit exceeds maximum limit")
        self.now = limits


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [
        (512, (1024, 4096), (4096, 4096)),
        (2, (256, 1 << 20), (1 << 14, 1 << 20)),
        (20_000, (1024, resource.RLIM_INFINITY), (40_128, resource.RLIM_INFINITY)),
        (2, (1 << 20, 1 << 20), (1 << 20, 1 << 20)),  # it is never lowered
        (2, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_ranks_raise_their_limit_of_open_files(ranks, before, after, monkeypatch):
    limits = Limits(monkeypatch, *before)
    shortages.allow_open_files(ranks)
    assert limits.now == after


def test_a_limit_that_the_system_does_not_raise_stays(monkeypatch):
    limits = Limits(monkeypatch, 256, resource.RLIM_INFINITY, largest=10_240)
    shortages.allow_open_files(2)
    assert limits.now == (256, resource.RLIM_INFINITY)


def test_ranks_that_need_more_open_files_than_the_system_allows_say_how_many(monkeypatch):
    Limits(monkeypatch, 256, 1024)
    expected = "ulimit -n: 512 ranks need about 1152 open files: a process may have 1024 of them"
    with pytest.raises(ShortageError, match=expected) as raised:
        shortages.allow_open_files(512)
    assert "ulimit -n 1152; docker run --ulimit nofile=1152" in raised.value.remedy
    assert not raised.value.retryable


def limits_of_a_rank():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with join_world("cpu"):
        return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_rank_that_joins_others_has_raised_its_limit():
    for soft, hard in run_ranks(2, limits_of_a_rank):
        assert soft == (1 << 14 if hard == resource.RLIM_INFINITY else min(hard, 1 << 14)) > 256


def test_loader_workers_without_shared_memory_say_so():
    class Loader:
        def __iter__(self):
            raise full()  # as a lock of `multiprocessing` does

    with pytest.raises(ShortageError, match="/dev/shm: shared memory is full: it has"):
        worker_deaths.start(Loader())
    error = worker_deaths.killed_again("loader worker 1 was killed by SIGBUS", "while sample 1 was read")
    assert "shared memory is full" in error.what
    assert not error.retryable
    assert worker_deaths.killed_again("loader worker 1 was killed by SIGKILL", "").retryable


def test_a_folder_that_is_not_used_for_temporary_files_is_named_once(tmp_path, monkeypatch, capsys):
    temporary_files_in(tmp_path / "missing", monkeypatch)
    for _ in range(2):
        with shortages.temporary_folder() as folder:
            assert folder.is_dir()
        assert not folder.exists()
    assert capsys.readouterr().err.count(f"note: TMPDIR={tmp_path / 'missing'} does not exist") == 1


def test_no_folder_for_temporary_files_is_an_error(tmp_path, monkeypatch):
    temporary_files_in(tmp_path / "missing", monkeypatch)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(ShortageError, match="no folder for temporary files can be written") as raised:
        shortages.new_temporary_folder("x")
    assert raised.value.where == str(tmp_path / "missing")


class Disk:
    """A disk without room, except for what files give back that are deleted."""

    def __init__(self, monkeypatch, path_type):
        self.room, self.write, self.unlink = 0, path_type.write_bytes, path_type.unlink
        monkeypatch.setattr(path_type, "write_bytes", lambda path, content: self._write(path, content))
        monkeypatch.setattr(path_type, "unlink", lambda path, **options: self._delete(path, **options))

    def _write(self, path, content):
        if len(content) > self.room:
            raise full()
        self.room -= len(content)
        return self.write(path, content)

    def _delete(self, path, **options):
        self.room += path.stat().st_size if path.exists() else 0
        self.unlink(path, **options)


def test_a_launch_on_a_full_disk_ends_before_it_starts_ranks(tmp_path, monkeypatch):
    temporary_files_in(tmp_path, monkeypatch)
    Disk(monkeypatch, type(tmp_path))
    with pytest.raises(ShortageError, match=f"TMPDIR={tmp_path}: temporary files cannot be written: No space left"):
        launcher.launch([], nproc=2, main=print)
    assert not list(tmp_path.iterdir())


def test_reports_and_requests_to_stop_use_the_room_that_was_kept(tmp_path, monkeypatch, capfd):
    before = {number: signal.getsignal(number) for number in launcher.ASKING}
    temporary_files_in(tmp_path, monkeypatch)
    with start.folder_of(2) as folder:
        disk = Disk(monkeypatch, type(tmp_path))
        try:
            stop = launcher.Forwarding(ends_process=False)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        stop.folder = folder
        stop.pass_on("SIGTERM")
        assert (folder / "stop").read_text() == "SIGTERM"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error-0.json"))
        launched.report_failure(Preempted("stopped, saved"), "stopped, saved")
        assert "stopped, saved" in (folder / "error-0.json").read_text()
        for kept in folder.glob("kept-room-*"):
            kept.unlink()
        disk.room = 0
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error-1.json"))
        launched.report_failure(Preempted("stopped, saved"), "stopped, saved")  # and the rank keeps its exit code
        assert not (folder / "error-1.json").exists()
        assert "stopped, saved\n(this could not be reported to the launcher" in capfd.readouterr().err


def test_sockets_are_made_in_a_short_folder_if_that_of_temporary_files_is_long(tmp_path, monkeypatch):
    settings = multiprocessing.current_process()._config
    monkeypatch.setitem(settings, "tempdir", None)
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'a' * 50}")
    shortages.allow_short_sockets()
    assert settings["tempdir"] is None
    long = tmp_path / ("a" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    shortages.allow_short_sockets()
    made = settings["tempdir"]
    assert len(made) < 40
    data = [torch.zeros(1 << 14)] * 2  # too large for the pipe: the worker hands it over by a socket
    loader = Loader(MicroBatches(data, Plain(), 0, training=True), 1, torch.device("cpu"))
    (batch,) = loader.run(lambda: [MicroBatchPlan((0, 1), 0, False)])
    assert batch.collated.shape == (2, 1 << 14)
    assert not list(long.iterdir())
    settings["tempdir"] = f"{long}/pymp-abc"  # of the parent process
    shortages.allow_short_sockets()
    assert len(settings["tempdir"]) < 40


def test_few_open_files_are_room_for_few_tensors(monkeypatch):
    opened = len(os.listdir("/dev/fd"))
    Limits(monkeypatch, opened + 64 + 100, 1 << 20)
    assert 95 <= shortages.free_files() <= 100
    Limits(monkeypatch, 16, 16)
    assert shortages.free_files() == 0
    Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert shortages.free_files() > 16_000
