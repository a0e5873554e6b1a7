"""State that a training changes and no checkpoint holds is told, with its name and its kind."""

import collections
import itertools
import types

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.parts.checks import outside_state
from lockstep.parts.checks.outside_state import OutsideState
from tests import runs
from tests.test_first_steps import Net, Task, settings


class Outside(Net):
    """Keeps state where no checkpoint holds it, besides what is no state."""

    def __init__(self):
        super().__init__()
        self.calls, self.scale, self.ready = 0, 1.0, False
        self.mean = torch.zeros(16)
        self.size, self.same, self.last = 0, 3, None
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("recomputed", torch.arange(4), persistent=False)
        self.norm = nn.BatchNorm1d(16, dtype=torch.float64)

    def forward(self, inputs):
        self.ready, self.size, self.same = True, len(inputs), 3
        self.recomputed = torch.arange(4)
        self.last = self.norm(self.first(inputs)).tanh()
        if self.training:
            self.calls += 1
            self.scale *= 0.5
            self.mean += 1
            self.queue += 1
        return self.second(self.last)


class OutsideTask(Task):
    def __init__(self):
        super().__init__("Outside")

    def model(self):
        return Outside()


class Counting(Task):
    def __init__(self):
        super().__init__("Net")
        self.losses, self.rate = 0, 0.1

    def loss(self, model, batch):
        self.losses += 1
        return super().loss(model, batch)


def _warnings(folder, make, **options):
    runs.fit(make(**options), settings(3), folder)
    lines = (folder / "train.log").read_text().splitlines()
    return [line for line in lines if "but no checkpoint has that" in line]


def test_state_that_no_checkpoint_holds_is_named_while_the_run_is_young_and_at_its_end(tmp_path):
    found = _warnings(tmp_path / "outside", OutsideTask)
    assert len(found) == 2  # when it is seen, and at the end
    named = found[0].partition("training changes ")[2].partition(", but no checkpoint")[0].split(", ")
    assert set(named) == {
        "calls (int)",
        "scale (float)",
        "ready (bool)",
        "mean (tensor)",
        "queue (non-persistent buffer)",
    }
    runs.fit(OutsideTask(), settings(6), tmp_path / "outside")  # a resumed run does not say it twice
    log = (tmp_path / "outside" / "train.log").read_text()
    assert log.count("but no checkpoint has that") == 4
    found = _warnings(tmp_path / "task", Counting)
    assert "training changes Task.losses (int), but" in found[0]


class Keeper(Net):
    """Keeps what a task or a model may keep in attributes. `use` is what a training step does with it."""

    def __init__(self):
        super().__init__()
        kept = {
            "losses (list)": [],
            "by_class (defaultdict)": collections.defaultdict(list, {0: [0.0]}),
            "recent (deque)": collections.deque([torch.zeros(2)], maxlen=1),
            "ids (set)": {0},
            "pair (tuple)": (0, [1]),
            "table (NumPy array)": np.zeros(3),
            "texts (NumPy array)": np.array(["", None], dtype=object),
            "phase (str)": "",
            "numbers (counter)": itertools.count(),
        }
        self.__dict__ |= {name.partition(" ")[0]: value for name, value in kept.items()}
        self.names = frozenset(kept)
        self.__dict__["teacher"] = nn.Linear(2, 2)  # torch does not see it
        self.hidden = [nn.Linear(2, 2)]
        self.sizes, self.memory, self.blocks, self.seen = {}, {}, [self.first], []
        self.data = [np.zeros(2)] * 5000
        self.fresh = np.random.default_rng(0)
        self.generators = [np.random.default_rng(0)]  # seeded before each pass

    def use(self, size):
        self.losses.append(0.5)
        self.by_class[0][0] += 1
        self.recent.append(self.recent[0] + 1)
        self.ids.add(len(self.ids))
        self.pair[1][0] += 1
        self.table[1] += 1
        self.texts[0] += "a"
        self.phase += "a"
        self.generators[0].random()
        next(self.numbers)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
            self.hidden[0].bias.add_(1)
            self.first.weight.mul_(0.5)
        self.innocent(size)

    def innocent(self, size):
        """Caches that the first batch fills, what every batch makes anew, and what is in the model."""
        self.sizes[3] = 7
        self.memory.setdefault("grid", torch.arange(4))
        self.seen = {"features": [self.first(torch.ones(size, 10, dtype=torch.float64))]}
        self.fresh = np.random.default_rng(0)
        self.fresh.random()


def test_a_warning_names_containers_arrays_generators_and_hidden_modules_with_their_kinds():
    keeper = Keeper()
    names = keeper.names | {"teacher (module outside the model)", "hidden (list)"}
    task = types.SimpleNamespace(counts=[0], again={1: "a"}, the_model=keeper, both=[keeper.first, keeper])
    outside = OutsideState(keeper, task)
    for size in (2, 3):
        outside.look()
        keeper.use(size)
        task.counts[0] += 1
    outside.look()
    assert set(outside.changed()) == names | {"Task.counts (list)"}


def test_nothing_is_said_of_models_whose_state_is_saved(tmp_path):
    for kind in ("Net", "Bank"):
        assert not _warnings(tmp_path / kind, Task, kind=kind)


def test_a_model_of_transformers_keeps_nothing_outside(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    models = [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, vocab_size=50)),
        transformers.BertForMaskedLM(transformers.BertConfig(**small, vocab_size=50)),
    ]
    for model in models:
        model.train()
        outside = OutsideState(nn.Sequential(model), object())
        for length in (7, 9):
            outside.look()
            tokens = torch.zeros(2, length, dtype=torch.int64)
            model(input_ids=tokens, labels=tokens).loss.backward()
        outside.look()
        assert outside.warnings() == []


class Repeats(Net):
    """Keeps views that repeat a few values: far more values than any memory holds."""

    def __init__(self):
        super().__init__()
        self.rate, self.rates = torch.ones(1, 3), np.ones(3)
        self.wide = self.rate.expand(1 << 40, 3)
        self.array = np.broadcast_to(self.rates, (1 << 40, 3))
        self.register_buffer("mask", self.rate.expand(1 << 40, 3), persistent=False)


def test_repeats_of_expanded_values_are_not_copied():
    net = Repeats()
    look = OutsideState(net, None)
    for number in (1, 2, 3):
        look.look()
        net.rate[0, 2] = net.rates[2] = number * 10
    assert look.changed() == [
        "mask (non-persistent buffer)",
        "rate (tensor)",
        "rates (NumPy array)",
        "wide (tensor)",
        "array (NumPy array)",
    ]


@pytest.mark.parametrize("most", [0, 1, 4, 6, 7, 24, 30])
def test_the_first_values_are_taken_in_their_order(most):
    values = torch.arange(24).reshape(4, 3, 2).transpose(0, 2)
    assert outside_state._first(values, most).tolist() == values.flatten()[:most].tolist()
    assert outside_state._first(values.numpy(), most).tolist() == values.flatten()[:most].tolist()
    assert outside_state._first(torch.tensor(3), 1).tolist() == outside_state._first(np.array(3), 1).tolist() == [3]
