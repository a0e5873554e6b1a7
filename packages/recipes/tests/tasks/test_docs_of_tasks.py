"""The examples of the pages on tasks do what the pages say of them."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.core.errors import UsageError
from tests import own_tasks, runs
from tests.processes import ROOT

DOCS = ROOT / "docs"
PAGE = "".join((DOCS / f"{name}.md").read_text() for name in ("tasks", "task_data", "task_reference"))


def example(name):
    """What the block of the page defines in which this name is defined."""
    (block,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if re.search(rf"^(class|def) {name}\b", text, re.MULTILINE)
    ]
    space = {
        "lockstep": lockstep,
        "torch": torch,
        "nn": nn,
        "np": np,
        "cross_entropy": cross_entropy,
        "Dataset": Dataset,
        "TensorDataset": TensorDataset,
    }
    exec(block, space)
    return space


def test_the_page_opens_with_the_code_of_its_example():
    opened = (DOCS / "tasks.md").read_text().split("```python\n")[1].split("```")[0]
    assert (DOCS.parent / "examples" / "digits_task.py").read_text().endswith(opened)


def test_a_sample_is_augmented_in_training_only():
    class Whole(example("Rotated")["Rotated"]):
        model = loss = None

    task = Whole()
    torch.manual_seed(0)
    image, label = task.train_data()[0]
    assert torch.equal(task.prepare((image, label), 0, False)[0], image)
    turned = [task.prepare((image, label), 0, True) for _ in range(20)]
    assert len({one.numpy().tobytes() for one, _ in turned}) == 4
    assert all(torch.equal(one, label) for _, one in turned)


def test_class_weights_give_the_weighted_mean_of_the_whole_batch():
    weighted = example("Weighted")["Weighted"]
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(24) % 7 // 3  # 12 of class 0, 9 of class 1, 3 of class 2, unevenly over micro-batches

    by_class = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    assert torch.equal(weighted.weights, by_class.float())

    class Mine(weighted):
        weights = by_class

        def model(self):
            return nn.Linear(4, 3, dtype=torch.float64)

        def train_data(self):
            return TensorDataset(inputs, labels)

    settings = runs.config(batch={"global": 24, "micro": 5}, train={"steps": 3}, optim={"name": "SGD", "lr": 0.5})
    settings["optim"]["weight_decay"] = 0.0
    trained, _ = runs.fit(Mine(), settings)
    torch.manual_seed(0)
    model = Mine().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels, weight=by_class)
        loss.backward()
        optimizer.step()
    assert torch.allclose(trained["weight"], model.weight, rtol=1e-12, atol=0)


def test_an_adversary_is_trained_against_with_one_optimizer():
    space = example("Reversed")
    task = space["Adversarial"]()
    model, batch = task.model(), [torch.stack(column) for column in zip(*list(task.train_data())[:50], strict=True)]
    losses = task.loss(model, batch)
    of_adversary = torch.autograd.grad(losses["domain"], model["features"].weight, retain_graph=True)[0]
    inputs, _, domains = batch
    plain = cross_entropy(model["domain"](model["features"](inputs).relu()), domains, reduction="sum")
    assert torch.equal(of_adversary, -torch.autograd.grad(plain, model["features"].weight, retain_graph=True)[0])
    assert torch.equal(*(torch.autograd.grad(loss, model["domain"].weight)[0] for loss in (losses["domain"], plain)))
    _, results = runs.fit(task, runs.config(train={"steps": 2}, log={"every_steps": 1}))
    heads = results["train/loss/label"] + 0.1 * results["train/loss/domain"]
    assert results["train/loss"] == pytest.approx(heads, rel=1e-6)


def test_a_stream_is_refused_and_the_error_says_what_to_do():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Mine(own_tasks.Plain):
        def train_data(self):
            return Stream()

    with pytest.raises(
        UsageError,
        match=r"IterableDataset.*(?s:.*)return lockstep.Stream\(data\).*`lockstep shards FILE.py:FUNCTION OUT`",
    ):
        runs.fit(Mine(), runs.config())
