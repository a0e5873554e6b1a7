"""Hooks on gradients and parameters that are held beside the model: right, or refused before the first step."""

import functools
import re
import types

import pytest
import torch
from torch import nn

from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.parallel import held_parameters
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly


class Masked(own_tasks.Deep):
    """A layer has a mask: by a hook on the gradient of its weight."""

    def __init__(self, hook="register_hook", **options):
        super().__init__(**options)
        self.hook = hook

    def model(self):
        model = super().model()
        model.inner.weight.data[3:] = 0.0
        mask = (torch.arange(7) < 3).double()[:, None]
        if self.hook == "register_hook":
            model.inner.weight.register_hook(lambda gradient: gradient * mask)
        else:

            def apply_mask(weight):
                weight.grad *= mask

            model.inner.weight.register_post_accumulate_grad_hook(apply_mask)
        return model


class Held(own_tasks.Deep):
    """The loss uses parameters that are held somewhere: it wants them to be small."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def model(self):
        model = super().model()
        weights = [model.inner.weight, model.blocks[0].up.weight]
        self.held = lambda: weights  # what a closure holds
        if self.how == "list of the task":
            self.held, self.small = types.MethodType(Held.of_task, self), weights
        elif self.how == "dict of a module":
            model.blocks[1].norms = {"inner": weights[0], "up": weights[1]}
            self.held = functools.partial(Held.of_module, model)
        elif self.how == "partial":
            self.held = functools.partial(list, weights)
        elif self.how == "another module":
            self.other = nn.ParameterList(weights)
            self.held = functools.partial(list, self.other)
        elif self.how == "module":  # right
            self.held = functools.partial(Held.of_blocks, model)
        return model

    def of_task(self):
        return self.small

    @staticmethod
    def of_module(model):
        return list(model.blocks[1].norms.values())

    @staticmethod
    def of_blocks(model):
        return [model.inner.weight, model.scale]

    def loss(self, model, batch):
        size = sum(weight.square().sum() for weight in self.held())
        return super().loss(model, batch) + 0.1 * size * batch[2].sum()


class TiedAcrossBlocks(own_tasks.Deep):
    """Two blocks have the weight of a third, and a recurrent layer holds a list of its own parameters."""

    def model(self):
        model = super().model()
        model.blocks[2].up.weight = model.blocks[1].up.weight = model.blocks[0].up.weight
        model.lstm = nn.LSTM(7, 7).double()
        return model

    def loss(self, model, batch):
        inputs, targets, mask = batch
        inner = model.lstm(model.inner(inputs)[None])[0][0]
        for block in model.blocks:
            inner = block(inner)
        return ((model.head(inner) * model.scale - targets).square() * mask).sum()


HELD = ["list of the task", "dict of a module", "partial", "another module", "closure"]


def train(kind, options, strategy):
    """Final weights, or the text of the error."""
    changes = {"parallel": {"strategy": strategy}, "batch": {"micro": 5}}
    try:
        return runs.fit(kind(**options), runs.config(**changes))[0]
    except LockstepError as error:
        return str(error)


def train_each(cases, strategy):
    return [train(*case, strategy) for case in cases]


def difference(one, other):
    """Of weights. A buffer counts micro-batches, which plain torch does not have."""
    return runs.difference(*({name: value for name, value in each.items() if name != "calls"} for each in (one, other)))


RIGHT = [(Masked, {}), (Held, {"how": "module"}), (TiedAcrossBlocks, {})]


@pytest.mark.parametrize(("world", "strategy"), mainly([(2, "fsdp")], [(1, "single"), (2, "ddp"), (2, "fsdp")]))
def test_a_training_is_that_of_plain_torch_or_refused_with_the_names(world, strategy):
    held = [(Held, {"how": how}) for how in HELD]
    after = (Masked, {"hook": "post"})
    cases, plain = [*RIGHT, *held], {}
    for *found, accumulated in run_ranks(world, train_each, [*cases, after], strategy):
        trained = dict(enumerate(found))
        if strategy == "fsdp":
            hooked, refused = trained.pop(0), [trained.pop(number) for number in range(len(RIGHT), len(found))]
            assert "the gradients of these parameters have hooks, which sharding loses: inner.weight" in hooked
            for text in refused:
                assert "parameters are held outside the modules that register them" in text
                assert "is inner.weight" in text
                assert "is blocks.0.up.weight" in text
            assert "the task.small[0] is inner.weight" in refused[0]
            assert "blocks.1.norms.inner is inner.weight" in refused[1]
        for number, weights in trained.items():
            kind, options = cases[number]
            plain[number] = plain.get(number) or runs.by_hand(kind(**options))[0]
            assert difference(weights, plain[number]) < 1e-10
        if world > 1:
            assert "inner.weight" in accumulated
        else:
            assert difference(accumulated, plain[0]) < 1e-10


def test_hooks_are_noted_and_the_error_of_ranks_says_what_to_use():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert held_parameters.check_hooks(model, ranks=2, sharded=True) == []
    model[0].weight.register_hook(lambda gradient: gradient)
    (note,) = held_parameters.check_hooks(model, ranks=2, sharded=False)
    assert "have hooks: 0.weight. A hook runs for each micro-batch of each rank" in note
    model[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UsageError, match=r"each rank would do something different.*: 1.bias(.|\n)*use register_hook"):
        held_parameters.check_hooks(model, ranks=2, sharded=False)
    (note,) = held_parameters.check_hooks(model, ranks=1, sharded=False)
    assert "0.weight, 1.bias" in note


def test_what_merely_looks_like_a_reference_is_allowed():
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    task = types.SimpleNamespace(model=model, layers=list(model), other=nn.Linear(2, 2), data=list(range(30_000)))
    task.itself, task.copies = task, [parameter.detach().clone() for parameter in model.parameters()]
    held_parameters.check_references(model, task)
    task.helper = types.SimpleNamespace(optimizer=torch.optim.SGD(model[0].parameters()))
    with pytest.raises(UsageError, match=r"the task.helper.optimizer.param_groups\[0\].params\[0\] is 0.weight"):
        held_parameters.check_references(model, task)


class SharedMemory(own_tasks.Plain):
    """Tensors with the memory of a parameter, or next to it."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def model(self):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 5)).double()
        first, second = model[0], model[1]
        if self.how == "parameter":
            second.weight = nn.Parameter(first.weight.data)
        elif self.how == "row":
            second.bias = nn.Parameter(first.weight.data[1])
        elif self.how == "buffer":
            second.register_buffer("view", first.weight.data[:2])
        elif self.how == "attribute":
            second.view = first.weight.detach()
        elif self.how == "tied":
            second.weight = first.weight
        elif self.how == "neighbours":
            memory = torch.zeros(20).double()
            first.bias = nn.Parameter(memory[:10])
            second.register_buffer("rest", memory[10:])
        return model


def test_memory_that_a_parameter_shares_is_refused_with_both_names_where_it_is_sharded():
    for how in ("parameter", "row", "buffer", "attribute", "tied", "neighbours"):
        for device in ("cpu", "meta"):  # ranks other than 0 make the model without values
            with torch.device(device):
                made = SharedMemory(how).model()
            if how in ("tied", "neighbours"):
                held_parameters.check_shared_memory(made)
                continue
            with pytest.raises(UsageError, match="share memory with a parameter") as caught:
                held_parameters.check_shared_memory(made)
            assert re.search(r"1\.\w+ and 0\.weight", str(caught.value)), (how, device)


def test_a_training_with_fsdp_refuses_shared_memory_on_all_ranks():
    for error in run_ranks(2, train, SharedMemory, {"how": "parameter"}, "fsdp"):
        assert "1.weight and 0.weight" in error
