"""Shards: what ranks hold together is bit for bit what one process holds, and none of them holds it all."""

import pytest
import torch
from torch import nn

from lockstep.core.checkpoint import store
from lockstep.core.errors import UsageError
from lockstep.core.parallel import held_parameters
from lockstep.core.parallel.factory import make_strategy
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import World
from tests import own_tasks, rank_cases, runs
from tests.core.checkpoint import cases
from tests.core.parallel import sharding_cases
from tests.ranks import run_ranks

CHUNK = 64  # bytes: several rows of a small tensor, and several messages for one tensor
FULL_IN_CASES = ("reads", "keeps")  # that cannot be made without values


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.exhaustive), 3], ids=["2 ranks", "3 ranks"])
def built(request):
    return run_ranks(request.param, sharding_cases.build_each, list(sharding_cases.MAKERS), ParallelConfig(), CHUNK)


def alone(name):
    """What one process makes."""
    torch.manual_seed(0)
    return (sharding_cases.MAKERS | sharding_cases.TROUBLES)[name]()


# ---- from one copy to shards


@pytest.mark.parametrize("name", sharding_cases.MAKERS)
def test_what_is_built_is_what_one_process_makes_bit_for_bit(built, name):
    expected = sharding_cases.contents(alone(name))
    for answers in built:
        assert not isinstance(answers[name], str), answers[name]
        bits, trained, same, names = answers[name]["contents"]
        assert bits == expected[0]
        assert trained == expected[1]
        assert same == expected[2]  # what was one tensor still is, and nothing else
        assert names == expected[3]
        assert not answers[name]["meta"]


@pytest.mark.parametrize("name", sharding_cases.MAKERS)
def test_only_rank_0_has_values_and_gives_them_all_away(built, name):
    for rank, answers in enumerate(built):
        held, left = answers[name]["held"]
        assert left == 0
        assert held == (0 if rank else len({*answers[name]["contents"][2].values()}))


@pytest.mark.parametrize("name", sharding_cases.MAKERS)
def test_a_model_that_needs_its_values_is_made_everywhere_and_that_is_told(built, name):
    for answers in built:
        if name not in FULL_IN_CASES:
            assert answers[name]["told"] == []
            continue
        (told,) = answers[name]["told"]
        assert told.endswith("every rank made it in full")
        assert (
            "inner.table is a tensor, but not a buffer"
            if name == "keeps"
            else "RuntimeError: Tensor.item() cannot be called on meta tensors"
        ) in told


@pytest.mark.parametrize("name", ["deep", "float64", "bfloat16", "tied"])
def test_no_rank_but_0_ever_holds_a_whole_matrix(built, name):
    model = alone(name)
    largest = max(tensor.nbytes for tensor in model.parameters())
    buffers = max((tensor.nbytes for tensor in model.buffers()), default=0)
    for rank, answers in enumerate(built):
        share = max(answers[name]["local"].values())
        row = max(tensor[:1].nbytes for tensor in model.parameters())
        assert share < largest
        if rank:
            assert answers[name]["largest"] <= max(share, CHUNK, row, buffers) < largest


@pytest.mark.parametrize("name", sharding_cases.MAKERS)
def test_ranks_hold_every_row_once_in_their_order(built, name):
    for key, parameter in alone(name).named_parameters():
        spans = [answers[name]["rows"][key] for answers in built]
        assert [row for start, count, _ in spans for row in range(start, start + count)] == list(range(len(parameter)))
        assert all(writer is True for *_, writer in spans)
        held = [answers[name]["local"][key] for answers in built]
        assert held == [count * parameter[:1].nbytes for _, count, _ in spans]


def test_attributes_are_kept(built):
    assert all(answers["tagged"]["tags"] == ["kept", "kept too"] for answers in built)


@pytest.mark.cases("keeps dict")
@pytest.mark.parametrize(
    "name",
    [
        "narrow",
        "keeps list",
        "keeps dict",
    ],
)
def test_what_is_harder_to_build(troubles, name):
    for answers in troubles:
        assert not isinstance(answers[name], str), answers[name]
        assert answers[name]["contents"] == sharding_cases.contents(alone(name))
        assert len(answers[name]["told"]) == (name != "narrow")


@pytest.fixture(scope="module")
def troubles():
    return run_ranks(2, sharding_cases.build_each, list(sharding_cases.TROUBLES), ParallelConfig(), CHUNK)


def test_a_model_that_differs_between_ranks_is_an_error_that_names_the_rank_on_all_ranks():
    wider, retyped, longer = zip(*run_ranks(3, sharding_cases.build_unlike), strict=True)
    assert all("rank 1 made a different model from rank 0: 1.bias, 1.weight" in error for error in wider)
    assert all("rank 2 made a different model from rank 0: bias, weight" in error for error in retyped)
    assert all("rank 1 made a different model from rank 0: 1.bias, 1.weight" in error for error in longer)


# ---- rows


MESHES = {
    "2": (2, ParallelConfig()),
    "3": (3, ParallelConfig()),
    "2x2": (4, ParallelConfig(shard_ranks=2)),
    "3x1": (3, ParallelConfig(shard_ranks=1)),
}


@pytest.mark.cases("3", "2x2")
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_and_what_is_spread_like_them_fit_together(mesh):
    world, options = MESHES[mesh]
    for answers in run_ranks(world, sharding_cases.spread, options):
        assert len(answers) == 19
        assert {name: checks for name, checks in answers.items() if not all(checks)} == {}


@pytest.mark.cases("3", "2x2")
@pytest.mark.parametrize("mesh", MESHES)
def test_writers_write_every_row_of_every_tensor_once(mesh, tmp_path):
    world, options = MESHES[mesh]
    expected = run_ranks(world, sharding_cases.save_sharded, str(tmp_path), options)[0]
    (found,) = store.listed(tmp_path)
    assert found.index.keys() == expected.keys()
    for entry in found.index.values():
        rows = [row for part in entry["parts"] for row in range(part["start"], part["start"] + part["rows"])]
        assert rows == list(range(entry["shape"][0] if entry["shape"] else 0))
    assert {name: cases.bits(tensor) for name, tensor in cases.read(found).items()} == expected
    files = [
        part["file"] for name, entry in found.index.items() if name.startswith("blocks.") for part in entry["parts"]
    ]
    assert len(set(files)) == world  # replicas take turns


# ---- norms


@pytest.mark.cases("2x2")
@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
def test_norm_and_clipping_are_those_of_plain_torch(mesh):
    world, options = MESHES[mesh]
    clips = (0.5, 1e9, float("inf"))
    for answers, none in run_ranks(world, sharding_cases.norms_and_clips, options, clips):
        assert len(answers) == 18
        assert none == 0
        for dtype, norm, expected, apart, norm_dtype, dimensions in answers:
            exact = dtype == "torch.float64"
            assert norm == pytest.approx(expected, rel=1e-14 if exact else 1e-6)
            assert apart <= (1e-15 if exact else 1e-6)
            assert (norm_dtype, dimensions) == (dtype, 0)


@pytest.mark.parametrize("number", [0, 1], ids=["first rank", "last rank"])
def test_an_overflow_in_one_ranks_shard_skips_the_step_on_all_ranks(overflows, number):
    expected, skipped, scale = overflows["ddp"][0][number]
    assert 0 < skipped < 10
    for answers in overflows["fsdp"]:
        weights, skipped_here, scale_here = answers[number]
        assert (skipped_here, scale_here) == (skipped, scale)
        assert runs.difference(weights, expected) < 1e-6


@pytest.fixture(scope="module")
def overflows():
    return {
        strategy: run_ranks(2, sharding_cases.train_overflowing, (0, 15), {"strategy": strategy})
        for strategy in ("ddp", "fsdp")
    }


# ---- what does not go


THREE = World(0, 3, 0, torch.device("cpu"))  # all of these are found before anything is communicated


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_a_number_of_ranks_that_does_not_divide_the_world_is_an_error_that_names_those_that_do(ranks):
    with pytest.raises(
        UsageError,
        match=rf"parallel\.shard_ranks: 3 ranks cannot be split into groups of {ranks}\s+remedy: use one of 1, 3",
    ):
        FSDP(THREE, ParallelConfig(shard_ranks=ranks)).wrap(Forward(nn.Linear(3, 3), None), [])


def test_a_parameter_without_dimensions_is_named():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].factor = nn.Parameter(torch.ones(()))
    with pytest.raises(
        UsageError, match=r"parallel\.strategy=fsdp: parameter 0\.factor has no dimension to shard[\s\S]*shape \(1,\)"
    ):
        FSDP(THREE, ParallelConfig()).wrap(Forward(model, None), [])


def test_a_parameter_without_elements_is_named():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].empty = nn.Parameter(torch.ones(0, 3), requires_grad=False)
    held_parameters.check_elements(model)
    model[0].empty.requires_grad_()
    with pytest.raises(UsageError, match=r"parameter 0\.empty has no elements to shard: shape \(0, 3\)"):
        held_parameters.check_elements(model)


def test_fsdp_with_unused_parameters_is_an_error_that_names_ddp():
    with pytest.raises(UsageError, match=r"parallel\.find_unused_parameters: [\s\S]*use ddp"):
        make_strategy(ParallelConfig(strategy="fsdp", find_unused_parameters=True), THREE)


def test_single_on_several_ranks_is_an_error():
    with pytest.raises(UsageError, match=r"parallel\.strategy=single: 3 ranks would train 3 models"):
        make_strategy(ParallelConfig(strategy="single"), THREE)


def test_an_unused_parameter_is_named_on_all_ranks():
    for error in run_ranks(2, rank_cases.error_of, "Unused", {}, runs.config(parallel={"strategy": "fsdp"})):
        assert "first step: 2 trainable parameters got no gradient: forgotten.weight, forgotten.bias" in error


# ---- optimizers


OPTIMIZERS = [
    {"name": "ASGD", "args": {"t0": 2}, "weight_decay": 0.1},
    {"name": "Adadelta", "weight_decay": 0.1},
    {"name": "Adagrad", "args": {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, "weight_decay": 0.1},
    {"name": "Adam", "args": {"amsgrad": True, "foreach": True}, "weight_decay": 0.1},
    {"name": "AdamW", "fused": True, "weight_decay": 0.1},
    {"name": "Adamax", "weight_decay": 0.1},
    {"name": "NAdam", "args": {"foreach": True}, "weight_decay": 0.1},
    {"name": "RAdam", "weight_decay": 0.1},
    {"name": "RMSprop", "args": {"centered": True, "momentum": 0.9}, "weight_decay": 0.1},
    {"name": "SGD", "args": {"momentum": 0.9, "nesterov": True}, "weight_decay": 0.1},
]


@pytest.fixture(scope="module")
def optimized():
    return run_ranks(2, sharding_cases.train_each, [("Deep", {"lr": 0.01, **section}) for section in OPTIMIZERS])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(len(OPTIMIZERS)), ids=[section["name"] for section in OPTIMIZERS])
def test_optimizer_of_shards_is_that_of_the_whole(optimized, number):
    section = OPTIMIZERS[number]

    def make(model):
        fused = {"fused": True} if section.get("fused") else {}
        return getattr(torch.optim, section["name"])(
            model.parameters(), lr=0.01, weight_decay=0.1, **fused, **section.get("args", {})
        )

    expected, _ = runs.by_hand(own_tasks.Deep(), steps=5, optimizer=make)
    for answers in optimized:
        assert not isinstance(answers[number], str), answers[number]
        answers[number].pop("calls", None)
        assert (
            runs.difference(answers[number], {name: tensor for name, tensor in expected.items() if name != "calls"})
            < 1e-10
        )


def test_optimizer_that_cannot_be_sharded_is_an_error_before_training():
    for (error,) in run_ranks(2, sharding_cases.train_each, [("Matrices", {"lr": 0.01, "name": "Muon"})]):
        assert "optim.name" in str(error)


@pytest.mark.exhaustive  # as test_an_overflow_in_one_ranks_shard_skips_the_step_on_all_ranks
def test_a_process_may_join_again_whatever_groups_it_made_before():
    """torch numbers its groups, and keeps meshes with these numbers in its cache of operations on sharded tensors."""
    for found in run_ranks(2, sharding_cases.stay_again, [4, 0, 2]):
        assert all(runs.difference(one, found[0]) == 0 for one in found)


def test_buffers_that_modules_share_are_copied_once(monkeypatch):
    from lockstep.core.parallel.buffers import restore_buffers

    shared, clones = torch.zeros(3), []
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(4)))
    for layer in model:
        layer.register_buffer("mask", shared)
    original = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: clones.append(tensor) or original(tensor))
    with restore_buffers(model):
        shared += 1
        model[1].mask = torch.ones(3)
    assert len(clones) == 1
    assert all(layer.mask is shared for layer in model)
    assert shared.tolist() == [0, 0, 0]


def test_cuda_graphs_are_refused_with_shards():
    """A graph reads the addresses of its first run, and a block is gathered into other memory each time."""
    strategy = FSDP(World(0, 1, 0, torch.device("cpu")), ParallelConfig())
    forward = Forward(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), uses_graphs=True)
    with pytest.raises(UsageError, match=r"compute\.compile_mode, parallel\.strategy=fsdp: CUDA graphs") as caught:
        strategy.wrap(forward, [])
    assert "max-autotune-no-cudagraphs" in str(caught.value.remedy)
