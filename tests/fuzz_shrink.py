"""From a case that fails to a small one that fails alike: hypothesis would take thousands of trainings for it."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz_case import Case, allowed, smallest_micro_batch

PATIENCE_S = 60.0


def smallest(
    kind: str, case: Case, text: str, failure: Callable[[Case], str | None], patience_s: float = PATIENCE_S
) -> tuple[Case, str]:
    """A smaller case whose failure reads like `text`, and how that reads; the case itself where none is found in time.

    Args:
        failure: what a case fails with, None where it does not.
    """
    deadline = time.monotonic() + patience_s
    before = None
    while case != before:
        before = case
        for field in dataclasses.fields(case):
            for simpler in variants(case, field):
                if time.monotonic() > deadline:
                    return case, text
                simpler_text = failure(simpler) if valid(kind, simpler) else None
                if simpler_text is not None and gist(simpler_text) == gist(text):
                    case, text = simpler, simpler_text
                    break
    return case, text


def gist(text: str) -> str:
    """What kind of failure it is: its first words, without numbers, ranks, steps and names of heads."""
    plain = re.sub(r"rank \d+: |resumed: |step \d+: |\{.*|/loss/\S+", "", text, flags=re.DOTALL)
    return re.sub(r"\d\S*", "", plain)[:40]


def variants(value: Any, *fields: Any) -> Iterator[Any]:
    """A dataclass with one of its fields (all, where none is given) simpler, the simplest first."""
    for field in fields or dataclasses.fields(value):
        before = getattr(value, field.name)
        for simpler in simplified(before, field.default):
            if simpler != before:
                yield dataclasses.replace(value, **{field.name: simpler})


def simplified(value: Any, default: Any) -> Iterator[Any]:
    """The default, smaller numbers, shorter tuples, simpler members."""
    yield default
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (number for number in (1, 2, value // 2, value - 1) if min(1, default or 0) <= number < value)
    elif isinstance(value, tuple):
        yield from (value[:place] + value[place + 1 :] for place in range(len(value)))
        for place, member in enumerate(value):
            others = variants(member) if dataclasses.is_dataclass(member) else simplified(member, 0)
            yield from ((*value[:place], other, *value[place + 1 :]) for other in others)
    elif dataclasses.is_dataclass(value):
        yield from variants(value)


def valid(kind: str, case: Case) -> bool:
    """Whether `case` is one that the tests may make up."""
    counted = any(head.units != "samples" for head in case.all_heads)
    tensors = case.data in ("tensors", "scaled", "subset of tensors")
    sizes = (
        case.length,
        case.eval_length,
        case.micro or 1,
        case.micro or not case.accumulate,
        case.resume_micro or 1,
        case.steps,
    )
    if min(sizes) < 1 or case.samples_per_step < 1:
        return False
    faults = [
        not case.accumulate and max(case.micro or 1, case.resume_micro or 1) > case.global_batch,
        case.drop_last and case.length < case.samples_per_step,
        case.resume_at >= max(1, case.stop) or (kind == "resumed" and not case.resume_at),
        kind != "plain" and not case.noise,
        counted and case.weighs is None,
        any(head.watched and (head.coefficient != 0.0 or case.own_heads) for head in case.heads),
        len({head.name for head in case.heads}) < len(case.heads) or all(head.watched for head in case.all_heads),
        bool(case.broken) and (case.on_error != "skip" or len(set(case.broken)) < len(case.broken)),
        len([one for one in case.broken if one < min(case.length, case.eval_length)])
        >= min(case.length, case.eval_length),
        bool(case.broken) and case.broken_in == "data" and (tensors or case.data == "list"),
        bool(case.broken) and case.broken_in == "prepare" and case.prepare == "default",
        tensors and case.prepare == "default" and case.shape != "tuple",
        case.shape == "dataclass" and case.collate == "default",
        case.draws is not None and case.prepare == "default" and case.draws.where != "data",
        case.draws is not None and case.draws.where != "prepare" and (tensors or case.data == "list"),
        (case.tied and not case.blocks) or (case.recompute and case.blocks < 2),
        case.strategy == "fsdp" and case.world > 2,
    ]
    if any(faults):
        return False
    if kind != "plain" and case.norm == "live":
        return smallest_micro_batch(case) > 1 and not case.broken
    return allowed(case) == case
