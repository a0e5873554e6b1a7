"""Forked workers read what they ask for, whatever the data set has opened before; what they cannot share is named."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import zipfile

import pytest
import torch

from lockstep.core.data import fingerprint, inherited, reachable
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import DataError
from tests import own_tasks
from tests.processes import HANG_S

CPU = torch.device("cpu")
PLANS = [MicroBatchPlan((number,), 0, False) for number in range(6)]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the places of files are known on Linux alone")


def batches(data, workers=2):
    loader = Loader(MicroBatches(data, own_tasks.Plain(), 0, training=True), workers, CPU)
    return [batch.collated.tolist() for batch in loader.run(lambda: PLANS)]


class Opened(torch.utils.data.Dataset):
    """Sample n is n. Two workers seek before either of them reads."""

    def __init__(self, file, both):
        self.inner, self.both = {"file": file}, both

    def __len__(self):
        return len(PLANS)

    def __getitem__(self, index):
        file = self.inner["file"]
        os.lseek(file, index, os.SEEK_SET) if isinstance(file, int) else file.seek(index)
        self.both.wait(HANG_S)
        return torch.tensor(ord(os.read(file, 1) if isinstance(file, int) else file.read(1)))


@linux
@pytest.mark.parametrize("kind", ["raw", "buffered", "to write as well", "deleted", "a number"])
def test_workers_have_their_own_places_in_a_file_that_the_data_set_has_opened(tmp_path, kind):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(6)))
    number = os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # as sqlite opens its files
    with open(path, "r+b" if kind == "to write as well" else "rb", buffering=-1 if kind == "buffered" else 0) as file:
        if kind == "deleted":
            path.unlink()
        both = multiprocessing.get_context("fork").Barrier(2)
        assert batches(Opened(number if kind == "a number" else file, both)) == [[number] for number in range(6)]
        assert file.tell() == 0  # the rank's place is its own, too
    os.close(number)


class Zipped(torch.utils.data.Dataset):
    def __init__(self, path):
        self.archive = zipfile.ZipFile(path)

    def __len__(self):
        return len(PLANS)

    def __getitem__(self, index):
        return torch.tensor(int(self.archive.read(str(index))))


@linux
def test_workers_go_on_at_the_place_that_they_have_inherited(tmp_path):
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for index in range(6):
            archive.writestr(str(index), str(index))
    data = Zipped(tmp_path / "archive.zip")
    data.archive.read("3")
    assert batches(data) == [[number] for number in range(6)]
    data.archive.close()


class Logs(torch.utils.data.Dataset):
    def __init__(self, file):
        self.file = file

    def __len__(self):
        return len(PLANS)

    def __getitem__(self, index):
        self.file.write(f"{index}\n".encode())
        return torch.tensor(index)


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_lines_of_workers_follow_one_another_in_a_log(tmp_path, mode):
    with open(tmp_path / "log", mode, buffering=0) as file:
        file.write(b"head\n")
        batches(Logs(file))
        file.write(b"tail\n")
    lines = (tmp_path / "log").read_text().split()
    assert (lines[0], lines[-1]) == ("head", "tail")
    assert {str(number) for number in range(6)} <= set(lines)


# ---- connections


class Connected(torch.utils.data.Dataset):
    """Asks a server for each sample."""

    def __init__(self, address, way):
        self.address, self.way, self.pid = address, way, os.getpid()
        self.client = {"socket": socket.create_connection(address)}

    def __len__(self):
        return len(PLANS)

    def __getitem__(self, index):
        if self.way == "its own" and self.pid != os.getpid():
            self.client["socket"].close()
            self.client["socket"], self.pid = socket.create_connection(self.address), os.getpid()
        if self.way != "unused":
            self.client["socket"].sendall(bytes([index]))
            return torch.tensor(ord(self.client["socket"].recv(1)))
        return torch.tensor(index)


@pytest.fixture
def server():
    """Answers each byte with the same byte."""

    def answer(connection):
        with connection:
            while sent := connection.recv(1):
                connection.sendall(sent)

    def accept():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)


@linux
@pytest.mark.parametrize("way", ["shared", "its own", "unused"])
def test_a_connection_that_workers_share_is_an_error_if_they_use_it(server, way):
    data = Connected(server, way)
    if way == "shared":
        expected = r"Connected\.__getitem__: Connected\.client\['socket'\] is a connection that was open when"
        with pytest.raises(DataError, match=expected) as caught:
            batches(data)
        assert "data.start_method=spawn" in caught.value.remedy
    else:
        assert batches(data) == [[number] for number in range(6)]
    data.client["socket"].close()


def test_what_workers_share_without_a_trace_is_a_warning(tmp_path):
    class Data:
        pass

    data = Data()
    data.more = [Data()]
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        client.connect(str(tmp_path / "s"))
        data.more[0].client = client
        data.pair = socket.socketpair()  # two processes of the user's own, and not a server
        data.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        found = inherited.warnings(data)
        assert [text.partition(" share ")[2].partition(". If")[0] for text in found] == [
            "Data.process (a process with pipes)",
            "Data.more[0].client (a connection)",
        ]
        data.process.communicate()
        for one in data.pair:
            one.close()
    assert inherited.warnings(data) == []


# ---- two workers at once


class ByWorker(torch.utils.data.Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index, self.draw()


def test_samples_that_depend_on_the_worker_are_an_error_and_random_samples_are_none():
    def number():
        return torch.utils.data.get_worker_info().id

    with pytest.raises(DataError, match="sample 0 is different in two loader workers that read it at the same time"):
        fingerprint.digests(ByWorker(number), [0, 1, 2], in_worker=True)
    assert len(fingerprint.digests(ByWorker(lambda: os.urandom(8)), [0, 1, 2], in_worker=True)) == 3
    same = ByWorker(torch.rand)
    same.draw = lambda: torch.rand(1)
    assert fingerprint.digests(same, [0, 1, 2], in_worker=True) == fingerprint.digests(same, [0, 1, 2])


def test_a_batch_of_one_sample_is_read_by_a_worker_if_there_are_workers():
    """Workers that are forked later must not inherit a file that the data set opens with its first sample."""

    class Pid(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.tensor(os.getpid())

    for workers in (0, 1):
        loader = Loader(MicroBatches(Pid(), own_tasks.Plain(), 0, training=True), workers, CPU)
        assert (int(loader.batch_of(1)) == os.getpid()) == (workers == 0)


# ---- what a data set holds


def test_reachable_objects_have_their_paths_and_long_lists_are_not_read():
    class Slots:
        __slots__ = ("inner",)

    class Long(list):
        def __iter__(self):
            for place, item in enumerate(super().__iter__()):
                assert place < 100
                yield item

    wanted = threading.Lock()
    slots = Slots()
    slots.inner = wanted
    inner = torch.utils.data.TensorDataset(torch.zeros(4))
    inner.kept = {"a": (1, slots)}
    inner.long = Long(range(1000))
    inner.again = inner
    data = torch.utils.data.ConcatDataset([torch.utils.data.Subset(inner, [0, 1]), torch.utils.data.Subset(inner, [2])])
    paths = [path for path, value in reachable.held_by(data, "data") if value is wanted]
    assert paths == ["data.datasets[0].dataset.kept['a'][1].inner"]

    def read():
        return slots

    assert any(value is wanted for _, value in reachable.held_by(read, "read"))
