"""CT volumes with yes/no questions: a table with a path and any number of label columns in each row."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from lockstep.core.errors import DataError, UsageError, did_you_mean, number_of
from lockstep_recipes.tasks.arrays import Array
from lockstep_recipes.tasks.ct.folds import Fold, folds_of
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.volume_labels import check_horizons, label_columns, label_values, one_sided
from lockstep_recipes.tasks.ct.volume_labels import horizons as horizons
from lockstep_recipes.tasks.ct.volumes.cache import cached_volume, content_address
from lockstep_recipes.tasks.ct.volumes.dicom import dicom_files
from lockstep_recipes.tasks.ct.volumes.slices import Slices
from lockstep_recipes.tasks.readers import columns
from lockstep_recipes.tasks.readers.input_files import with_slashes
from lockstep_recipes.tasks.readers.table import Source, Table
from lockstep_recipes.tasks.vision.readers.image_files import add_file
from lockstep_recipes.tasks.vision.readers.image_records import EVAL, TRAIN, Split

IMAGE = ("image", "volume", "path", "file", "ct", "nifti", "dicom")
"""Usual names of the column with the volumes."""
PATIENT = ("patient_id", "patient", "patientid", "pid", "subject", "subject_id")
"""Usual names of the column with the patients."""
_SPLIT = ("split",)
_SHOWN = 5


@dataclass(frozen=True)
class VolumeSample:
    """A raw sample."""

    slices: Slices
    """int16 (n, rows, columns) in HU, from feet to head. `slices[places]` is an array of the chosen slices: only these
    are read from the cache."""
    positions: npt.NDArray[np.float32]
    """float32 (n): distance from the first slice in millimetres, ascending."""
    labels: npt.NDArray[np.float32]
    """float32 (questions): 1 (yes), 0 (no) or NaN (unknown)."""
    patient: str
    name: str
    """The path of the volume as in the table."""
    key: str
    """The content address of the volume: it changes with its voxels, not with its name."""
    index: int = 0
    """The index of the sample in its table."""
    notes: tuple[str, ...] = ()
    """Remarks of the reader: gantry tilt, missing slices."""


@dataclass(frozen=True)
class VolumeOptions:
    """How volumes are read."""

    distance_mm: float | None = None
    """Distance in millimetres to which slices are resampled. None: slices are not resampled."""
    allow_gaps: bool = False
    """Report missing slices as a remark instead of an error."""
    cache: bool = True
    """Keep decoded volumes on disk. Otherwise the whole volume is read each time."""


def volume_options(options: VolumeRiskOptions) -> VolumeOptions:
    """How volumes are read, from the options of the task."""
    return VolumeOptions(options.slice_distance_mm, allow_gaps=options.allow_gaps, cache=options.keep_volumes)


class VolumeTable(Dataset[VolumeSample]):
    """Volumes with labels.

    Args:
        paths: the paths of the volumes.
        names: the names of the volumes in their source.
        places: the places of the volumes in their source for messages, such as `labels.csv:7`.
        patients: the patients of the volumes.
        patients_are_known: False: each volume counts as a patient, and `patients` only distinguishes volumes.
        questions: the names of the label columns.
        labels: float32 (volumes, questions): 1, 0 or NaN.
        check_first: whether all volumes are read before a new run trains; see `Task.train_data`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        names: Sequence[str],
        places: Sequence[str],
        patients: Sequence[str],
        questions: Sequence[str],
        labels: Array,
        options: VolumeOptions = VolumeOptions(),
        notes: Sequence[str] = (),
        patients_are_known: bool = True,
        check_first: bool = False,
    ) -> None:
        self.paths, self.names, self.places = list(paths), list(names), list(places)
        self.patients = list(patients)
        """The patient of each volume."""
        self.patients_are_known = patients_are_known
        self.check_first = check_first
        self.questions = list(questions)
        """The names of the questions."""
        self.labels: npt.NDArray[np.float32] = labels.astype(np.float32, copy=False)
        """float32 (volumes, questions): 1 (yes), 0 (no) or NaN (unknown)."""
        self.options = options
        self.notes = tuple(notes)
        """Remarks about how the source was read."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> VolumeSample:
        """A sample. The first reading of a volume on a machine decodes it.

        Raises:
            DataError: the volume cannot be used; see `tasks.ct.volumes.read.read_volume`. The error names the row and
                the path.
        """
        options = self.options
        try:
            volume = cached_volume(
                self.paths[index], distance_mm=options.distance_mm, allow_gaps=options.allow_gaps, keep=options.cache
            )
        except DataError as error:
            where = self.where(index)
            remedy = error.remedy
            raise DataError(error.what, where=f"{where}: {error.where or self.paths[index]}", remedy=remedy) from error
        return VolumeSample(
            slices=volume.slices,
            positions=volume.positions,
            labels=self.labels[index],
            patient=self.patients[index],
            name=self.names[index],
            key=volume.address,
            index=index,
            notes=volume.notes,
        )

    def where(self, index: int) -> str:
        """The place of a volume, for messages."""
        return self.places[index]

    def address(self, index: int) -> str:
        """Hexadecimal SHA-256 of the volume's files. It is known without decoding."""
        return content_address(self.paths[index])

    def check(self, index: int) -> str | None:
        """Read a volume, so that it is in the cache, and return the remarks about it.

        Raises:
            DataError: the volume cannot be used; see `__getitem__`.
        """
        sample = self[index]
        return f"{sample.name}: {'; '.join(sample.notes)}" if sample.notes else None

    def digest(self) -> str:
        """Hexadecimal digits that change if a volume or a label changes. They use size and time of the files, which are
        not read."""
        digest = hashlib.sha256(repr((self.questions, self.patients, self.options)).encode())
        digest.update(np.ascontiguousarray(self.labels).data)
        for path, name in zip(self.paths, self.names, strict=True):
            for file in dicom_files(path) if path.is_dir() else [path]:
                add_file(digest, file, name=f"{name}/{file.name}")
        return digest.hexdigest()


def read_volume_table(
    source: str,
    split: Split,
    options: VolumeRiskOptions,
    *,
    questions: Sequence[str] | None = None,
    fold: str | None = None,
) -> VolumeTable:
    """The volumes of a table: CSV, TSV, JSON (lines), Parquet.

    Which rows are read: with `fold`, those of the fold (evaluation) or of all other folds (training). Otherwise, if the
    table has a column `split`, those with `train`, `training`, or `val`, `validation`, `valid`, `eval`, `test`.
    Otherwise all. In training, rows without any known label are left out, and a note reports it.

    Args:
        source: the table. Paths in it are relative to its folder.
        split: the split to read.
        options: its `columns`, `labels`, `leaks`, `fold_seed` and `check_volumes`, and how volumes are read.
        questions: for evaluation data, the questions of the training data. None: those of `options.labels`.
        fold: `2/5`: the second of five folds of patients, stratified by labels. They depend on `fold_seed` and the
            table.

    Raises:
        DataError: there is no such source or column; a label is not 0, 1 or blank; a path does not exist; an event is 1
            at one horizon and 0 at a later one; no row remains. Errors name file, line and column.
        UsageError: the fold is invalid, or a leaking column is used as an input.
    """
    table = Source.parse(source).read()
    taken = table_column(options.columns.image, IMAGE, table, "image", needed=True)
    assert taken is not None
    person = table_column(options.columns.patient, PATIENT, table, "patient", needed=False)
    refuse_leaks([taken], options.leaks, names=list(table.columns), where=source)
    questions = label_columns(options.labels if questions is None else questions, table)
    values = label_values(table, questions)
    check_horizons(values, questions, table)
    names = [_text(value) for value in table.columns[taken]]
    patients = names if person is None else _patients(table, person)
    chosen = None if fold is None else Fold.parse(fold)
    rows, notes = _rows(table, values, patients, split=split, fold=chosen, seed=options.fold_seed)
    if person is None:
        notes.append("the table has no column of patients: each volume counts as a patient")
    if split == "train":
        rows, without = _with_labels(rows, values)
        notes += without
    if not rows:
        raise _no_rows(table, f"data.{split}", split)
    return VolumeTable(
        volume_paths(table, taken, rows),
        names=[names[row] for row in rows],
        places=[table.where(row) for row in rows],
        patients=[patients[row] for row in rows],
        patients_are_known=person is not None,
        questions=questions,
        labels=values[rows],
        options=volume_options(options),
        check_first=options.check_volumes,
        notes=(*table.notes, *notes, *one_sided(values[rows], questions)),
    )


def _no_rows(table: Table, key: str, split: Split) -> DataError:
    """The error if no row belongs to `split`. It names the values of the split column."""
    column = next((name for name in table.columns if name.lower() in _SPLIT), None)
    counts = Counter(() if column is None else (str(value).strip() for value in table.columns[column]))
    if column is None or any(value.lower() in (TRAIN if split == "train" else EVAL) for value in counts):
        remedy = "give rows with labels for this split"  # it has rows without labels, or a fold has none
        return DataError(f"{key} contains no volume for {split}", where=table.name, remedy=remedy)
    has = ", ".join(f"{value!r} in {number_of(count, 'row')}" for value, count in counts.most_common())
    wanted = TRAIN[0] if split == "train" else " or ".join(EVAL)
    remedy = (
        f"write {wanted} into {column!r} for the rows of this split, name a different table in {key}, or set "
        "data.fold=1/5, which splits the patients of all rows and ignores this column"
    )
    return DataError(
        f"{key} contains no volume for {split}: column {column!r} has {has}", where=table.name, remedy=remedy
    )


def has_parts(source: str) -> bool:
    """True if a table has a column `split` that marks the rows for evaluation."""
    return any(name.lower() in _SPLIT for name in Source.parse(source).read().columns)


def check_patients_apart(train: VolumeTable, evaluation: VolumeTable) -> None:
    """Check that no patient and no volume is in both splits.

    Raises:
        DataError: patients are in both, or volumes are. The error names some, with their rows.
    """
    kinds = {"volumes": [[os.path.realpath(path) for path in part.paths] for part in (train, evaluation)]}
    if train.patients_are_known and evaluation.patients_are_known:
        kinds = {"patients": [train.patients, evaluation.patients], **kinds}
    for kind, (here, there) in kinds.items():
        rows = {name: row for row, name in enumerate(here)}
        both = {name: row for row, name in enumerate(there) if name in rows}
        if both:
            shown = ", ".join(
                f"{name} ({train.where(rows[name])} and {evaluation.where(row)})"
                for name, row in list(both.items())[:_SHOWN]
            )
            what = (
                f"{number_of(len(both), kind.removesuffix('s'), 'is', 'are')} in both the training and the "
                f"evaluation data: {shown}"
            )
            remedy = "give a column `split` with one value for each patient, set a fold, or move the rows"
            raise DataError(what, remedy=remedy)


def refuse_leaks(inputs: Sequence[str], leaks: Sequence[str], *, names: Sequence[str], where: str) -> None:
    """Check that columns that contain the outcome are not inputs of the model.

    Args:
        inputs: columns that the model gets.
        leaks: columns, or patterns, that contain the outcome.
        names: all columns.

    Raises:
        DataError: a leak does not match any column.
        UsageError: an input is a leak.
    """
    for leak in leaks:
        found = fnmatch.filter(names, leak)
        if not found:
            hint = did_you_mean(leak, names)
            raise DataError(f"there is no column {leak!r}", where=where, remedy=f"{hint}Known are {', '.join(names)}")
        if refused := sorted(set(found) & set(inputs)):
            what = f"{', '.join(refused)} contains the outcome ({leak!r}), so it cannot be an input"
            raise UsageError(what, where=where, remedy="choose a different column, or remove it from the leaks")


# ---- columns


def table_column(
    wanted: str | int | None, usual: Sequence[str], table: Table, role: str, *, needed: bool
) -> str | None:
    names = list(table.columns)
    if wanted is not None:
        return columns.named(wanted, names, role, table.name)
    return columns.usual(usual, names, role=role, where=table.name, names=names, needed=needed)


def _rows(
    table: Table, values: Array, patients: Sequence[str], *, split: Split, fold: Fold | None, seed: int
) -> tuple[list[int], list[str]]:
    """The rows of a split, and notes."""
    column = next((name for name in table.columns if name.lower() in _SPLIT), None)
    if fold is not None:
        number = folds_of(patients, values, fold.folds, seed=seed)
        wanted = [row for row in range(len(table)) if (number[row] == fold.number - 1) == (split == "eval")]
        notes = [f"fold {fold.number} of {fold.folds} is for evaluation"]
        return wanted, notes + ([f"folds use all rows: column {column!r} is ignored"] if column else [])
    if column is None:
        return list(range(len(table))), []
    written = [str(value).strip().lower() for value in table.columns[column]]
    for row, value in enumerate(written):
        if value not in (*TRAIN, *EVAL):
            remedy = f"write {TRAIN[0]} or {EVAL[0]}"
            raise DataError(f"{value!r} in column {column!r} is not a split", where=table.where(row), remedy=remedy)
    usual = TRAIN if split == "train" else next(((name,) for name in EVAL if name in written), EVAL)
    others = [value for value in written if value in EVAL and value not in usual] if split == "eval" else []
    notes = []
    if others:
        notes = [
            f"not used: {number_of(len(others), 'row')} of other evaluation splits: {', '.join(sorted(set(others)))}"
        ]
    return [row for row, value in enumerate(written) if value in usual], notes


def _text(value: Any) -> str:
    """A cell as text; blank if the cell is empty. An integer is written in the same way in every format."""
    if value is None or value != value:
        return ""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _patients(table: Table, column: str) -> list[str]:
    """The patient of each row.

    Raises:
        DataError: a row has no patient.
    """
    patients = [_text(value) for value in table.columns[column]]
    if not all(patients):
        where = table.where(patients.index(""))
        raise DataError(f"no patient in column {column!r}", where=where, remedy="fill in the patient")
    return patients


def _with_labels(rows: list[int], values: Array) -> tuple[list[int], list[str]]:
    """The rows with a known label, and a note on the rest."""
    known = [row for row in rows if not np.isnan(values[row]).all()]
    left_out = len(rows) - len(known)
    return known, [f"left out: {number_of(left_out, 'row')} without a known label"] if left_out else []


def volume_paths(table: Table, column: str, rows: Sequence[int]) -> list[Path]:
    """The paths of the volumes.

    Raises:
        DataError: a path is blank or does not exist. The error names the first rows.
    """
    folder = Path(table.name).parent
    paths, missing = [], []
    for row in rows:
        (text,), _ = with_slashes(folder, [_text(table.columns[column][row])])
        paths.append(folder / text)
        if not text or not paths[-1].exists():
            missing.append(f"{table.where(row)} ({text or 'blank'})")
    if missing:
        shown = ", ".join(missing[:_SHOWN])
        what = f"{len(missing)} of {number_of(len(rows), 'volume')} not found: {shown}"
        remedy = f"paths in column {column!r} are relative to {folder}: correct them, or remove the rows"
        raise DataError(what, where=table.name, remedy=remedy)
    twice = [name for name, count in Counter(map(str, paths)).items() if count > 1]
    if twice:
        remedy = "keep one row for each volume"
        what = f"{number_of(len(twice), 'volume', 'has', 'have')} several rows: {', '.join(twice[:_SHOWN])}"
        raise DataError(what, where=table.name, remedy=remedy)
    return paths
