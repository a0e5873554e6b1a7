"""A checkpoint is read once per node: the bytes that each rank reads from the files, and the same tensors as alone."""

import collections
import contextlib
import io
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from lockstep.core.checkpoint import files, shared_parts, store
from lockstep.core.errors import CheckpointError
from lockstep.core.parallel import nodes
from lockstep.core.parallel.world import join_world
from tests import own_tasks, runs
from tests.core.checkpoint import cases
from tests.ranks import run_ranks
from tests.selection import mainly

_read = collections.defaultdict(set)
"""The numbers of the bytes that were read from each file, so that a byte counts once. torch.load reads some twice."""


class Counted(io.FileIO):
    """A file that notes which of its bytes are read."""

    def readinto(self, buffer):
        at = self.tell()
        count = super().readinto(buffer)
        _read[self.name].update(range(at, at + count))
        return count

    def read(self, size=-1):
        content = super().read(size)
        _read[self.name].update(range(len(content)))
        return content


def read_bytes(suffix):
    return sum(len(read) for name, read in _read.items() if Path(name).suffix == suffix)


@contextlib.contextmanager
def counting(per_node):
    """Count what this process reads of checkpoints. Neighbouring ranks share a node, `per_node` of them each.

    Comparing files with their checksums does not count: each file is compared by one rank of all.
    """
    opened = Path.open

    def counted(path, mode="r", *arguments, **options):
        is_counted = mode == "rb" and path.parent.name.startswith("step-")
        return Counted(path) if is_counted else opened(path, mode, *arguments, **options)

    _read.clear()
    name = f"node-{int(os.environ.get('RANK', 0)) // per_node}"
    with (
        mock.patch.object(Path, "open", counted),
        mock.patch.dict(os.environ, {"LOCKSTEP_NODE": name}),
        mock.patch.object(store, "check", return_value=[]),
    ):
        yield


def resume(settings, folder, per_node):
    """Go on with a run: the bytes of shares that this rank read, the bytes of the index, and the weights."""
    with counting(per_node), mock.patch.object(shared_parts, "_TOGETHER_BYTES", 500):
        weights, results = runs.fit(own_tasks.Plain(), settings, folder)
    return (
        read_bytes(".distcp"),
        read_bytes(".json"),
        results["step"],
        cases.bits(torch.cat([w.flatten() for w in weights.values()])),
    )


def evaluate(folder, per_node):
    from lockstep import Trainer
    from lockstep.configs import config_file

    with counting(per_node):
        results = Trainer(config_file.read_run(folder), run_dir=folder, quiet=True).evaluate(
            own_tasks.Plain(eval_length=20)
        )
    return read_bytes(".distcp"), results["loss"]


def run(folder, world=1, **sections):
    """A run of four steps, and the bytes of its shares."""
    settings = runs.config(train={"steps": 4}, **sections)
    run_ranks(world, runs.fit_kind, "Plain", {}, settings, folder)
    (checkpoint,) = store.listed(folder / "checkpoints")
    return sum(path.stat().st_size for path in checkpoint.path.glob("*.distcp"))


LONGER = runs.config(train={"steps": 6}, checkpoint={"every_minutes": None})


@pytest.mark.parametrize(
    ("per_node", "readers"), [(2, [0, 2]), (1, [0, 1, 2]), pytest.param(3, [0], marks=pytest.mark.exhaustive)]
)
def test_replicated_state_is_read_by_one_rank_of_each_node(per_node, readers, tmp_path):
    size = run(tmp_path)
    ranks = run_ranks(3, resume, LONGER, tmp_path, per_node)
    read = [found[0] for found in ranks]
    assert [rank for rank, count in enumerate(read) if count] == readers
    assert all(0.9 * size < count <= size for count in read if count)  # tensors are padded, and have checksums
    assert [rank for rank, found in enumerate(ranks) if found[1]] == readers  # the index, too
    assert [found[2] for found in ranks] == [6, 6, 6]
    assert len({found[3] for found in ranks}) == 1


def test_the_result_does_not_depend_on_who_reads(tmp_path):
    weights = []
    for per_node in (1, 2):
        folder = tmp_path / str(per_node)
        run(folder, world=2)
        weights += [found[3] for found in run_ranks(2, resume, LONGER, folder, per_node)]
    assert len(set(weights)) == 1


@pytest.mark.parametrize("strategy", mainly(["fsdp"], ["ddp", "fsdp"]))
def test_shards_are_read_once(strategy, tmp_path):
    size = run(tmp_path, world=2, parallel={"strategy": strategy})
    settings = LONGER | {"parallel": {"strategy": "fsdp"}}
    read = [found[0] for found in run_ranks(2, resume, settings, tmp_path, 2)]
    assert sum(read) <= size
    if strategy == "fsdp":  # the same shards: each rank reads its own, and the first rank the replicated counters
        assert min(read) > 0.3 * size


def test_evaluation_reads_once(tmp_path):
    run(tmp_path)
    (first, loss), (second, other) = run_ranks(2, evaluate, tmp_path, 2)
    assert first > 0 == second
    assert loss == other


def read_damaged(folder):
    """The error of this rank where a file has become shorter since it was checked."""
    with join_world("cpu") as world:
        (checkpoint,) = store.listed(folder)
        try:
            dict(files.read(checkpoint.path, checkpoint.index, node=world.node_group))
        except CheckpointError as error:
            return str(error)


def test_all_ranks_of_a_node_raise_the_error_of_the_rank_that_reads(tmp_path):
    checkpoint = cases.commit(tmp_path, 4)
    share = checkpoint.path / "__0_0.distcp"
    share.write_bytes(share.read_bytes()[:100])
    first, second = run_ranks(2, read_damaged, tmp_path)
    assert first == second == f"{share}: is shorter than it was"


def test_nodes_with_the_same_name_are_told_apart(monkeypatch, tmp_path):
    keys = []
    for boot in ("1", "2"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(nodes, "_BOOT", tmp_path / boot)
        keys.append(nodes.own_key())
    assert len(set(keys)) == 2
    monkeypatch.setenv("LOCKSTEP_NODE", "b")
    assert nodes.own_name() == "b"
    monkeypatch.setattr(nodes, "_BOOT", tmp_path / "none")
    assert nodes.own_key() == "b"
