"""Optimizers that the user brings: equal to a plain loop on any number of ranks, and after a resume."""

import copy
import json

import pytest
import torch

from lockstep import Trainer
from lockstep.core.errors import LockstepError
from lockstep.core.optimizer_class import Optimizers
from lockstep.core.parallel.precision import Precision
from lockstep.core.schedule import Plateau
from tests import optimizer_cases, own_tasks, runs
from tests.optimizer_cases import OwnOptimizer
from tests.ranks import run_ranks
from tests.selection import mainly

FILE = optimizer_cases.__file__
EXACT = 1e-10


def options(**optim):
    return runs.config(optim={"lr": 0.01, "weight_decay": None, **optim})


def fit(task_options, settings, run_dir=None):
    return runs.fit(OwnOptimizer(**task_options), settings, run_dir)[0]


def refusal(task, settings, run_dir=None):
    with pytest.raises(LockstepError) as caught:
        runs.fit(task, settings, run_dir)
    assert caught.value.remedy
    return str(caught.value)


# ---- a class of the user's


@pytest.mark.parametrize("name", ["tests.optimizer_cases:Sign", "tests.optimizer_cases.Sign", f"{FILE}:Sign"])
def test_a_class_that_the_config_names_trains_as_in_a_plain_loop(name):
    weights, _ = runs.fit(own_tasks.Masked(), options(name=name, args={"beta": 0.8}))
    expected, _ = runs.by_hand(
        own_tasks.Masked(), optimizer=lambda model: optimizer_cases.Sign(model.parameters(), 0.01, 0.8)
    )
    assert runs.difference(weights, expected) < EXACT


def test_a_class_of_torch_may_be_named_with_its_package():
    short, _ = runs.fit(own_tasks.Masked(), options(name="SGD"))
    whole, _ = runs.fit(own_tasks.Masked(), options(name="torch.optim.SGD"))
    assert all(torch.equal(short[name], whole[name]) for name in short)


def test_the_rate_of_the_task_counts_unless_the_config_sets_a_rate(tmp_path):
    def base_rates(**optim):
        settings = runs.config(train={"steps": 1}) | {"optim": optim}
        recorder = runs.FinalWeights()
        Trainer(settings, quiet=True, run_dir=tmp_path, fresh=True).fit(OwnOptimizer(), recorder)
        return {group["base_lr"] for group in recorder.prepared.state.optimizer.param_groups}

    assert base_rates() == {0.01}
    assert base_rates(lr=0.05) == {0.05}
    assert base_rates(lr_scaling="linear", reference_batch=12) == {0.02}
    assert base_rates(groups=[{"name": "biases", "match": ["*.bias"], "lr": 0.03}]) == {0.01, 0.03}


@pytest.mark.cases("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_optimizer_of_the_task_trains_as_in_a_plain_loop_on_any_number_of_ranks(ranks):
    settings = runs.config(optim={"name": "AdamW", "lr": 0.01}, batch={"global": 24, "micro": 3})
    del settings["optim"]["weight_decay"]
    found = run_ranks(ranks, fit, {}, settings)
    expected, _ = runs.by_hand(
        own_tasks.Masked(), optimizer=lambda model: optimizer_cases.Sign(model.parameters(), 0.01)
    )
    for weights in found:
        assert runs.difference(weights, expected) < EXACT


def plain_keys(**train):
    settings = runs.config(train=train, checkpoint={"every_steps": 4})
    del settings["optim"]["weight_decay"]
    return settings


@pytest.mark.parametrize("kind", mainly(["Noisy"], ["Sign", "Slowing", "Noisy"]))
def test_a_resumed_training_is_bit_identical_with_groups_that_change_and_updates_that_draw(tmp_path, kind):
    whole = fit({"kind": kind}, plain_keys(steps=12), tmp_path / "whole")
    fit({"kind": kind}, plain_keys(steps=8), tmp_path / "cut")
    cut = fit({"kind": kind}, plain_keys(steps=12), tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_updates_that_draw_keep_replicas_equal():
    settings = plain_keys(steps=6)
    one, two = run_ranks(2, fit, {"kind": "Noisy"}, settings)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert runs.difference(one, fit({"kind": "Noisy"}, settings)) < EXACT


def shard(kind, settings):
    try:
        return fit({"kind": kind}, settings)
    except LockstepError as error:
        return str(error)


def test_shards_are_trained_by_a_class_that_updates_each_element_by_itself_and_refused_by_another():
    settings = plain_keys(steps=6) | {"parallel": {"strategy": "fsdp"}}
    weights = run_ranks(2, shard, "Sign", settings)[0]
    assert not isinstance(weights, str), weights
    assert runs.difference(weights, fit({}, plain_keys(steps=6))) < EXACT
    assert "ByMatrix cannot train sharded parameters" in run_ranks(2, shard, "ByMatrix", settings)[0]


# ---- refused before the first step


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("WithClosure", "WithClosure needs a closure"),
        ("WithModes", "evaluates different weights than it trains"),
        ("WithList", "WithList keeps 'history' as a list"),
        ("leaves out", "the optimizer lacks parameters of the model: 0.weight"),
        ("nothing", "it returned a str"),
        ("Lookahead", "holds another optimizer (AdamW) with its own state"),
        ("Unmade", "without torch.optim.Optimizer.__init__"),
        ("Asserting", "it needs a closure"),
        ("WithSetting", "WithSetting keeps 'history' as a tuple"),
        ("WithGlobal", "WithGlobal keeps state under 'global', which is not a parameter"),
        ("WithFirstGlobal", "the optimizer keeps state under 'global', which is not a parameter of the model"),
    ],
)
def test_an_optimizer_that_cannot_train_here_is_refused(tmp_path, kind, words):
    assert words in refusal(OwnOptimizer(kind), plain_keys(steps=4), tmp_path / "run")


def test_two_places_that_choose_the_optimizer_are_refused():
    assert "Task.optimizer makes the optimizer, and the config has optim.name" in refusal(
        OwnOptimizer(), options(name="SGD")
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package:Sign", "no_such_package cannot be imported"),
        ("tests.optimizer_cases:Sine", "has no class 'Sine'"),
        ("tests.optimizer_cases:halves", "has no class 'halves'"),
        ("no_file.py:Sign", "no such file"),
        ("AdmaW", "torch.optim has no 'AdmaW'"),
    ],
)
def test_a_class_that_is_not_there_is_refused(name, words):
    assert words in refusal(own_tasks.Masked(), options(name=name))


def test_a_class_that_forms_its_own_groups_trains_at_the_rate_of_the_config():
    weights, _ = runs.fit(own_tasks.Masked(), options(name="tests.optimizer_cases:Flat", lr=0.05))
    expected, _ = runs.by_hand(own_tasks.Masked(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    assert runs.difference(weights, expected) < EXACT


def test_rates_of_the_config_that_the_task_leaves_out_are_refused():
    assert "does not have them" in refusal(OwnOptimizer("Flat"), runs.config() | {"optim": {"lr": 0.05}})


# ---- several optimizers, one loss


def several(**keys):
    groups = [
        {"name": "matrices", "match": ["*"], "ndim": 2, "optimizer": "Muon", "lr": 0.02, "args": {"nesterov": False}}
    ]
    return runs.config(optim={"name": "SGD", "lr": 0.05, "weight_decay": 0.0, "groups": groups, **keys})


class Both:
    """Muon for matrices and SGD for the rest, as a plain loop has them."""

    def __init__(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        self.all = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, nesterov=False),
            torch.optim.SGD(rest, lr=0.05),
        ]

    def zero_grad(self):
        for one in self.all:
            one.zero_grad()

    def step(self):
        for one in self.all:
            one.step()


def fit_masked(settings, run_dir=None):
    return runs.fit(own_tasks.Masked(), settings, run_dir)[0]


@pytest.mark.cases("3")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_optimizers_train_as_in_a_plain_loop(ranks):
    settings = several(clip_norm=0.5) | {"batch": {"global": 24, "micro": 3}}
    found = run_ranks(ranks, fit_masked, settings)
    expected, _ = runs.by_hand(own_tasks.Masked(), optimizer=Both, clip_norm=0.5)
    for weights in found:
        assert runs.difference(weights, expected) < 1e-3  # Muon iterates in bf16
    assert all(torch.equal(found[0][name], weights[name]) for weights in found for name in weights)


def test_two_optimizers_resume_bit_identically(tmp_path):
    settings = several() | {"checkpoint": {"every_steps": 4}}
    whole = fit_masked(settings | {"train": {"steps": 12}}, tmp_path / "whole")
    fit_masked(settings | {"train": {"steps": 8}}, tmp_path / "cut")
    cut = fit_masked(settings | {"train": {"steps": 12}}, tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    file = Trainer(settings | {"train": {"steps": 12}}, run_dir=tmp_path / "cut", quiet=True).export_training_state(
        tmp_path / "state.pt", own_tasks.Masked()
    )
    state = torch.load(file, weights_only=True)
    assert state["optimizer_class"] == ["SGD", "Muon"]
    assert [len(one["param_groups"][0]["params"]) for one in state["optimizer"]] == [2, 2]
    assert all("momentum_buffer" in slots for slots in state["optimizer"][1]["state"].values())


def test_another_optimizer_in_a_group_starts_its_state_anew_and_says_so(tmp_path, capsys):
    settings = several() | {"checkpoint": {"every_steps": 4}, "train": {"steps": 4}}
    fit_masked(settings, tmp_path / "run")
    settings["optim"]["groups"][0] |= {"optimizer": "AdamW", "args": {}}
    settings["train"]["steps"] = 8
    runs.fit(own_tasks.Masked(), settings, tmp_path / "run", allow_change=["optim", "train.steps"])
    assert "the state of SGD and Muon is left out" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("overflows", [True, False])
def test_an_overflow_of_fp16_skips_the_updates_of_all_optimizers(overflows):
    model = own_tasks.Masked().model().float()
    both = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    joined, precision = Optimizers(both), Precision("fp16", torch.device("cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = precision.scaler.scale(model(torch.ones(2, 10)).square().sum())
    loss.backward()
    if overflows:
        model[2].bias.grad[0] = float("inf")  # of the last optimizer alone
    precision.scaler.unscale_(joined)
    assert precision.step(joined) is not overflows
    assert all(torch.equal(before[name], value) == overflows for name, value in model.state_dict().items())


def test_arguments_without_an_optimizer_of_the_group_are_refused():
    settings = runs.config(optim={"groups": [{"name": "a", "match": ["*"], "args": {"momentum": 0.9}}]})
    with pytest.raises(LockstepError, match="args are for a group with its own `optimizer`"):
        runs.fit(own_tasks.Masked(), settings)


def test_state_dict_of_several_optimizers_is_loaded_into_their_members():
    model = own_tasks.Masked().model()
    both = [torch.optim.SGD([model[0].weight], lr=0.1, momentum=0.9), torch.optim.AdamW(model[2].parameters(), lr=0.1)]
    joined = Optimizers(both)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    joined.step()
    saved = copy.deepcopy(joined.state_dict())
    joined.step()
    joined.load_state_dict(saved)
    assert float(both[1].state[model[2].weight]["step"]) == 1
    assert both[0].param_groups[0] is joined.param_groups[0]


# ---- schedules


class Halving:
    """AdamW with torch's own LambdaLR, as a plain loop has them."""

    def __init__(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, optimizer_cases.halves)
        self.zero_grad = self.optimizer.zero_grad

    def step(self):
        self.optimizer.step()
        self.schedule.step()


@pytest.mark.cases("tests.optimizer_cases:halves")
@pytest.mark.parametrize("name", [f"{FILE}:halves", "tests.optimizer_cases:halves", None])
def test_a_schedule_of_the_users_gives_the_rates_of_a_plain_loop(name):
    task = own_tasks.Masked() if name else optimizer_cases.OwnSchedule()
    weights, _ = runs.fit(task, runs.config(schedule={"name": name} if name else {}))
    expected, _ = runs.by_hand(own_tasks.Masked(), optimizer=Halving)
    assert runs.difference(weights, expected) < EXACT


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"name": f"{FILE}:wrong"}, "it returned nan for update 1"),
        ({"name": f"{FILE}:whole"}, "no function 'whole'"),
        ({"name": "no_such_package:halves"}, "cannot be imported"),
        ({"name": "no_file.py:halves"}, "no such file"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_refused(schedule, words):
    assert words in refusal(own_tasks.Masked(), runs.config(schedule=schedule))


def test_a_schedule_of_the_task_beside_one_of_the_config_is_refused():
    assert "Task.schedule is the schedule" in refusal(
        optimizer_cases.OwnSchedule(), runs.config(schedule={"name": "cosine"})
    )


@pytest.mark.parametrize("schedule", [{"name": "plateu"}, {"name": "plateau"}, {"plateau": {"metric": "eval/loss"}}])
def test_a_schedule_that_is_not_complete_is_refused(schedule):
    with pytest.raises(LockstepError, match="schedule"):
        runs.fit(own_tasks.Masked(), runs.config(schedule=schedule))


def test_a_function_that_changed_is_noticed_when_the_run_goes_on(tmp_path):
    source = "def rate(update):\n    return {} ** update\n"
    file = tmp_path / "rates.py"
    file.write_text(source.format(0.9))
    settings = runs.config(schedule={"name": f"{file}:rate"}, checkpoint={"every_steps": 4}, train={"steps": 4})
    runs.fit(own_tasks.Masked(), settings, tmp_path / "run")
    file.write_text(source.format(0.85))  # of another size: Python compiles the file anew
    settings["train"]["steps"] = 8
    with pytest.raises(LockstepError, match=r"the schedule's function has changed: its factor for update 3 was 0\.729"):
        runs.fit(own_tasks.Masked(), settings, tmp_path / "run")
    runs.fit(own_tasks.Masked(), settings, tmp_path / "run", allow_change=["schedule"])


def test_a_class_that_changed_is_noticed_when_the_run_goes_on(tmp_path):
    source = "import torch\n\n\nclass Own(torch.optim.SGD):\n    factor = {}\n"
    file = tmp_path / "own.py"
    file.write_text(source.format(1))
    settings = options(name=f"{file}:Own") | {"checkpoint": {"every_steps": 4}, "train": {"steps": 4}}
    runs.fit(own_tasks.Masked(), settings, tmp_path / "run")
    settings["train"]["steps"] = 8
    file.write_text(source.format(100))
    with pytest.raises(LockstepError, match="the source of Own has changed since the run began"):
        runs.fit(own_tasks.Masked(), settings, tmp_path / "run")
    runs.fit(own_tasks.Masked(), settings, tmp_path / "run", allow_change=["optim"])


def test_a_file_that_is_edited_while_the_training_runs_disturbs_no_save(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import torch\n\n\nclass Own(torch.optim.SGD):\n    pass\n")

    class Edits(own_tasks.Masked):
        def loss(self, model, batch):
            file.write_text("# half of a file\n")
            return super().loss(model, batch)

    settings = options(name=f"{file}:Own") | {"checkpoint": {"every_steps": 2}, "train": {"steps": 4}}
    runs.fit(Edits(), settings, tmp_path / "run")
    assert len(list((tmp_path / "run" / "checkpoints").glob("*"))) >= 1


PLATEAU = {"metric": "eval/loss", "mode": "min", "patience": 1, "factor": 0.5, "min_delta": 0.3, "min_factor": 0.1}


def test_plateau_has_the_factors_of_torchs_scheduler():
    results = [5.0, 4.0, 3.9, 3.8, float("nan"), 3.0, 2.9, 2.85, 2.8, 2.7, 2.65, 2.64, 2.63]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, threshold=0.3, threshold_mode="abs", min_lr=0.1, eps=0
    )
    for place, result in enumerate(results, 1):
        theirs.step(result)
        assert Plateau(**PLATEAU).factor_after(results[:place]) == optimizer.param_groups[0]["lr"]


def rates(folder):
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["train/lr"] for entry in entries if "train/lr" in entry}


def fit_plateau(folder, steps, ranks_folder=None):
    train = {"steps": steps, "eval_every_steps": 2}
    settings = runs.config(
        train=train,
        schedule={"name": "plateau", "plateau": PLATEAU},
        checkpoint={"every_steps": 2},
        log={"writers": ["json_lines"], "every_steps": 1, "flops": False},
    )
    return runs.fit(own_tasks.Masked(eval_length=50), settings, folder)[0]


def test_a_training_that_follows_a_plateau_goes_on_with_the_same_rates(tmp_path):
    whole = fit_plateau(tmp_path / "whole", 16)
    for steps in (6, 10, 16):
        cut = fit_plateau(tmp_path / "cut", steps)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    found = rates(tmp_path / "whole")
    assert found == rates(tmp_path / "cut")
    assert len(set(found.values())) > 2


def test_a_plateau_without_evaluations_is_refused(tmp_path):
    settings = runs.config(schedule={"name": "plateau", "plateau": PLATEAU})
    with pytest.raises(LockstepError, match="the run never evaluates"):
        runs.fit(own_tasks.Masked(), settings, tmp_path / "run")
