"""The choice of the slices of a volume that a sample has."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Places = npt.NDArray[np.int64]
TrainChoice = Literal["window", "stratified", "even"]
"""`window`: consecutive slices from a random place on. `stratified`: a random slice of each of equal parts of the
volume. `even`: as in evaluation."""
"""`even`: evenly spaced slices. `all`: all slices, in groups; see `slice_groups`."""


def choose_slices(count: int, most: int, *, how: TrainChoice) -> Places:
    """The places of at most `most` slices of a volume, ascending. A volume with fewer slices is used as a whole.

    `window` and `stratified` draw from torch's global generator, and from no other.

    Args:
        count: slices of the volume, at least 1.
        most: at least 1.

    Returns:
        int64 (min(count, most)).
    """
    if count <= most:
        return np.arange(count)
    if how == "window":
        begin = int(torch.randint(count - most + 1, ()))
        return np.arange(begin, begin + most)
    edges = count * np.arange(most + 1) // most  # parts differ by at most one slice, and none is empty
    if how == "stratified":
        return edges[:-1] + (torch.rand(most, dtype=torch.float64).numpy() * np.diff(edges)).astype(np.int64)
    return (edges[:-1] + edges[1:] - 1) // 2  # the middle of each part


def slice_groups(count: int, most: int, *, how: TrainChoice) -> list[Places]:
    """All slices of a volume in groups of at most `most`, for an evaluation that averages the logits of the groups.

    Each slice is in one group, and sizes of groups differ by at most one. Groups look as samples do in training:
    with `window`, a group has consecutive slices; otherwise it has slices from the whole volume.

    Args:
        how: the choice in training.
    """
    groups = -(-count // most)
    places = np.arange(count)
    parts: list[Any] = (
        np.array_split(places, groups) if how == "window" else [places[first::groups] for first in range(groups)]
    )
    return parts
