"""The task that a `Case` describes."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn

from lockstep import Task
from tests.fuzz_case import Case
from tests.fuzz_data import FEATURES, data_set, drawn_for, fail, numbers, pack, unpack


class Net(nn.Module):
    """A few dozen parameters, none of them 0 at first."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        heads = len(case.all_heads)
        self.case = case
        self.inner = nn.Linear(FEATURES, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(case.blocks))
        self.norm = nn.BatchNorm1d(4) if case.norm != "none" else nn.Identity()
        self.out = nn.ModuleList(nn.Linear(4, 1) for _ in range(heads)) if case.own_heads else nn.Linear(4, heads)
        if case.tied:
            self.blocks[0][0].weight = self.inner.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        if case.norm != "none":
            self.norm.running_mean.fill_(0.2)
            self.norm.running_var.fill_(1.7)
        self.inner.requires_grad_(not case.frozen)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.case.norm == "frozen":
            self.norm.eval()
        return self

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.norm(hidden)
        if self.case.modal and self.training:
            hidden = hidden * 1.25
        for noise in self.case.noise:
            if noise.place == "model" and self.training:
                hidden = hidden * (1 + 0.1 * numbers(noise.source, noise.gauss))
        return hidden

    def head(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        return self.out[number](hidden)[:, 0] if self.case.own_heads else self.out(hidden)[:, number]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        return torch.stack([self.head(hidden, number) for number in range(len(self.case.all_heads))], 1)


class FuzzTask(Task):
    """What a `Case` describes, with the default `prepare` and `collate`."""

    def __init__(self, case: Case) -> None:
        self.case, self.calls = case, 0
        for name, own in (("prepare", _prepare), ("collate", _collate)):
            if getattr(case, name) == "instance":
                setattr(self, name, functools.partial(own, case))
            elif getattr(case, name) == "wrapped":
                before = getattr(self, name)
                setattr(self, name, functools.wraps(before)(lambda *given, own=own: own(case, *given)))

    def model(self) -> Net:
        self.built = Net(self.case).double().train(self.case.returned == "train")
        return self.built

    def train_data(self) -> Any:
        return data_set(self.case, self.case.length, seed=1)

    def eval_data(self) -> Any:
        return data_set(self.case, self.case.eval_length, seed=2)

    @property
    def coefficients(self) -> dict[str, float]:  # type: ignore[override]
        return {head.name: head.coefficient for head in self.case.all_heads if head.coefficient is not None}

    def weight(self, batch: Any) -> Any:
        if self.case.weighs is None:
            return None
        _, _, valid = unpack(batch)
        kind = {"tensor": lambda count: count, "float": float, "numpy": lambda count: count.numpy()[()]}[
            self.case.weighs
        ]
        counts = {}
        for number, head in enumerate(self.case.all_heads):
            labels = valid[:, number]
            kinds = {"samples": torch.ones_like(labels), "labels": labels > 0, "fractions": labels}
            counts[head.name] = kind(kinds[head.units].sum())
        return self.ordered(counts, reverse=self.case.order == "opposite") if self.case.heads else counts["loss"]

    def loss(self, model: Net, batch: Any) -> Any:
        x, y, valid = unpack(batch)
        for noise in self.case.noise:
            if noise.place == "loss":
                x = x * (1 + 0.1 * numbers(noise.source, noise.gauss))
        hidden = model.hidden(x) if self.case.calls == "methods" else None
        outputs = None if self.case.calls == "methods" else model(x)
        if self.case.calls == "twice":
            outputs = outputs + 0.5 * model(-x)
        losses = {}
        for number, head in enumerate(self.case.all_heads):
            weights = torch.ones_like(y[:, number]) if head.units == "samples" else valid[:, number]
            if head.constant and not weights.sum():
                losses[head.name] = torch.zeros((), dtype=torch.float64)
                continue
            output = model.head(hidden, number) if outputs is None else outputs[:, number]
            losses[head.name] = ((output - y[:, number]).square() * weights).sum()
            if head.watched:
                losses[head.name] = losses[head.name].detach()
        return self.ordered(losses) if self.case.heads else losses["loss"]

    def predict(self, model: Net, batch: Any) -> Any:
        x, _, _ = unpack(batch)
        outputs = model(x)
        return {"outputs": outputs, "more": (outputs.sum(1), x[:, -1])}

    def ordered(self, by_head: dict[str, Any], reverse: bool = False) -> dict[str, Any]:
        """In the order of the case."""
        self.calls += 1
        if self.case.order == "rank":
            reverse = int(os.environ.get("RANK", "0")) % 2 == 1
        elif self.case.order == "call":
            reverse = self.calls % 2 == 1
        return dict(reversed(by_head.items())) if reverse else by_head


def _prepare(case: Case, sample: Any, epoch: int, training: bool) -> Any:
    x, y, valid = unpack(sample)
    index = round(float(x[-1]) * 100)
    factor = 1 + 0.1 * epoch if training else 0.9
    if case.in_place:
        x *= factor
    else:
        x = x * factor
    x = x + drawn_for(case.draws, "prepare", index)
    if case.broken_in == "prepare":
        fail(case, index)
    return pack(case.shape, x, y, valid)


def _collate(case: Case, samples: list[Any]) -> Any:
    x, y, valid = (
        torch.stack([torch.as_tensor(one) for one in parts]) for parts in zip(*map(unpack, samples), strict=True)
    )
    for noise in case.noise:
        if noise.place == "collate":
            x = x * (1 + 0.1 * numbers(noise.source, noise.gauss))
    return pack(case.shape, x + 0.25, y, valid)


class _Prepares(FuzzTask):
    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        return _prepare(self.case, super().prepare(sample, epoch, training), epoch, training)


class _Collates(FuzzTask):
    def collate(self, samples: list[Any]) -> Any:
        return _collate(self.case, samples)


class _PreparesAndCollates(_Prepares, _Collates):
    pass


def task_of(case: Case) -> FuzzTask:
    """The task of a case; its class has the methods that the case overrides in the class."""
    kinds = {
        (False, False): FuzzTask,
        (True, False): _Prepares,
        (False, True): _Collates,
        (True, True): _PreparesAndCollates,
    }
    return kinds[case.prepare == "class", case.collate == "class"](case)
