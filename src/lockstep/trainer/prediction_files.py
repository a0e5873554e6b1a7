"""Files of single predictions in a folder, such as masks. Several ranks write into the folder at the same time."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from lockstep.core import atomic
from lockstep.core.errors import UsageError

ROWS = "predictions.jsonl"
"""The file in the folder with the rows of all predictions."""
MARKER = ".lockstep-predictions"
"""An empty file that marks a folder of predictions: what is in it may be replaced by other predictions."""
_SHOWN = 8  # names in an error
_LONGEST = 100  # characters of a part of a name
_NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\]')


def check_free(folder: Path) -> None:
    """Check that `folder` has predictions, or nothing but hidden files, or is not there. Nothing is written.

    Raises:
        UsageError: it holds something else; names it.
    """
    if not folder.is_dir() or (folder / MARKER).exists():
        return
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if not path.name.startswith("."))
    if names:
        more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        raise UsageError(
            f"the folder contains more than predictions of Lockstep: {', '.join(names[:_SHOWN])}{more}. Predictions "
            "could replace files of the same name",
            where=f"--out {folder}",
            remedy=f"give a new or an empty folder, such as {folder / 'predictions'}",
        )


def distinct_names(places: Sequence[str]) -> list[str]:
    """A name for the files of each sample, made of the place that the sample comes from. No two names are equal, also
    if the file system does not distinguish capital letters from small letters.

    The name is the path below the folder that all places share, without suffix. If this would name two samples,
    their suffixes stay; if names are then still equal, a number is added. The names depend only on `places`.
    """
    if not places:
        return []
    paths = [os.path.abspath(place) for place in places]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    whole = [_cleaned(os.path.relpath(path, shared)) for path in paths]
    stems = [os.path.splitext(name)[0] for name in whole]
    count = Counter(stem.casefold() for stem in stems)
    taken = {Path(ROWS).stem}
    names = []
    for stem, with_suffix in zip(stems, whole, strict=True):
        name = first = stem if count[stem.casefold()] == 1 else with_suffix
        number = 1
        while name.casefold() in taken:
            number += 1
            name = f"{first}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


def _cleaned(path: str) -> str:
    """A relative path with characters that every file system takes."""
    return "/".join(_NOT_IN_NAMES.sub("_", part)[-_LONGEST:] for part in Path(path).parts)


class PredictionFiles:
    """Writes the files of predictions below a folder, which is made if it is not there.

    Args:
        names: of the samples, as `distinct_names` gives them.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names

    def write(self, index: int, files: Mapping[str, bytes]) -> None:
        """Write the files of one sample. A kill leaves whole files. Files of earlier predictions are replaced.

        Args:
            files: the contents by path, as `Presenter.files` gives them.

        Raises:
            UsageError: a path has no `*`, or leads out of the folder; a content is not bytes; a file cannot be written.
        """
        for pattern, content in files.items():
            path = PurePosixPath(pattern)
            if "*" not in pattern or path.is_absolute() or ".." in path.parts:
                remedy = "return a path below the folder with a * for the name of the sample, such as 'masks/*.png'"
                raise UsageError(f"the path {pattern!r}", where="Presenter.files", remedy=remedy)
            if not isinstance(content, bytes):
                what = f"the content of {pattern!r} is of type {type(content).__name__}"
                raise UsageError(what, where="Presenter.files", remedy="return bytes")
            self._write(self.folder / pattern.replace("*", self.names[index]), content)

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic.staged_file(path) as staging:
                staging.write_bytes(content)
        except OSError as error:
            remedy = "free disk space, or choose another folder with --out"
            raise UsageError(f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from error
