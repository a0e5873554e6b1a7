"""Task shapes and runs that hypothesis makes up, against plain torch.

LOCKSTEP_FUZZ=5000 tries so many cases of each kind instead of the few that the suite has time for, and other ones each time.
A failure prints the smallest case that it found.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests import fuzz_runs
from tests.fuzz_case import Case, Draws, Head, Noise, allowed, smallest_micro_batch

LONG = int(os.environ.get("LOCKSTEP_FUZZ", "0"))


def examples(count):
    """`count` fixed cases, or as many as LOCKSTEP_FUZZ says, new ones. No shrinking: see `fuzz_shrink`."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    return settings(derandomize=not LONG, database=None, deadline=None, max_examples=LONG or count, suppress_health_check=quiet, phases=[Phase.generate])


def lists(of):
    """Cases that share the start of a world; 5 on the average."""
    return st.lists(of, min_size=1, max_size=12)


sources = st.sampled_from(["torch", "numpy", "random", "all"])
rates = st.sampled_from([0.01, 0.05])


@st.composite
def heads(draw):
    """Fields that say what the loss is."""
    named = draw(st.integers(0, 4))
    weighs = draw(st.sampled_from([None, "tensor", "float", "numpy"]))
    own = draw(st.booleans())

    def head(name):
        units = draw(st.sampled_from(["samples", "labels", "fractions"])) if weighs else "samples"
        counted = units != "samples"
        watched = draw(st.sampled_from([False, False, False, True])) if name in ("loss", "c/d") and not own else False
        return Head(
            name=name,
            units=units,
            density=draw(st.sampled_from([1.0, 0.5, 0.1, 0.02, 0.0])) if counted else 1.0,
            coefficient=0.0 if watched else draw(st.sampled_from([None, 3.0, 0.5, 0.0])),
            constant=draw(st.booleans()) if counted else False,
            watched=watched,
        )

    if not named:
        return {"label": head("a"), "weighs": weighs, "own_heads": own}
    # Names in no alphabetical order, so that a sorted order is another one.
    order = draw(st.sampled_from(["same", "rank", "call", "opposite"])) if named > 1 else "same"
    return {"heads": tuple(head(name) for name in ("b", "a", "loss", "c/d")[:named]), "weighs": weighs, "own_heads": own, "order": order}


@st.composite
def data(draw):
    """Fields that say what the samples are, and how they become batches."""
    kind = draw(st.sampled_from(["tensors", "list", "map", "items", "duck", "subset", "subset of tensors", "scaled", "concatenated"]))
    tensors = kind in ("tensors", "scaled", "subset of tensors")
    prepare = draw(st.sampled_from(["default", "class", "instance", "wrapped"]))
    collate = draw(st.sampled_from(["default", "class", "instance", "wrapped"]))
    shapes = ["tuple", "list", "dict", "nested", "namedtuple"] + (["dataclass"] if collate != "default" else [])
    reads = kind in ("map", "items", "duck", "subset", "concatenated")
    how = st.sampled_from(["plainly"] * 4 + ["forked", "derived"])
    sampled = {"how": how, "when": st.sampled_from(["always", "rarely"]), "source": sources, "gauss": st.booleans()}
    places = ([] if prepare == "default" else ["prepare"]) + (["data"] if reads else []) + (["both"] if reads and prepare != "default" else [])
    draws = draw(st.none() | st.builds(Draws, where=st.sampled_from(places), reseeds=st.booleans() if reads else st.just(False), **sampled)) if places else None
    fields = {
        "data": kind,
        "length": draw(st.integers(1, 70)),
        "shape": "tuple" if tensors and prepare == collate == "default" else draw(st.sampled_from(shapes)),
        "leaf": draw(st.sampled_from(["tensor", "numpy"])) if reads else "tensor",
        "lengths": draw(st.sampled_from([None, "list", "int64", "int32"])) if kind in ("map", "items") else None,
        "where": draw(st.booleans()) if reads else False,
        "prepare": prepare,
        "collate": collate,
        "draws": draws,
        "in_place": draw(st.booleans()) if reads and prepare != "default" else False,
        "eval_length": draw(st.integers(1, 30)),
        "on_error": draw(st.sampled_from(["raise", "skip"])),
    }
    if tensors and prepare == "default":
        fields["shape"] = "tuple"  # of what collate is given, which is not what it makes: see `_collate`
    if fields["on_error"] == "skip" and (reads or prepare != "default"):
        fields["broken_in"] = draw(st.sampled_from((["data"] if reads else []) + ([] if prepare == "default" else ["prepare"])))
        least = min(fields["length"], fields["eval_length"])
        broken = draw(st.lists(st.integers(0, fields["length"] - 1), max_size=12, unique=True))
        fields["broken"] = tuple(sorted(broken)) if len([one for one in broken if one < least]) < least else ()
    return fields


@st.composite
def models(draw, world):
    """Fields that say what the model is."""
    blocks = draw(st.integers(0, 2))
    return {
        "calls": draw(st.sampled_from(["forward", "methods", "twice"])),
        "blocks": blocks,
        "tied": draw(st.booleans()) if blocks else False,
        "recompute": draw(st.booleans()) if blocks > 1 else False,
        "norm": draw(st.sampled_from(["none", "frozen", "live"] if world == 1 else ["none", "frozen"])),
        "modal": draw(st.booleans()),
        "returned": draw(st.sampled_from(["train", "eval"])),
        "frozen": draw(st.booleans()),
    }


@st.composite
def trainings(draw, length, world):
    """Fields of a run."""
    global_batch = draw(st.integers(1, 24))
    micro = draw(st.none() | st.integers(1, global_batch))
    fields = {"global_batch": global_batch, "micro": micro}
    if draw(st.booleans()) and draw(st.booleans()):
        fields = {"micro": draw(st.integers(1, 6)), "accumulate": draw(st.integers(1, 3)), "global_batch": 0}
        global_batch = fields["micro"] * fields["accumulate"] * world
    fields["drop_last"] = draw(st.booleans()) if length >= global_batch else False
    fields |= {"epochs": draw(st.integers(1, 2))} if draw(st.booleans()) and length <= 8 * global_batch else {"steps": draw(st.integers(1, 9))}
    stop = Case(length=length, world=world, **fields).stop
    return fields | {
        "seed": draw(st.sampled_from([0, 1, 2, 2**40 + 3])),
        "log_every": draw(st.sampled_from([1, 2, 3, 5])),
        "eval_every": draw(st.sampled_from([0, 1, 2, 4])),
        "optimizer": draw(st.sampled_from(["SGD", "momentum", "AdamW"])),
        "lr": draw(rates),
        "lr_scaling": draw(st.sampled_from(["none", "linear", "sqrt"])),
        "weight_decay": draw(st.sampled_from([None, 0.1])),
        "group_lr": draw(st.sampled_from([None, 0.02])),
        "clip_norm": draw(st.sampled_from([None, 0.1, 100.0])),
        "schedule": draw(st.sampled_from(["constant", "linear", "cosine", "step"])),
        "warmup": draw(st.integers(0, max(0, stop // 2))),
        "end_factor": draw(st.sampled_from([0.0, 0.2])),
        "ema": draw(st.sampled_from([None, 0.9])),
        "resume_at": draw(st.sampled_from([0, 0, 0, draw(st.integers(0, stop - 1))])),
        "afterwards": draw(st.sampled_from([None, None, "evaluate", "predict"])),
        "workers": draw(st.sampled_from([0] * 9 + [1])),
        "unfreeze": draw(st.sampled_from(["inner.*", "blocks.*", "out.1.*"])),
        **draw(st.sampled_from([{}, {"unfreeze_step": 2}, {"unfreeze_epoch": 1}, {"unfreeze_epoch": 0.5}])),
    }


@st.composite
def cases(draw, world=1):
    """A whole case; what cannot be compared with plain torch, or is refused with a reason, is put right."""
    case = Case(world=world, **draw(heads()), **draw(models(world)))
    case = dataclasses.replace(case, **draw(data()))
    case = dataclasses.replace(case, **draw(trainings(case.length, world)))
    strategies = {1: ["ddp", "single", "fsdp"], 2: ["ddp", "fsdp"], 3: ["ddp"]}
    case = dataclasses.replace(case, strategy=draw(st.sampled_from(strategies[world])))
    if world > 1 and case.strategy == "ddp":
        case = dataclasses.replace(case, bucket_mb=draw(st.sampled_from([None, 0.0001])), gradient_views=draw(st.booleans()))
    if case.resume_at:
        elsewhere = draw(st.sampled_from([0, 0, 1, 2, 3])) if world > 1 else 0
        then = {"resume_world": elsewhere, "resume_strategy": draw(st.sampled_from(strategies[elsewhere or world]))}
        case = dataclasses.replace(case, **then, resume_micro=draw(st.none() | st.integers(1, case.global_batch)) if not case.accumulate else None)
    return allowed(case)


@given(cases())
@examples(40)
def test_a_case_on_one_rank_is_plain_torch(case):
    fuzz_runs.check("plain", [case])


@pytest.mark.parametrize("world", [2, 3])
@given(options=st.data())
@examples(3)
def test_cases_on_ranks_are_plain_torch(world, options):
    fuzz_runs.check("plain", options.draw(lists(cases(world))))


@st.composite
def noisy(draw, world=1):
    """A case with random numbers in batches, which no plain torch draws alike; it is resumed, and logs each step."""
    case = draw(cases(world))
    noise = st.builds(Noise, place=st.sampled_from(["loss", "collate", "model"]), source=sources, gauss=st.booleans())
    collate = "class" if case.collate == "default" else case.collate
    case = dataclasses.replace(case, noise=tuple(draw(st.lists(noise, min_size=1, max_size=3))), collate=collate, log_every=1)
    again = {"resume_at": draw(st.integers(1, 2)), "resume_world": 0, "resume_strategy": None, "resume_micro": None}
    if draw(st.booleans()):  # nothing in these takes a random number, so that nothing leaves a generator in a known state
        case = dataclasses.replace(case, data="tensors", shape="tuple", prepare="default", draws=None, broken=(), lengths=None, in_place=False)
    case = dataclasses.replace(case, steps=max(case.steps, 3), epochs=0, warmup=0, afterwards=None, **again)
    norms = ["none", "frozen"] + (["live"] if smallest_micro_batch(case) > 1 and not case.broken else [])
    return dataclasses.replace(case, norm=draw(st.sampled_from(norms)))


@given(noisy())
@examples(20)
def test_random_numbers_in_batches_survive_a_stop(case):
    fuzz_runs.check("resumed", [case])


@given(options=st.data())
@examples(2)
def test_random_numbers_in_batches_survive_a_stop_of_two_ranks(options):
    fuzz_runs.check("resumed", options.draw(lists(noisy(2))))


@given(noisy())
@examples(6)
def test_random_numbers_in_batches_are_the_same_in_workers(case):
    fuzz_runs.check("workers", [case])
