"""The embedded digits, as a map-style data set."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.data.order import permute

_HELD_BACK = 360  # one fifth

LabelledImage = tuple[Tensor, int]


class Digits(Dataset[LabelledImage]):
    """UCI optical digits: 1,797 scanned digits of 8x8 pixels, embedded in the package.

    A sample is (image, label): a uint8 tensor (1, 8, 8) and a number from 0 to 9. 360 samples, drawn by a fixed
    permutation, are held back for evaluation.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998,
    doi:10.24432/C50P49, CC BY 4.0; as bundled with scikit-learn.
    """

    def __init__(self, training: bool) -> None:
        with (
            resources.files("lockstep_recipes.recipes").joinpath("digits.npz").open("rb") as file,
            np.load(file) as stored,
        ):
            images, labels = stored["images"], stored["labels"]
        places = permute(np.arange(len(images)), len(images), seed=0)
        rows = np.sort(places[_HELD_BACK:] if training else places[:_HELD_BACK])
        pixels = (images[rows].astype(np.float32) * (255 / 16)).round().astype(np.uint8)
        self.images = torch.from_numpy(pixels).unsqueeze(1)
        self.labels: npt.NDArray[Any] = labels[rows].astype(np.int64)
        """The class number of each image: (images,) int64."""
        self.classes = [str(digit) for digit in range(10)]
        """The names of the classes."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> LabelledImage:
        return self.images[index], int(self.labels[index])
