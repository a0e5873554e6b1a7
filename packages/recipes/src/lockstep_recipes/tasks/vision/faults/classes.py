"""Labels of whole images: rare classes, and labels that the form of the file gives away."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.vision.faults.view import ImageFacts, ImageView

_ENOUGH = 5
"""Files of each form, and of each class, for a judgement."""
_PURE = 0.98
_MIXED = 0.8


def rare_class(data: ImageView) -> Iterator[DataFinding]:
    """Classes with one training image, and classes that only the evaluation has."""
    splits = [(split, split.labels) for split in data.splits if split.labels is not None]
    if not splits or splits[0][0].name != "training":
        return
    (training, labels), *others = splits
    counts = training.class_counts
    assert counts is not None
    for number in np.flatnonzero(counts == 1).tolist() if len(training) > len(training.classes) else ():
        file, name = training.pictures.where(int(np.argmax(labels == number))), training.classes[number]
        remedy = "add images of this class, join it with a similar one, or remove it. Is its name misspelt?"
        yield DataFinding("warning", "one-sample", file, f"the only training image of class {name!r}", remedy)
    trained = {training.classes[number] for number in np.flatnonzero(counts).tolist()}
    for split, labels in others:
        numbers, places = np.unique(labels, return_index=True)
        for number, first in zip(numbers.tolist(), places.tolist(), strict=True):
            if number >= 0 and (name := split.classes[number]) not in trained:
                what, file = f"class {name!r} has evaluation images, but no training image", split.pictures.where(first)
                yield DataFinding("error", "never-trained", file, what, "train with images of this class")


def given_away(data: ImageView) -> Iterator[DataFinding]:
    """Labels that follow the format, mode, size or colour of the files: a model may learn these instead."""
    forms: dict[str, Callable[[ImageFacts], object]] = {
        "format": lambda one: one.format,
        "mode": lambda one: one.mode,
        "size": lambda one: f"{one.size[1]}x{one.size[0]}",
        "colour": lambda one: "grey" if one.is_grey else "in colour",
    }
    for split in data.splits[:1]:
        labelled = [(one, split.class_of(one.index)) for one in split.facts if one.error is None]
        for what, form in forms.items():
            by_form: dict[object, Counter[str]] = defaultdict(Counter)
            for one, label in labelled:
                if label is None:
                    return
                by_form[form(one)][label] += 1
            if own := _own_form(by_form):
                value, name = own
                said = f"all {by_form[value][name]:,} images of class {name!r}, and no others, are {value} ({what})"
                remedy = "save all classes in the same way: a model may learn the difference of the files"
                file, count = labelled[0][0].file, by_form[value][name]
                yield DataFinding("warning", "label-in-file", file, said, remedy, count=count)
                return
            often = {value: counts for value, counts in by_form.items() if counts.total() >= _ENOUGH}
            covered = sum(counts.total() for counts in often.values())
            if len(often) < 2 or covered < 0.9 * len(labelled):
                continue
            right = sum(max(counts.values()) for counts in often.values())
            most = max(sum(often.values(), Counter()).values())
            if right >= _PURE * covered and most <= _MIXED * covered:
                shown = "; ".join(
                    f"{value}: {counts.most_common(1)[0][0]}" for value, counts in list(often.items())[:4]
                )
                said = f"the {what} of the files gives the class away ({right / covered:.0%} of {covered:,}): {shown}"
                remedy = "save all classes in the same way: a model may learn the difference of the files"
                file = labelled[0][0].file
                yield DataFinding("warning", "label-in-file", file, said, remedy, count=covered)


def _own_form(by_form: dict[object, Counter[str]]) -> tuple[object, str] | None:
    """A form that all files of a class have, and no others, in data of several classes. None: there is none."""
    totals = sum(by_form.values(), Counter[str]())
    for value, counts in by_form.items():
        label, count = counts.most_common(1)[0]
        others = totals.total() - totals[label]
        if len(totals) > 2 and len(counts) == 1 and count == totals[label] >= _ENOUGH <= others:
            return value, label
    return None
