"""Updates of rows that one rank holds alone: what lies in them, or between them, is found, and what is right is not."""

import contextlib
import os
from unittest import mock

import pytest
import torch
from torch.optim import adam

from lockstep import Part, Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import LockstepError
from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.sharded_tensor import local
from lockstep.parts.digest import piece_length
from lockstep.watch import updates
from lockstep.watch.updates import made
from tests import own_tasks
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.watch import cases

# Strategy and ranks, fault, the tensor that is named, the step at which it is found, and what is checked then: what
# was checked before the last two checks, which look at all rows together.
FAULTS = {
    "fsdp 3, weight": ("fsdp", 3, {"kind": "weight"}, "inner.weight", 9, 2),
    "fsdp 3, optimizer": ("fsdp", 3, {"kind": "optimizer"}, "inner.weight", 9, 2),
    "fsdp 3, drift": ("fsdp", 3, {"kind": "drift", "rank": 2}, "inner.weight", 9, 2),
    "single, weight": ("single", 1, {"kind": "weight", "rank": 0}, "scale", 12, 6),
    "single, low bit": ("single", 1, {"kind": "weight", "rank": 0, "bit": 0}, "scale", 12, 6),
    "single, optimizer": ("single", 1, {"kind": "optimizer", "rank": 0}, "scale", 12, 6),
    "single, drift": ("single", 1, {"kind": "drift", "rank": 0}, "inner.weight", 9, 2),
}


@pytest.mark.parametrize("name", mainly(["fsdp 3, optimizer", "single, weight"], list(FAULTS)))
def test_an_update_that_is_not_what_the_optimizer_makes_is_found(tmp_path, name):
    strategy, world, fault, tensor, step, checked = FAULTS[name]
    texts = run_ranks(world, cases.end_of, {"after": 9, **fault}, cases.settings(world, strategy), tmp_path)
    verdict, rank = cases.verdict_of(tmp_path), fault.get("rank", 1)
    assert (verdict["kind"], verdict["guilty"], verdict["tensor"]) == ("memory", [rank], tensor)
    for text in texts:
        assert (
            f"step {step}, watch.every=3: memory: rows of {tensor} on rank {rank} differ from a repetition of" in text
        )
        assert f"The last check that counts is that of step {-(-checked // 3) * 3}." in text
    good = list(range(2, checked + 1, 2))
    assert cases.saved(tmp_path) == (good, list(range(checked + 2, step, 2)))


class Between(Part):
    """Changes weights after some steps, on one rank or on all, with or without torch's notice."""

    def __init__(self, steps, ranks, how):
        self.steps, self.ranks, self.how = steps, ranks, how

    def after_step(self, training):
        if training.step not in self.steps or training.rank not in self.ranks:
            return
        own = [training.model.scale] if self.how == "of one rank" else training.model.parameters()
        own = training.model.head.parameters() if self.how == "silent, of some ranks" else own
        for parameter in own:
            if self.how.startswith("silent"):
                local(parameter.data).data.add_(1e-12)
            else:
                with torch.no_grad():
                    parameter.add_(1e-12)


def between(settings, folder, *arguments):
    """How a training ends in which weights change between two updates."""
    try:
        Trainer(settings, run_dir=folder, quiet=True, parts=[Between(*arguments)]).fit(own_tasks.Deep())
    except LockstepError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("world", "ranks", "steps", "how", "ends"),
    [
        (1, [0], [6], "silent", True),
        (1, [0], [6], "noticed", False),
        (2, [0, 1], [6], "noticed", False),
        pytest.param(2, [0, 1], [6], "of one rank", False, marks=pytest.mark.exhaustive),
        pytest.param(1, [0], range(1, 12), "silent", False, marks=pytest.mark.exhaustive),
        pytest.param(3, [1], [6], "silent", True, marks=pytest.mark.exhaustive),
        pytest.param(3, [0, 1, 2], [6], "silent", False, marks=pytest.mark.exhaustive),
        pytest.param(4, [0, 1, 2, 3], [6], "silent, of some ranks", False, marks=pytest.mark.exhaustive),
        pytest.param(4, [2], [6], "silent, of some ranks", True, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_that_change_between_updates_are_found_unless_code_has_written_them(
    tmp_path, world, ranks, steps, how, ends
):
    settings = cases.settings(world, "single" if world == 1 else "fsdp")
    for text in run_ranks(world, between, settings, tmp_path, steps, ranks, how):
        if ends:
            assert "step 7, watch.every=3: unclear: rows of " in text
            assert "the memory or the device of" in text
            assert "or code of these Parts, which replays do not call: Between" in text
            assert f" on rank {ranks[0]} have changed since the last update" in text
        else:
            assert text is None
    told = "no longer checks updates: on each rank, rows have changed" in (tmp_path / "train.log").read_text()
    assert told == (how.startswith("silent") and not ends)


def test_code_is_to_blame_where_all_ranks_that_hold_a_parameter_have_it_wrong():
    held = [["a", "b"], ["a", "b"], ["a"], ["c"]]
    assert updates.most_holders([["b"], ["b"], [], []], held) == 2
    assert updates.most_holders([["b"], ["b"], [], ["c"]], held) == 2
    assert updates.most_holders([["a", "b"], ["b"], [], []], held) == 0  # ranks 1 and 2 have the right rows of a
    assert updates.most_holders([[], ["b"], [], []], held) == 0
    assert updates.most_holders([[], [], [], ["c"]], held) == 1  # no other rank holds it


def wrong_each_time(settings, folder):
    """How a training ends in which rank 1 gets the first row of each update wrong, in the same way each time."""
    update = adam.adam

    def lying(parameters, *arguments, **options):
        update(parameters, *arguments, **options)
        for parameter in parameters:
            local(parameter)[:1] *= 1 + 1e-9

    lies = os.environ["RANK"] == "1"
    with mock.patch.object(adam, "adam", lying) if lies else contextlib.nullcontext():
        return cases.end_of(None, settings, folder)


@pytest.mark.exhaustive
def test_a_device_that_updates_wrong_each_time_is_told_by_the_others(tmp_path):
    for text in run_ranks(3, wrong_each_time, cases.settings(3, "fsdp"), tmp_path):
        assert "step 3, watch.every=3: device: the device of rank 1 (" in text
        assert "every time, first in the update of inner.weight" in text


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True, "foreach": True},
    "AdamW": {"fused": True},
    **{name: {} for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_made_again_has_the_same_bits_with_each_class(tmp_path, name, world):
    optim = {"name": name, "args": OPTIMIZERS[name], "weight_decay": 0.01, "clip_norm": 0.5}
    settings = cases.settings(world, "single" if world == 1 else "fsdp", optim=optim)
    assert run_ranks(world, cases.end_of, None, settings, tmp_path, "Single") == [None] * world
    assert "does not check updates" not in (tmp_path / "train.log").read_text()


FUSED = {f"fused {name}": {"fused": True} for name in ("SGD", "Adam", "Adagrad")}


@pytest.mark.parametrize("name", mainly(["AdamW"], [*OPTIMIZERS, *FUSED]))
def test_an_update_made_in_pieces_is_that_of_the_whole(name):
    length, kind = piece_length(torch.device("cpu")), getattr(torch.optim, name.removeprefix("fused "))
    args = (OPTIMIZERS | FUSED)[name]
    first, *gradients = torch.randn(4, 2 * length + 3, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(first)
    optimizer = kind([parameter], weight_decay=0.1, **args)
    for gradient in gradients:
        parameter.grad = gradient
        values = {"weight": parameter.detach(), "gradient": gradient, **optimizer.state[parameter]}
        pieces = [made(optimizer, 0, updates._cut(values, start, length)) for start in (0, length, 2 * length)]
        optimizer.step()
        for key, value in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            if isinstance(value, torch.Tensor):
                whole = torch.cat([piece[key] for piece in pieces]) if value.ndim else pieces[0][key]
                assert torch.equal(whole, value), key


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "args"), [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})])
def test_fused_kernels_that_take_no_shards_are_looked_at_on_one_rank(tmp_path, name, args):
    optim = {"name": name, "args": args, "fused": True, "clip_norm": 0.5}
    settings, looked = cases.settings(1, "single", optim=optim), []
    with mock.patch.object(updates, "made", lambda *arguments: looked.append(1) or made(*arguments)):
        assert cases.end_of(None, settings, tmp_path / "right", "Single") is None
    assert looked
    assert "does not check updates" not in (tmp_path / "right/train.log").read_text()
    assert "memory: rows of" in cases.end_of({"kind": "weight", "rank": 0}, settings, tmp_path / "wrong", "Single")


def test_a_class_is_not_looked_at_only_where_it_does_not_update_each_element_by_itself():
    def why(kind, **options):
        return updates._why_not(kind([torch.ones(2, 2, requires_grad=True)], **options))

    assert why(torch.optim.SGD, fused=True) == why(torch.optim.Adagrad, fused=True) == ""
    assert why(torch.optim.Adafactor) == "Adafactor does not update elements independently"


@pytest.mark.exhaustive
def test_an_optimizer_that_needs_whole_matrices_is_not_looked_at_and_that_is_told(tmp_path):
    settings = cases.settings(1, "single", optim={"name": "Adafactor"})
    assert run_ranks(1, cases.end_of, None, settings, tmp_path) == [None]
    told = "note: the watch does not check updates: Adafactor does not update elements independently"
    assert (tmp_path / "train.log").read_text().count(told) == 1


ALL = {
    "train": {"ema_decay": 0.9, "unfreeze": [{"epoch": 1, "match": ["inner.*"]}]},
    "optim": {"groups": [{"name": "biases", "match": ["*bias"], "lr": 0.02, "weight_decay": 0.0}], "clip_norm": 0.5},
}
TRAININGS = {
    "single, all": (1, {"strategy": "single"}, ALL),
    "single, in pieces": (1, {"strategy": "single"}, {}),
    "fsdp 2, all": (2, {"strategy": "fsdp"}, ALL),
    "fsdp 2, accumulated": (2, {"strategy": "fsdp"}, {"batch": {"micro": 3}}),
    "fsdp 2, offloaded": (2, {"strategy": "fsdp", "cpu_offload": True}, ALL),
    "hybrid 2x2": (4, {"strategy": "fsdp", "shard_ranks": 2}, ALL),
}


@pytest.mark.parametrize("name", mainly(["single, all", "single, in pieces"], list(TRAININGS)))
def test_nothing_is_found_where_nobody_lies_and_all_is_checked(tmp_path, name, monkeypatch):
    world, parallel, sections = TRAININGS[name]
    if "pieces" in name:
        monkeypatch.setattr(updates, "piece_length", lambda device: 16)
    settings = cases.settings(world, "", parallel=parallel, **sections)
    if world == 1:
        assert cases.end_of(None, settings, tmp_path) is None
    else:
        assert run_ranks(world, cases.end_of, None, settings, tmp_path) == [None] * world
    assert "the watch" not in (tmp_path / "train.log").read_text()
    assert store.listed(tmp_path / "checkpoints")[0].checked_step == 12


class Overflowing(cases.Single):
    """The gradients of the sixth step overflow."""

    def loss(self, model, batch):
        return super().loss(model, batch) * (1e33 if heartbeat.own().step == 5 else 1.0)


def test_a_check_whose_update_is_skipped_is_told_and_the_next_looks_at_what_it_left_out(tmp_path):
    looked, make_again = [], updates.Updates._make_again

    def noted(self, *arguments):
        make_again(self, *arguments)
        looked.append({name for name, *_ in self.looked})

    settings = cases.settings(1, "single") | {"precision": "fp16"}
    with mock.patch.object(updates.Updates, "_make_again", noted):
        Trainer(settings, run_dir=tmp_path, quiet=True).fit(Overflowing())
    first, second, third = looked
    assert first == third
    assert first.isdisjoint(second)
    told = "note: step 6: the watch has checked nothing: the update was skipped"
    assert (tmp_path / "train.log").read_text().count(told) == 1


class Clamped(own_tasks.Deep):
    """The step of the optimizer is wrapped in one that limits the weights."""

    def optimizer(self, groups):
        made = torch.optim.AdamW(groups, lr=0.01)
        step = made.step

        def limited(*arguments, **options):
            step(*arguments, **options)
            with torch.no_grad():
                for group in made.param_groups:
                    for parameter in group["params"]:
                        parameter.clamp_(-0.1, 0.1)

        made.step = limited
        return made


def clamped(settings, folder):
    """Train it."""
    Trainer(settings, run_dir=folder, quiet=True).fit(Clamped())


def test_an_optimizer_whose_step_is_wrapped_is_not_looked_at_and_that_is_told(tmp_path):
    run_ranks(1, clamped, cases.settings(1, "single") | {"optim": {}}, tmp_path)
    told = "note: the watch does not check updates: code has replaced the optimizer's step"
    assert (tmp_path / "train.log").read_text().count(told) == 1


def test_the_step_that_a_scheduler_of_torch_wraps_is_that_of_the_class():
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    assert updates._why_not(optimizer) == ""
    optimizer.step = lambda: None
    assert "replaced the optimizer's step" in updates._why_not(optimizer)
