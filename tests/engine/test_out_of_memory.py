"""A step that does not fit into memory: given up by all ranks, done again in smaller pieces, with the same result."""

import json

import pytest
import torch

from lockstep import run_directory
from lockstep.distributed.world import World
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks
from tests.selection import mainly

# Where a micro-batch of 12 samples or more fails: rank, number of the pass (also by number of ranks), kind of the pass.
PLACES = {
    "first forward pass": (0, 1, "forward"),
    "first backward pass": (1, 1, "backward"),
    "all passes of one rank": (1, None, "forward"),
    "all passes": (None, None, "backward"),
    "late": (0, 9, "forward"),
    "backward pass of the first of two": (1, {1: 7, 2: 7, 3: 8}, "backward"),
    "trial of the second step": (1, 4, "forward"),
    # Another rank is further by then, and must not have begun a collective: of buffers, or of the buckets of DDP.
    "copy of the second batch of the second step": (1, 4, "copy"),
    "copy of the first batch of the third step": (0, 5, "copy"),
}
LATER_PLACES = ("all passes of one rank", "trial of the second step", "copy of the second batch of the second step")


@pytest.mark.parametrize(
    ("world", "global_batch", "place"),
    [
        *mainly(
            [(2, 48, place) for place in PLACES if place in LATER_PLACES],
            [(2, 48, place) for place in PLACES],
        ),
        pytest.param(1, 24, "late", marks=pytest.mark.exhaustive),
        pytest.param(1, 24, "all passes", marks=pytest.mark.exhaustive),
        pytest.param(3, 72, "first backward pass", marks=pytest.mark.exhaustive),
        (3, 72, "backward pass of the first of two"),
    ],
)
def test_step_is_done_again_on_all_ranks_with_half_the_micro_batch(world, global_batch, place, tmp_path):
    expected, _ = runs.by_hand(own_tasks.Deep(), 10, global_batch)
    settings = runs.config(batch={"global": global_batch, "micro": 12}, train={"steps": 10})
    told = run_ranks(world, rank_cases.fit_out_of_memory, settings, tmp_path, PLACES[place])
    for weights, _ in told:
        calls = weights.pop("calls")
        assert runs.difference(weights, {name: tensor for name, tensor in expected.items() if name != "calls"}) < 1e-10
    assert any(failures for _, failures in told)
    assert calls > 10 * global_batch / 12 / world
    assert json.loads((tmp_path / "micro.json").read_text())["micro"] == 6
    assert "micro-batches of 6 instead of 12" in (tmp_path / "train.log").read_text()


def test_activations_are_free_before_ddp_is_made_anew_on_ranks_whose_pass_did_fit():
    settings = runs.config(batch={"global": 48, "micro": 12}, train={"steps": 4})
    assert run_ranks(2, rank_cases.held_activations, settings) == [[False], [False]]


def test_ranks_that_cannot_give_up_together_end_and_begin_again_with_less(tmp_path):
    settings = runs.config(
        batch={"micro": 12},
        parallel={"strategy": "fsdp"},
        checkpoint={"every_steps": 2, "mode": "sync"},
        train={"steps": 12},
    )
    arguments = (settings, tmp_path, (None, 5, "forward"))
    for message in run_ranks(2, rank_cases.error_out_of_memory, *arguments):
        assert "step 5, rank" in message
        assert "out of memory" in message
    expected, _ = runs.by_hand(own_tasks.Deep(), 12)
    for weights, failures in run_ranks(2, rank_cases.fit_out_of_memory, settings, tmp_path, (None, None, "forward")):
        assert not failures
        assert weights.pop("calls") == 4 + 8 * 2
        assert runs.difference(weights, {name: tensor for name, tensor in expected.items() if name != "calls"}) < 1e-10
    assert "from step 4" in (tmp_path / "train.log").read_text()


def test_micro_batch_of_one_that_does_not_fit_is_an_error(tmp_path):
    settings = runs.config(batch={"micro": 1})
    message = run_ranks(1, rank_cases.error_out_of_memory, settings, tmp_path, (None, None, "forward"), 1)[0]
    assert "step 1: a micro-batch of one sample does not fit" in message
    assert "activation_checkpointing" in message


def test_without_leave_to_halve_the_error_is_torchs_own(tmp_path):
    settings = runs.config(batch={"micro": 12}, compute={"halve_on_oom": False})
    with pytest.raises(torch.OutOfMemoryError):
        rank_cases.fit_out_of_memory(settings, tmp_path, (None, None, "forward"), real_guard=True)


def test_note_counts_for_the_size_and_ranks_that_it_was_made_for(tmp_path):
    world = World(0, 1, 0, torch.device("cpu"))
    asked = [[0, 32], [5, 24]]
    assert run_directory.remembered_micro_batch(tmp_path, world, asked=asked) == 32
    run_directory.remember_micro_batch(tmp_path, world, asked=asked, size=8)
    assert run_directory.remembered_micro_batch(tmp_path, world, asked=asked) == 8
    assert run_directory.remembered_micro_batch(tmp_path, world, asked=[[0, 32], [5, 16]]) == 32
    assert run_directory.remembered_micro_batch(tmp_path, world, asked=[[0, 16]]) == 16
    (tmp_path / "micro.json").write_text("{")
    assert run_directory.remembered_micro_batch(tmp_path, world, asked=asked) == 32
