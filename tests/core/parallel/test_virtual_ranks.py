"""The same bits on any number of ranks: against each other, and against a loop over virtual ranks in plain torch."""

import collections
import hashlib
import importlib
import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

import lockstep
from lockstep import Task
from lockstep.configs import config_file
from lockstep.core.data.order import derive_seed, permute, split_for_rank
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.virtual import Node, Tree, held, nodes_of
from lockstep.core.parallel.world import World
from lockstep.trainer import assemble
from tests import own_tasks, pair_tasks, runs
from tests.ranks import RankFailed, run_ranks
from tests.sampling_cases import WEIGHTS

TIMES = ("time", "wait", "samples_per_s", "health", "memory")


def without_times(entry):
    return {name: value for name, value in entry.items() if not any(word in name for word in TIMES)}


def digest(tensors):
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_every_number_of_ranks_adds_in_the_same_order():
    def add(left, right):
        return f"({left}+{right})"

    def whole(first, size, count):
        if size == 1:
            return str(first)
        left, middle = whole(first, size // 2, count), first + size // 2
        return left if middle >= count else add(left, whole(middle, size // 2, count))

    for count in range(1, 34):
        for ranks in range(1, count + 1):
            everything = Tree(count, add)
            for rank in range(ranks):
                own = Tree(count, add)
                for number in held(rank, ranks, count):
                    own.push(Node(number, 1, str(number)))
                    assert len(own.nodes) <= count.bit_length() + 1
                assert [(n.first, n.size) for n in own.nodes] == [
                    (n.first, n.size) for n in nodes_of(held(rank, ranks, count), count)
                ]
                for node in own.nodes:
                    everything.push(node)
            assert everything.total() == whole(0, 1 << (count - 1).bit_length(), count), (count, ranks)


class Small(nn.Module):
    """Dropout, running statistics and a buffer that counts forward passes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))

    def forward(self, inputs):
        return self.layers(inputs)


class Images(Task):
    """Classes of vectors, with a model whose result depends on ranks if nothing is done about it."""

    def model(self):
        return Small()

    def train_data(self):
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(100, 10, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randint(5, (100,), generator=generator))

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        output = model(batch[0])
        return functional.cross_entropy(output, batch[1], reduction="sum"), output

    def predict(self, model, batch):
        return model(batch[0])

    def metrics(self):
        return {"accuracy": MulticlassAccuracy(5), "calibration": MulticlassCalibrationError(5)}


class Odd(nn.Module):
    """A buffer that the first forward pass makes, a buffer that grows, and parameters without elements and of complex
    numbers."""

    def __init__(self):
        super().__init__()
        self.layer, self.empty = nn.Linear(10, 5), nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.complex = nn.Parameter(torch.ones(10, dtype=torch.complex64))
        self.register_buffer("late", None)
        self.register_buffer("seen", torch.zeros(0, 10))

    def forward(self, inputs):
        if self.late is None:
            self.late = torch.zeros(10)
        if self.training:
            self.late = 0.9 * self.late + 0.1 * inputs.mean(0)
            self.seen = torch.cat([self.seen, inputs.mean(0, keepdim=True)])[-5:]
        inputs = (inputs * self.complex).abs() - self.late - self.seen.mean(0)
        return self.layer(inputs) + self.empty.sum().float()


class NarrowWeights(Images):
    """All weights and gradients have 16 bits."""

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)).to(torch.bfloat16)

    def loss(self, model, batch):
        output = model(batch[0].to(torch.bfloat16)).float()
        return functional.cross_entropy(output, batch[1], reduction="sum"), output

    def predict(self, model, batch):
        return model(batch[0].to(torch.bfloat16)).float()


class OddState(Images):
    def model(self):
        return Odd()


class DeepPairs(pair_tasks.Pairs):
    """A loss over the global batch, and blocks, which FSDP gathers in each pass."""

    def model(self):
        model = super().model()
        model.left = nn.Sequential(nn.Linear(10, 7), own_tasks.Block(0.2), own_tasks.Block(), nn.Linear(7, 6))
        return model.to(self.dtype)


def by_hand(settings, steps, virtual_ranks, global_batch, micro, clip_norm):
    """Plain torch: one process, a loop over virtual ranks, gradients added in the tree, buffers of virtual rank 0."""
    task, seed, length = Images(), 0, 100
    torch.manual_seed(seed)
    model, data = task.model(), task.train_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    per_epoch = length // global_batch
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        indices = permute(range(within * global_batch, (within + 1) * global_batch), length, seed, epoch)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        gradients, after = [], {}
        for number in range(virtual_ranks):
            model.load_state_dict(before, strict=False)
            optimizer.zero_grad()
            for turn, plan in enumerate(split_for_rank(indices, epoch, virtual_ranks, micro, number)):
                torch.manual_seed(derive_seed(seed, step, number, turn))
                loss, _ = task.loss(model, [tensor[list(plan.indices)] for tensor in data.tensors])
                (loss / global_batch).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            after = after or {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(after, strict=False)
        while len(gradients) > 1:  # neighbours in pairs; the last one waits if it has no neighbour
            pairs = [gradients[place : place + 2] for place in range(0, len(gradients), 2)]
            gradients = [[sum(one[1:], one[0]) for one in zip(*pair, strict=True)] for pair in pairs]
        for parameter, gradient in zip(model.parameters(), gradients[0], strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return digest(model.state_dict())


def fit(kind, options, settings, run_dir=None):
    """On ranks: the digest of the final weights, and everything logged but times."""
    torch.set_num_threads(1)
    task = getattr(importlib.import_module(kind.module), kind.name)(**options)
    weights, results = runs.fit(task, settings, run_dir)
    return digest(weights), without_times(results)


Kind = collections.namedtuple("Kind", ("module", "name"))
OWN, HERE = "tests.own_tasks", __name__

CASES = {
    "masked": (Kind(OWN, "Masked"), {"dtype": torch.float32, "eval_length": 37}, {"train": {"eval_every_steps": 7}}),
    "two heads, clipped": (Kind(OWN, "TwoHeads"), {"dtype": torch.float32}, {"optim": {"clip_norm": 0.1}}),
    "by length, micro-batches": (Kind(OWN, "WithLengths"), {"dtype": torch.float32}, {"batch": {"micro": 2}}),
    "unused parameters": (
        Kind(OWN, "Unused"),
        {"dtype": torch.float32},
        {"parallel": {"find_unused_parameters": True}},
    ),
    "dropout and statistics": (Kind(HERE, "Images"), {}, {"batch": {"micro": 3}, "data": {"drop_last": True}}),
    "bf16": (
        Kind(HERE, "Images"),
        {},
        {"precision": "bf16", "data": {"drop_last": True}, "train": {"ema_decay": 0.9, "eval_every_steps": 20}},
    ),
    "fp16 with skipped updates": (
        Kind(OWN, "Masked"),
        {"dtype": torch.float32},
        {"precision": "fp16", "optim": {"lr": 9.0}},
    ),
    "loss over the global batch": (Kind("tests.pair_tasks", "Pairs"), {"dropout": 0.2}, {"batch": {"micro": 3}}),
    "blocks, loss over the global batch": (Kind(HERE, "DeepPairs"), {}, {"batch": {"micro": 3}}),
    "players": (Kind("tests.player_tasks", "Adversaries"), {}, {"batch": {"micro": 2}}),
    "unreadable samples": (Kind(OWN, "FromFiles"), {"broken": [3, 4, 20]}, {"data": {"on_error": "skip"}}),
    "weighted sampling": (Kind("tests.sampling_cases", "Sampled"), {"sample_weights": WEIGHTS}, {}),
    "stream": (
        Kind("tests.stream_cases", "Streamed"),
        {},
        {"batch": {"micro": 2}, "data": {"workers": 1}},
    ),
    "unfreezing": (
        Kind(OWN, "Masked"),
        {"dtype": torch.float32},
        {"train": {"unfreeze": [{"match": ["0.*"], "step": 6}]}},
    ),
    "fewer samples than virtual ranks": (
        Kind(OWN, "Masked"),
        {"dtype": torch.float32},
        {"batch": {"global": 4}, "optim": {"name": "SGD"}},
    ),
    "weights of 16 bits": (Kind(HERE, "NarrowWeights"), {}, {"batch": {"micro": 3}, "optim": {"name": "SGD"}}),
    "odd buffers and parameters": (Kind(HERE, "OddState"), {}, {"batch": {"micro": 3}}),
    "few labels": (Kind(OWN, "FewLabels"), {}, {}),
    "blocks": (
        Kind(OWN, "Deep"),
        {"dtype": torch.float32, "dropout": 0.2, "eval_length": 37, "frozen": ["blocks.1"]},
        {"batch": {"micro": 3}, "optim": {"clip_norm": 0.5}, "train": {"ema_decay": 0.9}},
    ),
}


@pytest.mark.cases("masked", "dropout", "bf16", "players", "odd")
@pytest.mark.parametrize("name", CASES)
def test_same_bits_on_any_number_of_ranks(name):
    kind, options, sections = CASES[name]
    sections = sections | {"parallel": sections.get("parallel", {}) | {"virtual_ranks": 6}}
    found = {ranks: run_ranks(ranks, fit, kind, options, runs.config(**sections)) for ranks in (1, 2, 3, 4)}
    assert len({repr(one) for of_ranks in found.values() for one in of_ranks}) == 1, found


NOT_SHARDED = {"unused parameters", "players", "odd buffers and parameters", "weights of 16 bits"}


@pytest.mark.cases("dropout", "blocks")
@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_SHARDED))
def test_fsdp_has_the_bits_of_ddp_on_any_number_of_ranks(name):
    """On four ranks, some have two of the six virtual ranks, and some have one."""
    kind, options, sections = CASES[name]

    def of(ranks, strategy):
        parallel = {"virtual_ranks": 6, "strategy": strategy}
        return run_ranks(ranks, fit, kind, options, runs.config(**(sections | {"parallel": parallel})))

    ways = ((2, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"))
    found = {way: of(*way) for way in ways}
    assert len({repr(one) for of_ranks in found.values() for one in of_ranks}) == 1, found


class Convolved(Images):
    """Images whose weights have a memory format on one rank, and shards of them cannot have it."""

    def model(self):
        layers = nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(80, 5))


def test_a_sharded_run_has_the_same_bits_on_one_rank_and_where_one_rank_has_fewer_virtual_ranks(tmp_path):
    """In a run directory: the first entry of the log counts operations in a pass outside of the steps."""
    parallel = {"virtual_ranks": 4, "strategy": "fsdp"}
    settings = runs.config(batch={"micro": 3}, compute={"channels_last": True}, parallel=parallel)
    kind = Kind(HERE, "Convolved")
    found = [run_ranks(ranks, fit, kind, {}, settings, tmp_path / str(ranks))[0] for ranks in (1, 3)]
    assert found[0][0] == found[1][0]


class Skipping(nn.Module):
    """As a U-Net: the input of a block is used twice in the block, and once after it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 7), nn.Linear(14, 5)
        self.blocks = nn.ModuleList([own_tasks.Block(), own_tasks.Block()])

    def forward(self, inputs):
        early = late = self.first(inputs)
        for block in self.blocks:
            late = block(late)
        return self.last(torch.cat([late, early], dim=1))


class Skips(Images):
    def model(self):
        return Skipping()


def test_a_sharded_run_sums_the_gradients_of_a_block_s_input_in_the_same_order_on_one_rank():
    settings = runs.config(batch={"micro": 3}, parallel={"virtual_ranks": 4, "strategy": "fsdp"})
    found = [run_ranks(ranks, fit, Kind(HERE, "Skips"), {}, settings)[0] for ranks in (1, 2)]
    assert found[0] == found[1]


class UsedAtFirst(Images):
    """After two steps, some virtual ranks do not use a part of the model."""

    def model(self):
        self.calls = 0
        return nn.ModuleDict({"main": nn.Linear(10, 5), "more": nn.Linear(10, 5)})

    def loss(self, model, batch):
        self.calls += 1
        output = model["main"](batch[0])
        if self.calls <= 4 or batch[0][0, 0] > 0:
            output = output + model["more"](batch[0])
        return functional.cross_entropy(output, batch[1], reduction="sum")

    def eval_data(self):
        return None


@pytest.mark.parametrize("virtual_ranks", [None, 4])
def test_fsdp_names_parameters_that_later_batches_do_not_use(virtual_ranks):
    settings = runs.config(parallel={"virtual_ranks": virtual_ranks, "strategy": "fsdp"})
    with pytest.raises(RankFailed, match=r"though they did before: more\.weight, more\.bias"):
        run_ranks(2, fit, Kind(HERE, "UsedAtFirst"), {}, settings)


@pytest.mark.cases("6")
@pytest.mark.parametrize("virtual_ranks", [4, 6])
def test_the_bits_are_those_of_a_loop_over_virtual_ranks_in_plain_torch(virtual_ranks):
    sections = {
        "batch": {"micro": 3},
        "data": {"drop_last": True},
        "optim": {"clip_norm": 0.05, "fused": False},
        "train": {"steps": 9},
    }
    settings = runs.config(**sections, parallel={"virtual_ranks": virtual_ranks})
    ((of_two, results), _) = run_ranks(2, fit, Kind(HERE, "Images"), {}, settings)
    assert results["train/grad_norm"] > 0.05
    assert of_two == by_hand(settings, 9, virtual_ranks, 24, 3, 0.05)


def in_a_loop(counts_units, strategy="ddp"):
    """On ranks: the digest of the weights that a user's own loop trains, whose body draws random numbers."""
    torch.set_num_threads(1)
    with runs.shared_folder() as folder:
        config = {
            "parallel.virtual_ranks": 6,
            "parallel.strategy": strategy,
            "log.writers": ["json_lines"],
            "device": "cpu",
        }
        torch.manual_seed(0)
        task = own_tasks.Masked(dtype=torch.float32)
        model = nn.Sequential(task.model(), nn.BatchNorm1d(5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"global_batch": 24, "steps": 12, "micro_batch": 2, "quiet": True, "run_dir": folder}
        data = task.train_data()
        loop = lockstep.Loop(
            model, optimizer, data, units=task.weight if counts_units else None, config=config, **options
        )
        for step in loop:
            for inputs, targets, mask in step:
                outputs = loop.model(functional.dropout(inputs, 0.2))
                loss = ((outputs - targets).square() * mask).sum()
                if counts_units:
                    step.backward(loss, reduction="sum")
                else:
                    step.backward(loss / mask.sum().clamp(min=1), units=mask.sum())
        weights = runs.whole_weights(loop.model)
        loop.close()
        return digest(weights)


@pytest.mark.cases("False")
@pytest.mark.parametrize("counts_units", [True, False])
def test_a_loop_of_a_user_has_the_same_bits_on_any_number_of_ranks(counts_units):
    found = {ranks: run_ranks(ranks, in_a_loop, counts_units) for ranks in (1, 2, 4)}
    found[2, "fsdp"] = run_ranks(2, in_a_loop, counts_units, "fsdp")
    assert len({one for of_ranks in found.values() for one in of_ranks}) == 1, found


def in_a_loop_on_too_few_ranks():
    with pytest.raises(LockstepError, match="4 ranks do not divide 6 virtual ranks"):
        in_a_loop(False, "fsdp")


def test_fsdp_in_a_loop_needs_a_number_of_ranks_that_divides():
    run_ranks(4, in_a_loop_on_too_few_ranks)


def fit_in_turns(folder, steps, settings):
    """On ranks: train to `steps` in a run directory. The entries of its log, and the digest of the weights."""
    found = fit(
        Kind(HERE, "Images"),
        {},
        runs.config(**settings, train={"steps": steps, "eval_every_steps": 1, "ema_decay": 0.9}),
        folder,
    )[0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return found, [without_times(line) for line in lines]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_that_changes_its_number_of_ranks_has_the_bits_of_one_that_does_not(tmp_path, strategy):
    settings = {
        "batch": {"micro": 3},
        "data": {"drop_last": True},
        "log": {"every_steps": 1},
        "parallel": {"virtual_ranks": 4, "strategy": strategy},
    }
    for ranks, steps in ((4, 5), (3, 9), (1, 10)):
        changed = run_ranks(ranks, fit_in_turns, tmp_path / "changed", steps, settings)[0]
    whole = run_ranks(2, fit_in_turns, tmp_path / "whole", 10, settings)[0]
    assert changed == whole
    if strategy == "fsdp":  # a rank writes the rows that it has
        return
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "checkpoints" / "step-00000010").glob("*")}
        for name in ("changed", "whole")
    ]
    assert {"__0_0.distcp", "__3_0.distcp", "index.json"} < files[0].keys()
    for name in files[0].keys() - {"manifest.json"}:  # it says when the checkpoint was written, and on how many ranks
        assert files[0][name] == files[1][name], name


def test_the_log_begins_with_the_number_of_virtual_ranks(tmp_path):
    run_ranks(2, fit_in_turns, tmp_path / "run", 2, {"parallel": {"virtual_ranks": 4}, "data": {"drop_last": True}})
    assert "4 virtual ranks on 2 ranks" in (tmp_path / "run" / "train.log").read_text().splitlines()[0]


def evaluated(folder):
    """On ranks: the results of a run on its evaluation data, without times; and its predictions, on rank 0."""
    trainer = lockstep.Trainer(config_file.read_run(folder), run_dir=folder, quiet=True)
    results = trainer.evaluate(Images())
    return without_times(results), digest({str(n): one for n, one in enumerate(trainer.predict(Images()))})


def test_more_ranks_than_virtual_ranks_evaluate_and_predict_the_same(tmp_path):
    settings = {"parallel": {"virtual_ranks": 2}, "data": {"drop_last": True}}
    run_ranks(2, fit_in_turns, tmp_path / "run", 3, settings)
    found = [run_ranks(ranks, evaluated, tmp_path / "run")[0] for ranks in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def test_ranks_on_a_cpu_compute_with_one_thread_and_deterministic_kernels(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = config_file.parse(runs.config(parallel={"virtual_ranks": 2}), needs_task=False)
        with assemble.joined(config, tmp_path) as world:
            assert world.virtual_ranks == 2
            assert torch.get_num_threads() == 1
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ranks_on_different_kinds_of_devices_are_refused(monkeypatch):
    config = config_file.parse(runs.config(parallel={"virtual_ranks": 2}), needs_task=False)
    monkeypatch.setattr(World, "broadcast", lambda self, value: ["an abacus", "a slide rule"])
    with pytest.raises(UsageError, match="rank 0: an abacus; rank 1: a slide rule"):
        equal_bits.laid_out(World(0, 1, 0, torch.device("cpu")), config)


def changed_kind(folder):
    """On one rank: the notes of a run that resumes after it was trained on another kind of device."""
    settings = {"parallel": {"virtual_ranks": 2}, "batch": {"micro": 3}, "data": {"drop_last": True}}
    fit_in_turns(folder, 3, settings)
    marker = folder / "environment.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"kind": "an abacus"}))
    fit_in_turns(folder, 5, settings)
    return [line for line in (folder / "train.log").read_text().splitlines() if "abacus" in line]


def test_a_run_that_resumes_on_another_kind_of_device_says_so(tmp_path):
    (note,) = changed_kind(tmp_path / "run")
    assert "trained on an abacus and resumes on" in note


REFUSED = {
    "compute.compile": {"compute": {"compile": "model"}},
    "compute.cudnn_benchmark=true": {"compute": {"cudnn_benchmark": True}},
    "parallel.param_dtype": {"parallel": {"strategy": "fsdp", "param_dtype": "bf16"}},
    "parallel.find_unused_parameters=true": {"parallel": {"strategy": "fsdp", "find_unused_parameters": True}},
    "parallel.shard_ranks": {"parallel": {"strategy": "fsdp", "shard_ranks": 1}},
    "optim.fused=true": {"parallel": {"strategy": "fsdp"}, "optim": {"name": "AdamW", "fused": True}},
    "watch.every": {"watch": {"every": 5}},
    "parallel.tensor=2": {"parallel": {"tensor": 2}},
    "parallel.static_graph=true": {"parallel": {"static_graph": True}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_cannot_have_the_same_bits_are_refused(key):
    sections = REFUSED[key] | {"parallel": REFUSED[key].get("parallel", {}) | {"virtual_ranks": 4}}
    with pytest.raises(UsageError, match=key):
        runs.fit(Images(), runs.config(**sections))


class UsesPart(Images):
    """A layer that only those batches use that have none of the samples at some positions of the first epoch."""

    def __init__(self, positions=(0,)):
        self.positions = positions

    def model(self):
        model = Small()
        model.extra = nn.Linear(10, 5)
        return model

    def train_data(self):
        inputs, labels = super().train_data().tensors
        marked = torch.zeros(100)
        marked[torch.from_numpy(permute(self.positions, 100, 0, 0))] = 1
        return torch.utils.data.TensorDataset(inputs, labels, marked)

    def eval_data(self):
        return super().train_data()

    def loss(self, model, batch):
        output = model(batch[0])
        if not batch[2].any():
            output = output + model.extra(batch[0])
        return functional.cross_entropy(output, batch[1], reduction="sum")


def error_of_part(positions, settings):
    """On ranks: the error of a training."""
    with pytest.raises(LockstepError) as caught:
        runs.fit(UsesPart(positions), settings)
    return str(caught.value)


def settings_of_part(micro=None, **parallel):
    return runs.config(batch={"micro": micro}, data={"drop_last": True}, parallel={"virtual_ranks": 4} | parallel)


def test_a_parameter_that_a_virtual_rank_does_not_use_is_an_error_on_any_number_of_ranks():
    words = "first step: 2 trainable parameters got no gradient on 1 of 4 virtual ranks: extra.weight, extra.bias"
    for ranks in (1, 2, 3):
        assert all(words in error for error in run_ranks(ranks, error_of_part, (0,), settings_of_part()))


def test_a_parameter_that_a_virtual_rank_no_longer_uses_is_an_error_on_any_number_of_ranks():
    words = "no gradient on a virtual rank, though they did before: extra.weight, extra.bias"
    for ranks in (1, 2, 3):  # each rank has such a virtual rank: otherwise it waits for the others until they are gone
        assert all(words in error for error in run_ranks(ranks, error_of_part, range(24, 48, 5), settings_of_part()))


@pytest.mark.parametrize(
    "settings", [settings_of_part(find_unused_parameters=True), settings_of_part(micro=3)], ids=["allowed", "micro"]
)
def test_a_parameter_that_another_virtual_rank_or_micro_batch_uses_trains_with_the_same_bits(settings):
    found = {ranks: run_ranks(ranks, fit, Kind(HERE, "UsesPart"), {}, settings) for ranks in (1, 2, 3)}
    assert len({weights for of_ranks in found.values() for weights, _ in of_ranks}) == 1


def too_many_ranks():
    with pytest.raises(LockstepError, match="3 ranks cannot share 2 virtual ranks"):
        runs.fit(Images(), runs.config(parallel={"virtual_ranks": 2}))


def test_more_ranks_than_virtual_ranks_are_refused():
    run_ranks(3, too_many_ranks)


def test_statistics_over_ranks_are_refused():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Small())
    with pytest.raises(UsageError, match=r"layers\.1"):
        equal_bits.check_model(model, ParallelConfig(virtual_ranks=2))


def test_fsdp_refuses_weights_of_16_bits_whose_shards_are_updated_differently():
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    equal_bits.check_model(model, ParallelConfig(virtual_ranks=2))
    with pytest.raises(UsageError, match="weight, bias"):
        equal_bits.check_model(model, ParallelConfig(virtual_ranks=2, strategy="fsdp"))
