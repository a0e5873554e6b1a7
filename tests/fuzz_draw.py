"""Makes up cases."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.fuzz_case import Case, Draws, Head, Noise, allowed, smallest_micro_batch

SOURCES = ["torch", "numpy", "random", "all"]
STRATEGIES = {1: ["ddp", "single", "fsdp"], 2: ["ddp", "fsdp"], 3: ["ddp"]}
READING = ("map", "items", "duck", "subset", "concatenated")  # data sets of our own, which draw, fail and know lengths
TENSORS = ("tensors", "scaled", "subset of tensors")

Fields = dict[str, Any]


class Maker:
    """Cases that `seed` alone determines."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pick, self.number = self.random.choice, self.random.randint

    def chance(self, share: float = 0.5) -> bool:
        """True with this probability."""
        return self.random.random() < share

    def case(self, world: int = 1) -> Case:
        """A case that can be compared with plain torch."""
        case = Case(world=world, **self.heads(), **self.model(world), **self.data())
        case = dataclasses.replace(case, **self.training(case.length, world), strategy=self.pick(STRATEGIES[world]))
        if world > 1 and case.strategy == "ddp":
            case = dataclasses.replace(case, bucket_mb=self.pick([None, 0.0001]), gradient_views=self.chance())
        if case.stop > 1 and self.chance(0.25):
            elsewhere = self.pick([0, 0, 1, 2, 3]) if world > 1 else 0
            then: Fields = {"resume_at": self.number(1, case.stop - 1), "resume_world": elsewhere}
            then["resume_strategy"] = self.pick(STRATEGIES[elsewhere or world])
            then["resume_micro"] = self.number(1, case.global_batch) if not case.accumulate and self.chance() else None
            case = dataclasses.replace(case, **then)
        return allowed(case)

    def noisy(self, world: int = 1) -> Case:
        """A case with random numbers in its batches, which plain torch would draw otherwise. It is resumed."""
        case = self.case(world)
        places = [
            Noise(self.pick(["loss", "collate", "model"]), self.pick(SOURCES), self.chance())
            for _ in range(self.number(1, 3))
        ]
        collate = "class" if case.collate == "default" else case.collate
        again = {"resume_at": self.number(1, 2), "resume_world": 0, "resume_strategy": None, "resume_micro": None}
        case = dataclasses.replace(case, noise=tuple(places), collate=collate, log_every=1, afterwards=None, **again)
        if self.chance():  # nothing in these takes a random number, so that nothing leaves a generator in a known state
            case = dataclasses.replace(
                case,
                data="tensors",
                shape="tuple",
                prepare="default",
                draws=None,
                broken=(),
                lengths=None,
                in_place=False,
            )
        case = dataclasses.replace(case, steps=max(case.steps, 3), epochs=0, warmup=0)
        norms = ["none", "frozen"] + (["live"] if smallest_micro_batch(case) > 1 and not case.broken else [])
        return dataclasses.replace(case, norm=self.pick(norms))

    def heads(self) -> Fields:
        """What the loss is."""
        named, own = self.number(0, 4), self.chance()
        weighs = self.pick([None, "tensor", "float", "numpy"])
        # Names in no alphabetical order, so that a sorted order is another one.
        heads = tuple(self.head(name, weighs, own) for name in ("b", "a", "loss", "c/d")[:named])
        order = self.pick(["same", "rank", "call", "opposite"]) if named > 1 else "same"
        return {
            "heads": heads,
            "label": Head() if named else self.head("a", weighs, own),
            "weighs": weighs,
            "own_heads": own,
            "order": order,
        }

    def head(self, name: str, weighs: str | None, own: bool) -> Head:
        """One loss; the third and fourth may be there to be looked at alone."""
        units = self.pick(["samples", "labels", "fractions"]) if weighs else "samples"
        watched = name in ("loss", "c/d") and not own and self.chance(0.25)
        counted = units != "samples"
        return Head(
            name=name,
            units=units,
            density=self.pick([1.0, 0.5, 0.1, 0.02, 0.0]) if counted else 1.0,
            coefficient=0.0 if watched else self.pick([None, None, 3.0, 0.5, 0.0]),
            constant=counted and self.chance(),
            watched=watched,
        )

    def data(self) -> Fields:
        """What the samples are, and how they become batches."""
        kind = self.pick(["tensors", "list", *READING, "scaled", "subset of tensors"])
        prepare, collate = (
            self.pick(["default", "class", "instance", "wrapped"]),
            self.pick(["default", "class", "instance", "wrapped"]),
        )
        reads, prepares = kind in READING, prepare != "default"
        shapes = ["tuple", "list", "dict", "nested", "namedtuple"] + (["dataclass"] if collate != "default" else [])
        fields: Fields = {
            "data": kind,
            "length": self.number(1, 70),
            "shape": "tuple" if kind in TENSORS and not prepares else self.pick(shapes),
            "leaf": self.pick(["tensor", "numpy"]) if reads else "tensor",
            "lengths": self.pick([None, "list", "int64", "int32"]) if kind in ("map", "items") else None,
            "where": reads and self.chance(),
            "prepare": prepare,
            "collate": collate,
            "draws": self.draws(reads, prepares),
            "in_place": reads and prepares and self.chance(),
            "eval_length": self.number(1, 30),
            "on_error": self.pick(["raise", "skip"]),
        }
        if fields["on_error"] == "skip" and (reads or prepares) and self.chance(0.7):
            least = min(fields["length"], fields["eval_length"])
            broken = self.random.sample(range(fields["length"]), min(self.number(1, 12), fields["length"]))
            if sum(one < least for one in broken) < least:
                where = "data" if not prepares else self.pick(["data", "prepare"]) if reads else "prepare"
                fields |= {"broken": tuple(sorted(broken)), "broken_in": where}
        return fields

    def draws(self, reads: bool, prepares: bool) -> Draws | None:
        """What random numbers samples take, if any."""
        places = ["data"] * reads + ["prepare"] * prepares + ["both"] * (reads and prepares)
        if not places or self.chance(0.3):
            return None
        how = self.pick(["plainly", "plainly", "plainly", "plainly", "forked", "derived"])
        when, source = self.pick(["always", "rarely"]), self.pick(SOURCES)
        return Draws(when, source, self.chance(), self.pick(places), how, reseeds=reads and self.chance(0.3))

    def model(self, world: int) -> Fields:
        """What the model is."""
        blocks = self.number(0, 2)
        return {
            "calls": self.pick(["forward", "methods", "twice"]),
            "blocks": blocks,
            "tied": blocks > 0 and self.chance(),
            "recompute": blocks > 1 and self.chance(),
            "norm": self.pick(["none", "frozen", "live"] if world == 1 else ["none", "frozen"]),
            "modal": self.chance(),
            "returned": self.pick(["train", "eval"]),
            "frozen": self.chance(0.3),
        }

    def training(self, length: int, world: int) -> Fields:
        """How it is trained."""
        size = self.number(1, 24)
        fields: Fields = {"global_batch": size, "micro": self.number(1, size) if self.chance() else None}
        if self.chance(0.25):
            fields = {"micro": self.number(1, 6), "accumulate": self.number(1, 3), "global_batch": 0}
            size = fields["micro"] * fields["accumulate"] * world
        fields["drop_last"] = length >= size and self.chance()
        fields |= (
            {"epochs": self.number(1, 2)} if length <= 8 * size and self.chance() else {"steps": self.number(1, 9)}
        )
        stop = Case(length=length, world=world, **fields).stop
        return fields | {
            "seed": self.pick([0, 1, 2, 2**40 + 3]),
            "log_every": self.pick([1, 2, 3, 5]),
            "eval_every": self.pick([0, 1, 2, 4]),
            "optimizer": self.pick(["SGD", "momentum", "AdamW"]),
            "lr": self.pick([0.01, 0.05]),
            "lr_scaling": self.pick(["none", "linear", "sqrt"]),
            "weight_decay": self.pick([None, 0.1]),
            "group_lr": self.pick([None, 0.02]),
            "clip_norm": self.pick([None, 0.1, 100.0]),
            "schedule": self.pick(["constant", "linear", "cosine", "step"]),
            "warmup": self.number(0, stop // 2),
            "end_factor": self.pick([0.0, 0.2]),
            "ema": self.pick([None, 0.9]),
            "afterwards": self.pick([None, None, None, "evaluate", "predict"]),
            "workers": int(self.chance(0.05)),
            "unfreeze": self.pick(["inner.*", "blocks.*", "out.1.*"]),
            **self.pick([{}, {}, {"unfreeze_step": 2}, {"unfreeze_epoch": 1}, {"unfreeze_epoch": 0.5}]),
        }
