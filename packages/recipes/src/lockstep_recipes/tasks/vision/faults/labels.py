"""Labels and class names of images that cannot be what they seem."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.tasks.text.faults import labels
from lockstep_recipes.tasks.vision.faults.view import ImageView


def counts(data: ImageView) -> Iterator[DataFinding]:
    """Labels that are nearly all different, or nearly all the same."""
    for split in data.splits[:1]:
        if (numbers := split.class_counts) is not None:
            yield from labels.of_counts(dict(zip(split.classes, numbers.tolist(), strict=True)), split.name)


def names(data: ImageView) -> Iterator[DataFinding]:
    """Names of classes that differ only in form, that are several names in one, or that mean a missing label."""
    for split in data.splits[:1]:
        yield from () if split.extent.is_short else labels.of_names(split.classes)
