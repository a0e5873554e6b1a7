"""`lockstep shards`."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug
from lockstep.cli.reporting import reporting
from lockstep.core.errors import UsageError, number_of

_TABLES = (".csv", ".tsv", ".json", ".txt")


class WritableFormat(enum.StrEnum):
    """A format for writing shards."""

    PARQUET = "parquet"
    TAR = "tar"
    JSONL = "jsonl"


def shards(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help=(
                "A folder of images or of shards, a table (.csv, .jsonl, .parquet, ...), a folder or a name that "
                "`datasets` reads, or FILE.py:FUNCTION, a function that returns a data set or any iterable."
            ),
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder, or an address such as s3://BUCKET/FOLDER.")],
    format: Annotated[
        WritableFormat | None,
        typer.Option(
            help="Format of the shards. Default: tar for images and arrays, jsonl for chats, otherwise parquet."
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="Approximate size of a shard, before Parquet compresses it.")
    ] = "64MB",
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Shuffle all samples with this seed. DATA needs a length and an index."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a data set or an iterable as shards. If it was interrupted, the same command continues."""
    with reporting(debug):
        from lockstep.cli.progress import bar
        from lockstep.sizes import bytes_of
        from lockstep_recipes.shards.write import write

        samples, is_image = _source(data)
        size = bytes_of(shard_size, where="--shard-size")
        total = len(samples) if hasattr(samples, "__len__") else None
        with bar("samples", shown=sys.stderr.isatty()) as shown:
            shown.begin(total)

            def tell(name: str, count: int) -> None:
                shown.advance(count)
                if shown.progress is None:
                    print(f"{name}: {number_of(count, 'sample')}", flush=True)

            kind = None if format is None else format.value
            try:
                done = write(samples, out, kind=kind, shard_bytes=size, shuffle=shuffle, source=data, tell=tell)
            except KeyboardInterrupt:
                print(
                    f"\nstopped; run the same command again to continue after the last complete shard of {out}",
                    file=sys.stderr,
                )
                raise
        index = done.index
        kept = f", {done.resumed:,} of them written earlier" if done.resumed else ""
        count = len(index["shards"])
        print(
            f"{out}: {number_of(index['samples'], 'sample')} in {number_of(count, 'shard')} ({index['format']}){kept}"
        )
        print("Next, in your own task:")
        print("    def train_data(self):")
        print(f"        return lockstep_recipes.Shards({out!r})")
        if is_image and "://" not in out:
            print(f"or: lockstep train image_folder data.train={out}")


def _source(data: str) -> tuple[Any, bool]:
    """The samples that DATA names, and whether they are images in a folder."""
    from lockstep_recipes.shards.data import Shards
    from lockstep_recipes.shards.find import INDEX, format_of
    from lockstep_recipes.tasks.readers.table import Source

    path = Path(data)
    if ".py:" in data:
        return _made(data), False
    if "://" in data or (format_of(data) and not path.is_dir()) or path.name == INDEX:
        return Shards(data), False
    if path.suffix.lower() in _TABLES and path.is_file():
        return _Rows(Source(data, missing=()).read()), False
    if not path.is_dir():
        return _encoded(Source.parse(data).data_set()), False
    from lockstep_recipes.tasks.vision.readers import image_files, image_records

    if image_records.is_saved_data_set(path):
        return _encoded(Source.parse(data).data_set()), False
    if any(name == INDEX or format_of(name) for name in os.listdir(path)):
        return Shards(data), False
    part = image_records.part_of_folder(path, "train")
    if part is not None:
        raise UsageError("the folder contains several splits", where=data, remedy=f"give one of them, such as {part}")
    if image_files.class_folders(path):
        pictures, codes, classes, _ = image_files.read_class_folders(path, None)
        return _Images(pictures, [classes[code] for code in codes]), True
    found = image_records.unlabelled_images([data])
    return _Images(found.pictures, None), True


def _made(name: str) -> Any:
    """What the function FILE.py:FUNCTION returns, or the data set that it names."""
    from lockstep.core import plugins

    found = plugins.named(name, key="DATA")
    if found is None:
        raise UsageError("there is no such function", where=name, remedy="name a function, or a data set")
    samples = found() if callable(found) else found
    if not hasattr(samples, "__iter__") and not hasattr(samples, "__getitem__"):
        what = f"it returns {type(samples).__name__}, which does not contain samples"
        raise UsageError(what, where=name, remedy="return a data set, or an iterable such as a generator")
    return samples


def _encoded(data: Any) -> Any:
    """A data set of `datasets` whose images and sounds stay encoded, as they are stored."""
    for name, kind in data.features.items():
        if type(kind).__name__ in ("Image", "Audio", "Video") and hasattr(kind, "decode"):
            data = data.cast_column(name, type(kind)(decode=False))
    return data


class _Rows:
    """The rows of a table."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self.table.columns.items()}


class _Images:
    """Files of images, as members of a tar: NUMBER.jpg and, with classes, NUMBER.cls."""

    def __init__(self, pictures: Any, classes: list[str] | None) -> None:
        self.pictures, self.classes = pictures, classes

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> dict[str, Any]:
        suffix = Path(self.pictures.name(row)).suffix[1:].lower()
        label = {} if self.classes is None else {"cls": self.classes[row]}
        return {"__key__": f"{row:09d}", suffix: self.pictures.read(row), **label}


COMMAND = JoinedCommand(shards, "lockstep shards photos/ shards/ --shuffle 0")
