"""A pass beside the training changes nothing, also of a model that changes itself in its forward passes."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.config.sections import LogConfig
from lockstep.core.parallel.buffers import restored_state
from tests import runs
from tests.ranks import run_ranks
from tests.selection import mainly


class Contrast(nn.Module):
    """As MoCo: every forward pass, in any mode, moves a second encoder towards the first, and fills a queue.

    With `odd` it also changes a number, and a tensor that is no buffer, which no checkpoint holds; and in one process
    rows of an embedding, which is refused on several ranks.
    """

    def __init__(self, odd):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 4))
        self.key = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Identity(), nn.Linear(6, 4))
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        self.words = nn.Embedding(7, 4, max_norm=0.9 if odd and alone else None)
        self.register_buffer("queue", F.normalize(torch.randn(8, 4)))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.odd, self.calls, self.seen = odd, 0, torch.zeros(1)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if slow.ndim == 1:  # torch does not count either change
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
                else:
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            keys = F.normalize(self.key(x))
        if self.odd:
            self.calls, self.seen = self.calls + 1, self.seen + 1
        x = F.normalize(self.query(x)) + self.words((x[:, 0].abs() * 3).long() % 7)
        logits = torch.cat([(x * keys).sum(1, keepdim=True), x @ self.queue.clone().T], 1) / (1 + 0.1 * self.calls % 3)
        with torch.no_grad():
            self.queue[self.place % 8] = keys[0] + 0.01 * self.seen
            self.place += 1
        return logits


class Momentum(lockstep.Task):
    def __init__(self, odd=True):
        self.odd = odd

    def model(self):
        torch.manual_seed(0)
        return Contrast(self.odd)

    def train_data(self):
        return TensorDataset(torch.randn(72, 5, generator=torch.Generator().manual_seed(0)))

    def eval_data(self):
        return TensorDataset(torch.randn(20, 5, generator=torch.Generator().manual_seed(1)))

    def loss(self, model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long), reduction="sum")


QUIET = {"every_steps": 6, "writers": ["text_log"], "model_summary": False, "flops": False, "pictures": 0}
OTHER = {
    "every_steps": 2,
    "writers": ["text_log", "json_lines", "tensorboard"],
    "tags": ["one"],
    "artifacts": True,
    "model_summary": True,
    "flops": True,
    "memory": "table",
    "pictures": 4,
    "train_metrics": False,
    "probe_every_epochs": 1,
}


def settings(world, log, **sections):
    strategy = {1: "single", 2: "ddp", 3: "ddp"}[world]
    return runs.config(
        train={"steps": 6, **sections.pop("train", {})},
        optim={"clip_norm": 0.5},
        parallel={"strategy": strategy},
        log=QUIET | log,
        **sections,
    )


def weights_by_case(world, cases):
    found = {}
    for name, (log, sections) in cases.items():
        with runs.shared_folder() as folder:
            found[name] = runs.fit(Momentum(), settings(world, log, **sections), folder)[0]
    return found


def whole_and_in_parts(world):
    """Weights of a training, and of one that was stopped after a step that is logged, and continued by a new training.

    Both parts count operations, and make the trials that a process begins with.
    """
    log = {"every_steps": 2, "flops": True}
    with runs.shared_folder() as folder:
        whole, _ = runs.fit(Momentum(odd=False), settings(world, {}), folder)
    with runs.shared_folder() as folder:
        runs.fit(Momentum(odd=False), settings(world, log, train={"steps": 4}), folder)
        parts, _ = runs.fit(Momentum(odd=False), settings(world, log), folder)
    return whole, parts


def assert_equal(one, other, name):
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert one.keys() == other.keys()
    assert not different, (name, different)


def assert_the_same_on_ranks(world, cases):
    for found in run_ranks(world, weights_by_case, world, {"quiet": ({}, {})} | cases):
        for name, weights in found.items():
            assert_equal(found["quiet"], weights, (world, name))


@pytest.mark.parametrize("world", mainly([2], [1, 2]))
def test_no_key_of_the_log_and_no_evaluation_changes_a_bit_of_a_training(world):
    assert OTHER.keys() == LogConfig.model_fields.keys()
    default = LogConfig().model_dump()
    assert all(value != QUIET.get(key, default[key]) for key, value in OTHER.items())
    assert_the_same_on_ranks(world, {"log": (OTHER, {}), "evaluated": ({}, {"train": {"eval_every_steps": 2}})})


@pytest.mark.exhaustive
def test_no_key_of_the_log_changes_a_bit_by_itself():
    assert_the_same_on_ranks(1, {key: ({key: value}, {}) for key, value in OTHER.items()})


@pytest.mark.parametrize("world", mainly([3], [1, 2, 3]))  # three ranks warm up before the first step
def test_a_run_that_goes_on_after_a_logged_step_trains_the_same_bits(world):
    for whole, parts in run_ranks(world, whole_and_in_parts, world):
        assert_equal(whole, parts, world)


def test_a_kind_of_passes_that_changes_no_parameter_is_made_without_a_copy_from_then_on():
    inputs = torch.randn(3, 5)
    changing, still = Contrast(odd=False).eval(), nn.Linear(5, 2)
    before = {name: tensor.clone() for name, tensor in changing.state_dict().items()}
    for _ in range(2):  # it changes parameters, so they are copied each time
        with restored_state(changing, "evaluation"):
            changing(inputs)
        assert all(torch.equal(tensor, before[name]) for name, tensor in changing.state_dict().items())
    weight = still.weight.detach().clone()
    with pytest.raises(ValueError, match="too early"), restored_state(still, "evaluation"):
        raise ValueError("too early")  # it shows nothing of the passes after it
    with restored_state(still, "evaluation"):
        still.weight.data.add_(1)
    assert torch.equal(still.weight, weight)
    for kind, is_restored in (("evaluation", True), ("evaluation", False), ("", True), ("probe", True)):
        with restored_state(still, kind):
            still(inputs)
            if not is_restored or kind != "evaluation":
                still.weight.data.add_(1)
        assert torch.equal(still.weight, weight) == is_restored
        still.weight.data.copy_(weight)


class HooksOnce(nn.Module):
    """As models of transformers: the first forward pass installs a hook, and sets a flag."""

    def __init__(self):
        super().__init__()
        self.inner, self.is_ready, self.calls = nn.Linear(5, 2), False, 0

    def forward(self, x):
        if not self.is_ready:
            self.inner.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))
            self.is_ready = True
        return self.inner(x)


def test_a_flag_stays_with_the_hook_that_it_stands_for_and_numbers_are_restored():
    model = HooksOnce()
    with restored_state(model):
        model(torch.randn(3, 5))
        assert model.calls == 1
    assert (model.is_ready, model.calls) == (True, 0)
    model(torch.randn(3, 5))
    assert (model.calls, len(model.inner._forward_hooks)) == (1, 1)


class Remembers(nn.Linear):
    """Keeps a history in containers, of which one goes into checkpoints, and one in a place of its own."""

    def __init__(self):
        super().__init__(2, 2)
        self.history, self.seen, self.kinds, self.own = {"a": [1]}, [1], {1}, Nested()

    def forward(self, x):
        self.history["a"].append(len(x))
        self.seen.append(len(x))
        self.kinds.add(len(x))
        self.own.values.append(len(x))
        return super().forward(x)

    def get_extra_state(self):
        return {"history": self.history, "own": self.own.values, "of the graph": self.weight * 2}

    def set_extra_state(self, state):
        self.history, self.own.values = state["history"], state["own"]


class Nested:
    def __init__(self):
        self.values = [1]


def test_containers_and_extra_states_are_restored():
    model = Remembers()
    with restored_state(model):
        model(torch.randn(3, 2))
        assert (model.history, model.seen, model.kinds, model.own.values) == ({"a": [1, 3]}, [1, 3], {1, 3}, [1, 3])
    assert (model.history, model.seen, model.kinds, model.own.values) == ({"a": [1]}, [1], {1}, [1])
