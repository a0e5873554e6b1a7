"""`lockstep verify` and `lockstep replay` on a mesh: wrong plans are found and named, right ones are not accused."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep.parts.digest import digest
from lockstep.watch.replay_report import Wants
from lockstep_lab.verify import command, cut_model
from lockstep_lab.verify.checks import on_mesh
from packages.lab.tests.verify.made_up import experiments, recording
from tests import ranks
from tests.mesh import mesh_cases, plan_cases
from tests.ranks import run_ranks
from tests.selection import mainly

ON_TWO = {"tensor": 2}
WORDS = {
    "Right": "",
    "Across": "the first module that differs is blocks.0.down (",
    "Unsummed": "of_head.",
    "OneLayer": "parallel.tensor=2: blocks.0.down fails in the sharded model: mat1 and mat2",
    "Misspelled": "Task.tensor_plan: no module matches 'block.*.up'",
}


def test_the_first_difference_of_a_model_that_is_cut_is_named():
    for found in run_ranks(2, plan_cases.first_differences, list(WORDS), ON_TWO):
        assert found["Right"] == ""
        found["OneLayer"] = found["OneLayer"].replace("cut: addmm: ", "cut: ")  # so says torch 2.15
        assert {name: text for name, text in found.items() if WORDS[name] not in text} == {}
        assert ", and blocks.0.up before it is correct." in found["Across"]


def verified(name, nproc, folder, checks, parallel, **more):
    config = config_file.parse(plan_cases.settings(name, parallel=parallel, **more)).model_dump(by_alias=True)
    run = {"checks": checks, "steps": 4, "quick": True, "tell": lambda _: None, "workers": ranks._ranks}
    return {check.name: check for check in command.verify(config, nproc, folder, **run).checks}


@pytest.mark.exhaustive  # the first difference is named above
def test_verify_finds_a_plan_that_cuts_across_a_norm(tmp_path):
    (check,) = verified("Across", 2, tmp_path, ["strategies"], ON_TWO).values()
    assert check.status == "fault"
    assert "2 ranks with ddp and parallel.tensor=2 train a different model than one process" in check.reason
    assert WORDS["Across"] in check.reason
    assert list(check.curves) == [
        "one process",
        *(f"2 ranks with {way}" for way in ("ddp", "fsdp", "ddp and parallel.tensor=2")),
    ]


@pytest.mark.parametrize(
    ("nproc", "strategy", "checks"),
    mainly([(2, "ddp", ("replicas",))], [(2, "ddp", ("replicas",)), (2, "ddp", ()), (4, "fsdp", ())]),
)
def test_verify_accuses_no_right_plan(nproc, strategy, checks, tmp_path):
    found = verified("Right", nproc, tmp_path, checks, ON_TWO | {"strategy": strategy})
    assert len(found) == len(checks) or len(found) == 16
    assert not [check.reason for check in found.values() if check.status == "fault"]
    shown = {name for name, check in found.items() if check.status == "passed"}
    assert {*checks} <= shown
    if not checks:
        assert {"gradients", "ranks", "accumulation", "strategies", "resume", "elastic", "samples"} <= shown
        assert "with parallel.tensor=1" in found["collectives"].reason


def test_verify_ends_before_any_check_where_the_mesh_or_the_plan_is_refused(tmp_path):
    for name, nproc, words in (("Misspelled", 2, "no module matches"), ("Right", 3, "3 ranks cannot be divided")):
        with pytest.raises(UsageError, match=words):
            verified(name, nproc, tmp_path, ["loss"], ON_TWO)


def test_ranks_of_a_group_that_get_other_batches_are_a_fault():
    alike, other = recording([1.0], batches={0: [1, 2]}), recording([1.0], batches={0: [1, 3]})
    made = experiments({"undisturbed": [alike, alike, alike, other]}, nproc=4, parallel={"tensor": 2})
    assert on_mesh.samples(made).reason == "ranks 2 and 3 are in one tensor group, but get different batches"


def test_parts_of_a_tensor_are_compared_with_what_ranks_held():
    tensor = torch.arange(24.0).reshape(4, 6)
    held = {"a[:, 0:3]": (0, 2, digest(tensor[:2, :3].clone())), "a[:, 3:6]": (2, 2, digest(tensor[2:, 3:].clone()))}
    shares = [held, {"a": (1, 3, digest(tensor[1:])), "b": (0, 4, (0, 0))}]
    assert [digest(part) == number for part, number in cut_model.parts("a", tensor, shares)] == [True] * 3
    assert [digest(part) == number for part, number in cut_model.parts("a", tensor + 1, shares)] == [False] * 3


def test_a_mask_of_infinities_is_no_difference_and_one_that_differs_is():
    mask, other = torch.tensor([[0.0, -torch.inf], [1.0, 2.0]]), torch.tensor([[0.0, 3.0], [1.0, 2.0]])
    world = SimpleNamespace(tensor=2, rank=0)
    assert cut_model._in_outputs({("mask", 1): [mask]}, {("mask", 1): [mask.clone()]}, world, 1e-7) == ""
    assert "differs is mask" in cut_model._in_outputs({("mask", 1): [mask]}, {("mask", 1): [other]}, world, 1e-7)


def test_a_gradient_that_is_no_number_is_the_worst_of_all():
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    whole(torch.ones(1, 2)).sum().backward()
    grads = {name: parameter.grad.double() for name, parameter in whole.named_parameters()}
    assert cut_model._in_gradients(whole, grads, 1e-7) == ""
    off = grads | {"0.weight": grads["0.weight"] + 1, "1.bias": torch.full((2,), torch.nan)}
    assert "the gradient of 1.bias is nan" in cut_model._in_gradients(whole, off, 1e-7)


@pytest.mark.exhaustive
def test_a_step_of_a_mesh_again_is_as_logged_on_the_mesh_and_on_one_rank(tmp_path):
    sections = {"train": {"steps": 6}, "checkpoint": {"every_steps": 3, "mode": "sync"}, "log": {"every_steps": 1}}
    sections |= {"parallel": ON_TWO, "batch": {"micro": 5}}
    run_ranks(2, mesh_cases.fit, sections, None, tmp_path / "run")
    report, other = run_ranks(2, plan_cases.replayed, tmp_path / "run", sections, 6, Wants())
    assert report.saved == other.saved == "bitwise equal to checkpoint 6"
    assert [one.step for one in report.steps] == [4, 5, 6]
    assert report.steps[-1].grad_norm == report.logged["train/grad_norm"]
    assert report.steps[-1].loss == pytest.approx(report.logged["train/loss"], rel=1e-14)
    (alone,) = run_ranks(1, plan_cases.replayed, tmp_path / "run", sections, 6, Wants())
    assert alone.steps[-1].loss == pytest.approx(report.logged["train/loss"], rel=1e-12)
