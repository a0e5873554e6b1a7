"""The CT volumes that a user names on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.options import VolumeRiskColumnsOptions, VolumeRiskOptions
from lockstep_recipes.tasks.ct.volume_table import (
    IMAGE,
    PATIENT,
    VolumeTable,
    table_column,
    volume_options,
    volume_paths,
)
from lockstep_recipes.tasks.ct.volumes.dicom import dicom_files, is_dicom
from lockstep_recipes.tasks.ct.volumes.read import SUFFIXES
from lockstep_recipes.tasks.readers.input_files import find_files
from lockstep_recipes.tasks.readers.table import SUFFIXES as TABLES
from lockstep_recipes.tasks.readers.table import Source


def read_volume_inputs(arguments: Sequence[str], questions: Sequence[str], options: VolumeRiskOptions) -> VolumeTable:
    """Volumes without labels: each volume once, in the order of first occurrence.

    An argument is a file of a volume, a folder or pattern of such files, a folder with a DICOM series, a folder of such
    folders, or a table (CSV, TSV, JSON, Parquet) with a column of paths; all its rows are read.

    Args:
        questions: the questions of the model. All labels are unknown.
        options: the columns of tables, and how volumes are read.

    Raises:
        UsageError: an argument does not name any volume.
        DataError: a table does not have a column of paths, or a path does not exist.
    """
    found: dict[Path, tuple[str, str]] = {}  # name and patient of each path
    for argument in arguments:
        for path, name, person in _volumes_of(argument, options.columns):
            found.setdefault(Path(os.path.abspath(path)), (name, person))
    names = [name for name, _ in found.values()]
    return VolumeTable(
        list(found),
        names=names,
        places=[str(path) for path in found],
        patients=[person for _, person in found.values()],
        questions=questions,
        labels=np.full((len(found), len(questions)), np.nan, dtype=np.float32),
        options=volume_options(options),
    )


def _volumes_of(argument: str, columns: VolumeRiskColumnsOptions) -> list[tuple[Path, str, str]]:
    """Path, name and patient of the volumes of an argument."""
    path = Path(argument)
    if path.is_file() and path.suffix.lower() in TABLES:
        return _rows_of(argument, columns)
    if path.is_dir() and not any(file.name.lower().endswith(SUFFIXES) for file in path.rglob("*")):
        folders = _series_folders(path)
        if not folders:
            remedy = f"give a folder with a DICOM series, or with {', '.join(SUFFIXES)} files"
            raise UsageError("no file in this folder can be used", where=argument, remedy=remedy)
        return [(folder, str(folder), folder.name) for folder in folders]
    return [(file, str(file), file.name) for file in find_files([argument], SUFFIXES)]


def _rows_of(argument: str, columns: VolumeRiskColumnsOptions) -> list[tuple[Path, str, str]]:
    table: Any = Source.parse(argument).read()
    column = table_column(columns.image, IMAGE, table, "image", needed=True)
    assert column is not None
    person = table_column(columns.patient, PATIENT, table, "patient", needed=False)
    paths = volume_paths(table, column, range(len(table)))
    names = [str(value) for value in table.columns[column]]
    people = [str(value) for value in table.columns[person]] if person else names
    return list(zip(paths, names, people, strict=True))


def _series_folders(folder: Path) -> list[Path]:
    """The outermost folders that directly contain DICOM files: a series may continue in folders inside them."""
    found: list[Path] = []
    for parent in sorted({file.parent for file in dicom_files(folder)}):
        if not any(outer in parent.parents for outer in found) and any(map(is_dicom, parent.iterdir())):
            found.append(parent)
    return found
