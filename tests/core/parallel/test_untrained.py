"""What gets a gradient and is in no optimizer is refused before the first update; what is new in each pass is not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.core.errors import LockstepError, TrainingError
from tests import own_tasks, pair_tasks, player_tasks, runs
from tests.ranks import run_ranks

Task = own_tasks.Masked  # a module has the class under this name
FACTOR = nn.Parameter(torch.ones(5, dtype=torch.float64))  # of a script, outside of all classes


class Scale(nn.Module):
    """A loss with a parameter: it weighs the five targets."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, error):
        return (error * self.factor).sum()


class Hidden(torch.autograd.Function):
    """Uses a parameter that is not an argument, and adds to its gradient by itself."""

    @staticmethod
    def forward(ctx, error, module):
        ctx.module = module
        ctx.save_for_backward(error)
        return (error * module.factor.detach()).sum()

    @staticmethod
    def backward(ctx, gradient):
        (error,) = ctx.saved_tensors
        ctx.module.factor.grad = (error * gradient).sum(0)
        return gradient * ctx.module.factor.detach().expand_as(error), None


class Kept(Task):
    """The loss uses a leaf that somebody keeps."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how
        if how in ("module", "frozen", "checkpoint", "function"):
            self.criterion = Scale().requires_grad_(how != "frozen")
        elif how == "tensor":
            self.weights = torch.ones(5, dtype=torch.float64, requires_grad=True)
        elif how == "list":
            self.options = {"heads": [Scale(), Scale()]}

    def model(self):
        model = super().model()
        if self.how == "list of the model":
            model.heads = [Scale()]
        elif self.how == "tensor of the model":
            model.factor = torch.ones(5, dtype=torch.float64, requires_grad=True)
        elif self.how == "buffer":
            model.register_buffer("factor", torch.ones(5, dtype=torch.float64, requires_grad=True), persistent=False)
        elif self.how == "part of the model":
            return nn.ModuleDict({"net": model, "criterion": Scale()})
        return model

    def loss(self, model, batch):
        inputs, targets, mask = batch
        net = model["net"] if self.how == "part of the model" else model
        error = (net(inputs) - targets).square() * mask
        if self.how == "checkpoint":  # the graph does not show what is inside
            return checkpoint(self.criterion, error, use_reentrant=True)
        if self.how == "function":
            return Hidden.apply(error, self.criterion)
        if self.how in ("module", "frozen"):
            return self.criterion(error)
        if self.how == "list":
            return self.options["heads"][1](error)
        if self.how == "list of the model":
            return model.heads[0](error)
        if self.how == "part of the model":
            return model["criterion"](error)
        if self.how == "cached":
            factor = _cached()
        else:
            factor = {
                "tensor": lambda: self.weights,
                "script": lambda: FACTOR,
                "tensor of the model": lambda: model.factor,
                "buffer": lambda: model.factor,
            }[self.how]()
        return (error * factor).sum()


@functools.cache
def _cached():
    """A leaf in a place that nobody looks at."""
    return torch.ones(5, dtype=torch.float64, requires_grad=True)


class New(own_tasks.Masked):
    """Each pass makes a new leaf."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how, self.last = how, []
        self.teacher = nn.Linear(10, 5).double()

    def loss(self, model, batch):
        inputs, targets, mask = batch
        loss = ((model(inputs) - targets).square() * mask).sum()
        if not torch.is_grad_enabled():
            return loss
        if self.how == "teacher":  # it could train, and gets no gradient
            with torch.no_grad():
                aim = self.teacher(inputs)
            return loss + (model(inputs) - aim).square().sum()
        if self.how == "copy":  # of all weights
            weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
            return loss + torch.func.functional_call(model, weights, (inputs,)).square().sum() * 1e-3
        inputs = {
            "input": inputs.requires_grad_,
            "penalty": lambda: inputs.detach().clone().requires_grad_(),
            "kept": lambda: inputs.detach().clone().requires_grad_(),
            "parameter": lambda: nn.Parameter(inputs.clone()),
        }[self.how]()
        self.last = [inputs] if self.how == "kept" else []
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        return loss + gradient.square().sum() + inputs.square().sum()


def fit(kind, how, strategy="ddp", steps=4, in_memory=True, **sections):
    """The final weights, or the error; and the number of updates."""
    task = kind(how)
    settings = runs.config(parallel={"strategy": strategy}, train={"steps": steps}, **sections)
    with runs.shared_folder() as folder:
        try:
            return runs.fit(task, settings, None if in_memory else folder)[0]
        except LockstepError as error:
            return f"{type(error).__name__} {error}"


KEPT = {
    "module": "Task.criterion.factor",
    "tensor": "Task.weights",
    "list": "Task.options.heads[1].factor",
    "list of the model": "model.heads[0].factor",
    "tensor of the model": "model.factor",
    "buffer": "model.factor",
    "script": "FACTOR",
    "checkpoint": "Task.criterion.factor",
    "function": "Task.criterion.factor",
}


@pytest.mark.parametrize("how", KEPT)
def test_a_leaf_that_would_not_train_is_refused_before_the_first_update(how, tmp_path):
    task = Kept(how)
    with pytest.raises(TrainingError, match="gets a gradient and is in no optimizer") as caught:
        runs.fit(task, runs.config(train={"steps": 3}), tmp_path / "run")
    assert f"{KEPT[how]} gets a gradient and is in no optimizer" in str(caught.value)
    in_model = KEPT[how].startswith("model.")
    assert ("in the model's constructor" if in_model else "make it a part of the model") in str(caught.value)
    torch.manual_seed(0)
    new = own_tasks.Masked().model()
    assert all(torch.equal(one, other) for one, other in zip(task.built.parameters(), new.parameters(), strict=True))


def test_a_leaf_that_nobody_leads_to_is_refused_in_the_second_step(tmp_path):
    with pytest.raises(TrainingError, match=r"a tensor of shape \(5,\) gets a gradient and is in no optimizer"):
        runs.fit(Kept("cached"), runs.config(train={"steps": 3}), tmp_path / "run")


@pytest.mark.parametrize("how", ["input", "penalty", "kept", "parameter", "copy", "teacher"])
def test_a_leaf_that_is_new_in_each_pass_is_right(how, tmp_path):
    assert runs.fit(New(how), runs.config(train={"steps": 4}), tmp_path / "run")[1]["train/loss"] > 0


@pytest.mark.parametrize("how", ["frozen", "part of the model"])
def test_the_remedies_are_right(how):
    weights = fit(Kept, how)
    assert isinstance(weights, dict)
    moved = [not torch.equal(value, torch.ones(5).double()) for name, value in weights.items() if "factor" in name]
    assert moved == ([True] if how == "part of the model" else [])


def fit_each(cases):
    return [fit(*case) for case in cases]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_find_the_same(strategy):
    cases = [(Kept, "module", strategy), (Kept, "checkpoint", strategy), (New, "penalty", strategy)]
    for of_rank in run_ranks(2, fit_each, cases):
        assert all("Task.criterion.factor gets" in found for found in of_rank[:2])
        assert isinstance(of_rank[2], dict)


def test_a_layer_that_the_model_gets_after_its_optimizer_is_refused():
    class Late(own_tasks.Masked):
        def loss(self, model, batch):
            if len(model) == 3:
                model.append(nn.Linear(5, 5).double())
            return super().loss(model, batch)

    with pytest.raises(TrainingError, match=r"model\.3.weight"):
        runs.fit(Late(), runs.config(train={"steps": 2}))


def test_a_weight_that_was_tied_and_is_not_any_longer_is_refused():
    class Untied(own_tasks.Masked):
        def model(self):
            model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 5)).double()
            model[2].weight = model[0].weight
            return model

        def loss(self, model, batch):
            if model[2].weight is model[0].weight:
                model[2].weight = nn.Parameter(model[0].weight.detach().clone())
            return super().loss(model, batch)

    with pytest.raises(TrainingError, match=r"model\.2.weight gets a gradient"):
        runs.fit(Untied(), runs.config(train={"steps": 2}))


def test_players_know_all_parameters_and_no_others():
    class Scaled(player_tasks.Adversaries):
        def __init__(self):
            super().__init__()
            self.criterion = nn.Parameter(torch.ones((), dtype=torch.float64))

        def generator_loss(self, model, batch):
            return super().generator_loss(model, batch) * self.criterion

    assert runs.fit(player_tasks.Adversaries(), runs.config(train={"steps": 2}))
    with pytest.raises(TrainingError, match=r"Task\.criterion gets a gradient"):
        runs.fit(Scaled(), runs.config(train={"steps": 2}))


def test_a_loss_over_the_global_batch_is_looked_at():
    class Warm(pair_tasks.Pairs):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def loss(self, model, embeddings):
            return super().loss(model, embeddings) * self.temperature

    assert runs.fit(pair_tasks.Pairs(), runs.config(train={"steps": 2}))
    with pytest.raises(TrainingError, match=r"Task\.temperature gets a gradient"):
        runs.fit(Warm(), runs.config(train={"steps": 2}))


def test_parameters_that_train_later_are_known():
    settings = {"train": {"steps": 6, "unfreeze": [{"match": ["0.*"], "step": 3}]}}
    assert runs.fit(own_tasks.Masked(), runs.config(**settings))


def test_a_compiled_model_shows_its_leaves():
    settings = runs.config(train={"steps": 2}, compute={"compile": "model", "compile_backend": "aot_eager"})
    with pytest.raises(TrainingError, match=r"Task\.criterion.factor gets a gradient"):
        runs.fit(Kept("module"), settings)
    assert runs.fit(own_tasks.Masked(), settings)


# ---- loops


def loop_of(folder, task, **options):
    model = task.model()
    settings = {"log.writers": ["json_lines"], "device": "cpu", "log.pictures": 0}
    options = {"global_batch": 24, "steps": 3, "quiet": True, "config": settings, "run_dir": folder} | options
    return lockstep.Loop(model, torch.optim.SGD(model.parameters(), lr=0.01), task.train_data(), **options)


@pytest.mark.parametrize("how", ["module", "tensor", "of an object", "as a part"])
def test_a_loop_finds_what_its_script_keeps(how, tmp_path):
    task, criterion = own_tasks.Masked(), Scale()
    weights = torch.ones(5, dtype=torch.float64, requires_grad=True)
    task.criterion = criterion if how == "of an object" else None
    name = {"module": "criterion.factor", "tensor": "weights", "of an object": "factor", "as a part": ""}[how]
    if how == "as a part":
        task.model = lambda: nn.ModuleDict({"net": own_tasks.Masked().model(), "criterion": criterion})
    elif how == "of an object":
        del criterion
    loop = loop_of(tmp_path / "run", task)
    done = 0

    def train():
        nonlocal done
        for step in loop:
            for inputs, targets, mask in step:
                net = loop.model["net"] if how == "as a part" else loop.model
                error = (net(inputs) - targets).square() * mask
                factor = weights if how == "tensor" else (task.criterion or criterion).factor
                step.backward((error * factor).sum(), units=mask.sum(), reduction="sum")
            done = step.number

    try:
        if how == "as a part":
            train()
            assert done == 3
            return
        with pytest.raises(TrainingError, match=f"{name} gets a gradient and is in no optimizer"):
            train()
        assert done == 0
    finally:
        loop.close()


def test_a_loop_may_use_new_leaves(tmp_path):
    loop = loop_of(tmp_path / "run", own_tasks.Masked())
    for step in loop:
        for inputs, targets, mask in step:
            noisy = inputs.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loop.model(noisy).square().sum(), noisy, create_graph=True)
            error = ((loop.model(inputs) - targets).square() * mask).sum() + softplus(gradient).sum() + noisy.sum()
            step.backward(error, units=mask.sum(), reduction="sum")
    assert step.number == 3
    loop.close()
