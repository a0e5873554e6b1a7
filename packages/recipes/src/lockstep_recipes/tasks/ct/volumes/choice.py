"""Choose the slices of a volume for a sample."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Places = npt.NDArray[np.int64]
TrainChoice = Literal["window", "stratified", "even"]
"""`window`: consecutive slices from a random position. `stratified`: a random slice from each of several equal sections
of the volume. `even`: as in evaluation."""
"""`even`: evenly spaced slices. `all`: all slices, in groups; see `slice_groups`."""


def choose_slices(count: int, most: int, *, how: TrainChoice) -> Places:
    """The indices of at most `most` slices of a volume, ascending. For a volume with fewer slices, all of them.

    `window` and `stratified` draw only from torch's global generator.

    Args:
        count: the number of slices of the volume, at least 1.
        most: at least 1.

    Returns:
        int64 (min(count, most)).
    """
    if count <= most:
        return np.arange(count)
    if how == "window":
        begin = int(torch.randint(count - most + 1, ()))
        return np.arange(begin, begin + most)
    edges = count * np.arange(most + 1) // most  # sections differ by at most one slice, and none is empty
    if how == "stratified":
        return edges[:-1] + (torch.rand(most, dtype=torch.float64).numpy() * np.diff(edges)).astype(np.int64)
    return (edges[:-1] + edges[1:] - 1) // 2  # the middle of each section


def slice_groups(count: int, most: int, *, how: TrainChoice) -> list[Places]:
    """All slices of a volume in groups of at most `most`, for an evaluation that averages the logits of the groups.

    Each slice is in one group, and sizes of groups differ by at most one. Groups resemble the samples of training: with
    `window`, a group has consecutive slices; otherwise it has slices from the whole volume.

    Args:
        how: the choice in training.
    """
    groups = -(-count // most)
    places = np.arange(count)
    parts: list[Any] = (
        np.array_split(places, groups) if how == "window" else [places[first::groups] for first in range(groups)]
    )
    return parts
