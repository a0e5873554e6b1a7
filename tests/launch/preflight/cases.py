"""Nodes for tests: each rank of one machine is a node of its own, and something may be wrong with one of them."""

import contextlib
import errno
import io
import os
import threading
import time
from pathlib import Path
from unittest import mock

import torch

from lockstep import LockstepError, Trainer
from lockstep.core import devices
from lockstep.core.parallel.world import join_world
from lockstep.launch.preflight import facts, links, shared_folder
from lockstep.launch.preflight import run as preflight
from tests import own_tasks, rank_cases, runs


def rank():
    return int(os.environ["RANK"])


@contextlib.contextmanager
def nodes(per_node=1):
    """Ranks believe that they are on several machines, `a`, `b`, ..., with `per_node` ranks each."""
    name = "abcdefgh"[rank() // per_node]
    with mock.patch.dict(os.environ, {"LOCKSTEP_NODE": name, "LOCAL_WORLD_SIZE": str(per_node)}):
        yield


@contextlib.contextmanager
def injected(faults, culprit=1):
    """On rank `culprit`, these things are wrong."""
    with contextlib.ExitStack() as stack:
        patch = lambda *arguments, **options: stack.enter_context(mock.patch.object(*arguments, **options))  # noqa: E731
        if "folder" in faults:  # what is never seen is not waited for
            patch(shared_folder, "_VISIBLE_S", 0.0)
        patch(facts, "_ENDING_S", 0.0)
        for fault in faults if rank() == culprit else ():
            if fault == "torch":
                patch(torch, "__version__", "2.12.1")
            if fault == "lockstep":
                patch(facts, "_digest_of_package", lambda: "other code")
            if fault == "clock":
                patch(facts, "time", mock.Mock(wraps=time, time=lambda: time.time() - 90))
            if fault in ("read-only", "full"):
                number = errno.EROFS if fault == "read-only" else errno.ENOSPC

                def refuse(*_, number=number):
                    raise OSError(number, os.strerror(number))

                patch(shared_folder, "_write", refuse)
            if fault == "silent":
                patch(facts, "ANSWER_S", 0.2)
                patch(facts, "_kind", lambda path: threading.Event().wait())
            if fault in ("memory", "crowded"):
                free = 1 << 28 if fault == "memory" else 20 << 30
                patch(devices.Cpu, "free_memory", lambda device, free=free: (free, 80 << 30))
                patch(devices.Cpu, "users", lambda device: ["process 4711 (python) holds 60000 MiB"])
            if fault == "device":
                patch(devices.Cpu, "identity", lambda device: "GPU-1234")
        if "device" in faults and rank() != culprit:
            patch(devices.Cpu, "identity", lambda device: "GPU-1234")
        yield


@rank_cases.impatient()
def train(settings, folder, faults, by_rank=None, per_node=1):
    """The error of a training in which these things are wrong on rank 1; None if it trains.

    Args:
        by_rank: other config sections for rank 1.
    """
    settings = settings | (by_rank or {}) if rank() == 1 else settings
    folder = Path(folder, str(rank())) if "folder" in faults else Path(folder)
    with nodes(per_node), injected(faults):
        try:
            Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Plain(eval_length=20))
        except LockstepError as error:
            return str(error)
    return None


def own_lines(settings, folder):
    """What this rank of a training that a different launcher has started writes to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        assert train(settings, folder, [], per_node=2) is None
    return shown.getvalue()


def check(settings, folder, faults, per_node=1):
    """The findings of `Trainer.preflight`, as (check, level, what)."""
    with nodes(per_node), injected(faults):
        found = Trainer(settings, run_dir=folder, quiet=True).preflight(own_tasks.Plain())
    return [(finding.check, str(finding.level), finding.what) for finding in found]


def lines_of_slow_links():
    """What the log says where everything that rank 1 sends comes late."""
    send = links._send

    def late(*arguments):
        time.sleep(0.05)
        send(*arguments)

    with nodes(), join_world("cpu") as world, mock.patch.object(links, "_send", late if world.rank == 1 else send):
        found = preflight.check(subject(), world)
    return preflight.lines(found)


def subject(folder="runs/none"):
    return facts.Subject(config={}, source="", folder=Path(folder), data={}, stop=None, fresh=False)


def collectives_and_files(settings, folder):
    """What the checks leave on the disk, for ranks of one node: they make no file, and measure no link."""
    with (
        mock.patch.object(shared_folder, "probe", side_effect=AssertionError),
        mock.patch.object(links, "sum_over_ranks", side_effect=AssertionError),
        mock.patch.object(facts, "_digest_of_package", side_effect=AssertionError),
    ):
        runs.fit(own_tasks.Plain(), settings, folder)
    return sorted(path.name for path in Path(folder).iterdir() if "preflight" in path.name)


@rank_cases.impatient()
def data_faults(settings, folder, other=None):
    """The error where rank 1 sees other data: a file that is not there, or `other`."""
    kind = facts._kind
    with (
        nodes(),
        mock.patch.object(facts, "_kind", lambda path: kind(Path(other or folder / "gone")) if rank() else kind(path)),
    ):
        try:
            Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Plain())
        except LockstepError as error:
            return str(error)


@rank_cases.impatient()
def train_with_lengths(settings, folder, lengths):
    """The error where the nodes have data sets of these lengths."""
    with nodes():
        try:
            Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Plain(length=lengths[rank()]))
        except LockstepError as error:
            return str(error)
