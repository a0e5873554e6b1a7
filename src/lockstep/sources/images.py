"""Images as map-style data sets of raw samples. They name the file of a sample that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.order import permute
from lockstep.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
DIGITS_CLASSES = [str(digit) for digit in range(10)]
_DIGITS_HELD_BACK = 360  # one fifth

LabelledImage = tuple[Tensor, int]


class Digits(Dataset[LabelledImage]):
    """UCI optical digits: 1,797 scanned digits of 8x8 pixels, embedded in the package.

    A sample is (image, label): a uint8 tensor (1, 8, 8) and a number from 0 to 9. 360 samples, drawn by a fixed
    permutation, are held back for evaluation.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998,
    doi:10.24432/C50P49, CC BY 4.0; as bundled with scikit-learn.
    """

    def __init__(self, training: bool) -> None:
        with resources.files("lockstep.recipes").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
            images, labels = stored["images"], stored["labels"]
        places = permute(np.arange(len(images)), len(images), seed=0)
        rows = np.sort(places[_DIGITS_HELD_BACK:] if training else places[:_DIGITS_HELD_BACK])
        self.images = torch.from_numpy(
            (images[rows].astype(np.float32) * (255 / 16)).round().astype(np.uint8)
        ).unsqueeze(1)
        self.labels = labels[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> LabelledImage:
        return self.images[index], self.labels[index]


class Images(Dataset[LabelledImage]):
    """Image files with labels. A sample is (image, label): a uint8 tensor (channels, size, size) and a class number.

    Args:
        paths: the files.
        labels: their class numbers, or -1 if the class is unknown.
        size: height and width in pixels. Images are resized with antialiasing.
        channels: 1 (grey) or 3 (RGB).
    """

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], *, size: int, channels: int) -> None:
        self.paths, self.labels, self.size, self.channels = list(paths), list(labels), size, channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> LabelledImage:
        from PIL import Image

        with Image.open(self.paths[index]) as file:
            image = file.convert("L" if self.channels == 1 else "RGB").resize(
                (self.size, self.size), Image.Resampling.BILINEAR
            )
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if self.channels == 1 else pixels.permute(2, 0, 1), self.labels[index]

    def where(self, index: int) -> str:
        """The file of a sample, for messages."""
        return str(self.paths[index])


def image_folder(
    root: str | Path, *, size: int, channels: int, classes: Sequence[str] | None = None
) -> tuple[Images, list[str]]:
    """The images of a folder that has a folder for each class, and the class names, sorted.

    Args:
        size: height and width in pixels to which images are resized.
        channels: 1 (grey) or 3 (RGB).
        classes: the class names of the training data. A folder with another name is an error.

    Raises:
        DataError: there is no such folder, no folder of a class, a class without a known name, or no image.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(
            "no such folder",
            where=str(root),
            remedy="data.train and data.eval are folders with a folder for each class",
        )
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    names = list(classes) if classes is not None else [folder.name for folder in folders]
    paths: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        if folder.name not in names:
            raise DataError(
                f"class {folder.name!r} is not among the {len(names)} training classes",
                where=str(root),
                remedy=f"the classes are: {', '.join(names)}",
            )
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        paths += files
        labels += [names.index(folder.name)] * len(files)
    if not paths:
        raise DataError(
            "no images found",
            where=str(root),
            remedy=f"put images ({', '.join(IMAGE_SUFFIXES)}) into a folder for each class",
        )
    return Images(paths, labels, size=size, channels=channels), names
