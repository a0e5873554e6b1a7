"""Settings of a `Loop`: what each key of the config does there, streams, dict batches, other numbers of ranks."""

import copy

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lockstep
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.trainer.test_user_loop import loop_of, masked_body

CONFIG = {"log.writers": ["json_lines"], "device": "cpu"}


def part_of_the_run(folder, strategy, stop):
    loop = loop_of(own_tasks.Masked(), folder, micro_batch=7, strategy=strategy)
    masked_body(loop, stop=stop)
    weights = runs.whole_weights(loop.model)
    loop.close()
    return weights


def test_a_loop_resumes_on_other_numbers_of_ranks_and_with_fsdp(tmp_path):
    expected, _ = runs.by_hand(own_tasks.Masked())
    for world, strategy, stop in ((2, "fsdp", 6), (3, "fsdp", 12), (1, "ddp", None)):
        weights = run_ranks(world, part_of_the_run, tmp_path, strategy, stop)[0]
    assert runs.difference(weights, expected) < 1e-10


def training(folder, data, config=None, **options):
    """A loop over `data`, and its model in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"global_batch": 8, "epochs": 2, "run_dir": folder, "quiet": True} | options
    return lockstep.Loop(model, optimizer, data, config=CONFIG | (config or {}), **options)


def points():
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(24, width, dtype=torch.float64, generator=drawn) for width in (3, 1)]


def error(loop, batch):
    inputs, targets = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return (loop.model(inputs) - targets).square().mean()


def trained(loop):
    """The weights after each step."""
    seen = []
    for step in loop:
        for batch in step:
            step.backward(error(loop, batch))
        seen.append(copy.deepcopy(loop.model.state_dict()))
    loop.close()
    return seen


def test_batches_that_are_dicts_train_as_pairs_do(tmp_path):
    inputs, targets = points()
    named = [{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)]
    by_kind = [training(tmp_path / str(kind), data) for kind, data in enumerate((named, (inputs, targets)))]
    one, other = (trained(loop)[-1] for loop in by_kind)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_averages_of_the_weights_are_those_of_torch_and_are_saved(tmp_path):
    loop = training(tmp_path / "run", TensorDataset(*points()), {"train.ema_decay": 0.5})
    expected = {name: value.detach().clone() for name, value in loop.model.state_dict().items()}
    for step in loop:
        for batch in step:
            step.backward(error(loop, batch))
        decay = min(0.5, (1 + step.number) / (10 + step.number))
        for name, value in loop.model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value
    loop.save(tmp_path / "model.pt")
    loop.close()
    saved = torch.load(tmp_path / "model.pt")
    assert all(torch.allclose(saved[name], expected[name], rtol=0, atol=1e-12) for name in expected)
    assert not torch.equal(saved["0.weight"], loop.model.state_dict()["0.weight"])


def test_parameters_that_are_frozen_for_an_epoch_train_afterwards(tmp_path):
    config = {"train.unfreeze": [{"epoch": 1, "match": ["0.*"]}]}
    loop = training(tmp_path, TensorDataset(*points()), config)
    first = copy.deepcopy(loop.model.state_dict())
    seen = trained(loop)
    changed = [{name for name in first if not torch.equal(first[name], weights[name])} for weights in seen]
    assert changed[:3] == [{"2.weight", "2.bias"}] * 3
    assert changed[3] == set(first)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(list(zip(*points(), strict=True)))


def seen_of_a_stream(folder, stop):
    loop, seen = training(folder, lockstep.Stream(Numbers(), length=24), epochs=None, steps=5), []
    for step in loop:
        for inputs, targets in step:
            seen += inputs[:, 0].tolist()
            step.backward((loop.model(inputs) - targets).square().mean())
        if step.number == stop:
            break
    loop.close()
    return seen


def test_a_loop_over_a_stream_resumes_behind_the_samples_that_it_had(tmp_path):
    whole = seen_of_a_stream(tmp_path / "whole", None)
    assert len(whole) == 40
    assert whole[:24] == points()[0][:, 0].tolist()
    assert seen_of_a_stream(tmp_path / "cut", 2) + seen_of_a_stream(tmp_path / "cut", None) == whole
