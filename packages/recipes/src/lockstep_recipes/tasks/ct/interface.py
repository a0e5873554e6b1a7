"""What the presenter and the export of risks from CT volumes read of their task, and its samples after `prepare`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep_recipes.tasks.ct.features import SliceRows
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.volumes.windows import HounsfieldWindow
from lockstep_recipes.tasks.metadata import MetadataTask


@dataclass
class Prepared:
    """A sample after `prepare`."""

    pictures: Tensor
    """uint8 (slices, channels, size, size): the slices whose pixels are needed."""
    counts: list[int]
    """Slices of each group. In training, a sample is one group."""
    places: Tensor
    """int64 (all slices of the groups): their numbers in the volume, counted from the feet."""
    positions: Tensor
    """float32 (all slices of the groups): millimetres from the first slice of the volume."""
    labels: Tensor
    """float32 (questions)."""
    index: int
    rows: SliceRows | None = None
    """The cached features. None: `slices` contains all slices."""


class VolumeRiskTask(MetadataTask):
    """A task with questions about volumes."""

    options: VolumeRiskOptions
    windows: tuple[HounsfieldWindow, ...]
    """The Hounsfield window of each channel."""

    @property
    def questions(self) -> list[str]:
        """Names of the questions, in the order of the logits."""
        raise NotImplementedError

    @property
    def outcomes(self) -> list[list[int]]:
        """The questions of each event by their numbers, from the nearest horizon to the farthest. A question without a
        time is a separate event."""
        raise NotImplementedError
