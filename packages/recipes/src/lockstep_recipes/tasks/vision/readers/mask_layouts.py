"""The layout of a folder of images with masks: its splits, its kind, and its class file."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.vision.readers.box_layouts import evaluation_part
from lockstep_recipes.tasks.vision.readers.class_table import CLASS_FILES, is_foreign
from lockstep_recipes.tasks.vision.readers.image_files import class_folders
from lockstep_recipes.tasks.vision.readers.image_records import EVAL, TRAIN, Split, evaluation_source
from lockstep_recipes.tasks.vision.readers.mask_pairs import image_folder, mask_folder


def is_coco(path: Path) -> bool:
    """True if a source is read as COCO: a .json file, or a folder with `annotations/*.json` and without masks."""
    if not path.is_dir():
        return path.suffix.lower() == ".json"
    places = (path, *(path / name for name in (*TRAIN, *EVAL)))
    return any((path / "annotations").glob("*.json")) and not any(mask_folder(place) for place in places)


def inner_part(folder: Path, split: Split) -> str:
    """The folder of a split inside `images/`. Empty if `images/` is not divided into training and evaluation data."""
    images = image_folder(folder)
    inner = class_folders(images) if images is not None else []
    training, evaluation = ([name for name in words if name in inner] for words in (TRAIN, EVAL))
    if not training or not evaluation:
        return ""
    return training[0] if split == "train" else evaluation[0]


def class_file(folder: Path, root: Path) -> str | None:
    """The class file of a folder of images and masks, or of the parent folder if it is a split.

    A file with such a name that describes the folders of a data set but does not have class names is skipped.

    Raises:
        DataError: there are two such files in one folder.
    """
    for place in _places(folder, root):
        found = [name for name in CLASS_FILES if (place / name).is_file() and not is_foreign(place / name)]
        if len(found) > 1:
            remedy = f"remove one of them, or choose with task.classes={place / found[0]}"
            what = f"there are two class files: {found[0]} and {found[1]}"
            raise DataError(what, where=str(place), remedy=remedy)
        if found:
            return str(place / found[0])
    return None


def foreign_files(folder: Path, root: Path) -> list[str]:
    """The files that `class_file` skips."""
    named = [place / name for place in _places(folder, root) for name in CLASS_FILES]
    return [str(path) for path in named if path.is_file() and is_foreign(path)]


def _places(folder: Path, root: Path) -> list[Path]:
    around = [root.absolute().parent] if root.absolute().name in (*TRAIN, *EVAL) else []
    return [*dict.fromkeys([folder, root]), *around]


def evaluation_source_with_masks(train: str) -> str | None:
    """The source of evaluation data that belongs to a source of training data, for a config without `data.eval`.

    Returns:
        the same source, if it has an evaluation split; the evaluation split of a folder that `datasets` saved.
        Otherwise None.
    """
    if is_coco(Path(train)):
        return evaluation_part(train)
    return train if inner_part(Path(train), "eval") else evaluation_source(train)
