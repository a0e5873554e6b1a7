"""Trainings on shards: the weights of plain torch on 1, 2 and 3 ranks, and after a restart on another number."""

import pytest

from lockstep.core.errors import LockstepError
from tests import runs, shard_cases
from tests.ranks import run_ranks
from tests.selection import mainly

STEPS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(shard_cases.write(tmp_path_factory.mktemp("shards") / "data", "parquet"))


@pytest.fixture(scope="module")
def expected(source):
    return shard_cases.by_hand(source, STEPS)


@pytest.mark.parametrize(("world", "then"), mainly([(3, 2)], [(1, 3), (2, 1), (3, 2)]))
def test_weights_are_those_of_plain_torch_and_go_on_with_other_ranks(source, expected, world, then, tmp_path):
    run_ranks(world, shard_cases.trained, source, 7, tmp_path)  # in the middle of the second epoch
    for found in run_ranks(then, shard_cases.trained, source, STEPS, tmp_path):
        assert runs.difference(found, expected) < 1e-10


def test_loader_workers_and_another_format_change_nothing(expected, tmp_path):
    with shard_cases.Server(shard_cases.write(tmp_path / "data", "tar")) as server:
        far = f"{server.url}/part-{{0..3}}.tar"
        assert runs.difference(shard_cases.trained(far, STEPS, tmp_path / "run", workers=2), expected) < 1e-10


def test_a_damaged_block_is_an_error_or_is_skipped(tmp_path):
    folder = shard_cases.write(tmp_path / "data")
    path = folder / "part-2.jsonl"
    path.write_text(path.read_text().replace('{"number": 10', '{"number": ,'))
    with pytest.raises(LockstepError, match=r"(?s)part-2.jsonl, sample 2: not JSON.*"):
        shard_cases.trained(str(folder), 5, tmp_path / "a")
    shard_cases.trained(str(folder), 5, tmp_path / "b", on_error="skip")
    assert "part-2.jsonl, sample 2" in (tmp_path / "b" / "train.log").read_text()


def test_another_window_is_another_training(source, tmp_path):
    runs.fit(shard_cases.ShardTask(source), shard_cases.settings(2), tmp_path)
    with pytest.raises(LockstepError, match="data"):
        runs.fit(shard_cases.ShardTask(source, window=7), shard_cases.settings(4), tmp_path)
