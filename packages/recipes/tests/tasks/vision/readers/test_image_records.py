"""Images come out of folders, tables, data sets and shards alike, and faults are said with file, row or member."""

import io
import json
import multiprocessing
import os
import pickle
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.readers.packed_text import PackedText
from lockstep_recipes.tasks.vision.classification.options import ClassificationColumnsOptions, ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification
from lockstep_recipes.tasks.vision.images.decode import decode
from lockstep_recipes.tasks.vision.readers.image_records import (
    evaluation_source,
    read_image_records,
    unlabelled_images,
)
from lockstep_recipes.tasks.vision.readers.image_shards import ShardImages, find_shards, read_shards
from lockstep_recipes.tasks.vision.readers.image_table import read_data_set
from lockstep_recipes.tasks.vision.readers.shard_index import load_index
from tests.processes import HANG_S


def jpeg(number):
    """A small image, another for each number."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (number * 7 % 256, 40, 90)).save(file, "JPEG")
    return file.getvalue()


def put(path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jpeg(len(path.name)) if content is None else content)
    return path


def read(source, split="train", classes=None, **columns):
    return read_image_records(str(source), split, ClassificationOptions(columns=columns), classes=classes)


def samples(records):
    return [(sample.data, records.classes[sample.label]) for sample in map(records.__getitem__, range(len(records)))]


def fault(source, *texts, split="train", **options):
    with pytest.raises(DataError) as caught:
        read(source, split, **options)
    for text in texts:
        assert str(text) in str(caught.value), str(caught.value)
    return caught.value


def shard(path, members, *, end=True):
    """A tar file of (name, content) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if not end:
        path.write_bytes(path.read_bytes().rstrip(b"\0"))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))


# ---- every kind of source gives the same samples


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        put(tmp_path / "set" / ("cat", "dog", "eel")[number % 3] / f"{number}.jpg", jpeg(number))
    return tmp_path / "set"


EXPECTED = sorted((jpeg(number), ("cat", "dog", "eel")[number % 3]) for number in range(6))


def test_a_folder_with_a_folder_for_each_class(folder):
    records = read(folder)
    assert records.classes == ["cat", "dog", "eel"]
    assert records.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert records[1].name == "cat/3.jpg"
    assert records.where(1) == str(folder / "cat/3.jpg")
    assert sorted(samples(records)) == EXPECTED


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_tables_of_path_and_label(folder, suffix):
    rows = [{"file": f"{kind}/{n}.jpg", "label": kind} for n in range(6) for kind in [("cat", "dog", "eel")[n % 3]]]
    path = folder / f"table.{suffix}"
    if suffix == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        between = {"csv": ",", "tsv": "\t"}[suffix]
        path.write_text("\n".join(between.join(row) for row in [["file", "label"], *(row.values() for row in rows)]))
    records = read(path)
    assert records.classes == ["cat", "dog", "eel"]
    assert records.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert sorted(samples(records)) == EXPECTED
    assert records[0].name == "cat/0.jpg"
    assert str(folder / "cat/0.jpg") in records.where(0)


def data_set(path, *, embed):
    import datasets

    rows = [(("cat", "dog", "eel")[number % 3], jpeg(number)) for number in range(6)]
    if embed:
        pictures = [{"bytes": content, "path": None} for _, content in rows]
    else:
        pictures = [str(put(path / f"{number}.jpg", content)) for number, (_, content) in enumerate(rows)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["eel", "dog", "cat"])})
    return datasets.Dataset.from_dict({"img": pictures, "label": [kind for kind, _ in rows]}, features)


@pytest.mark.parametrize("embed", [True, False])
def test_a_folder_that_datasets_saved(tmp_path, embed):
    data_set(tmp_path / "files", embed=embed).save_to_disk(str(tmp_path / "saved"))
    records = read(tmp_path / "saved")
    assert records.classes == ["eel", "dog", "cat"]  # the order of the data set
    assert sorted(samples(records)) == EXPECTED
    assert records.where(2) == f"{tmp_path}/saved, row 2"
    assert sorted(samples(pickle.loads(pickle.dumps(records)))) == EXPECTED


def test_splits_of_a_saved_folder(tmp_path):
    import datasets

    data = data_set(tmp_path, embed=True)
    parts = {"train": data.select(range(4)), "validation": data.select([4]), "test": data.select([5, 5])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert len(read(tmp_path / "saved")) == 4
    assert len(read(tmp_path / "saved", "eval")) == 1
    assert len(read(f"{tmp_path}/saved:test", "eval")) == 2
    assert evaluation_source(f"{tmp_path}/saved") == f"{tmp_path}/saved:validation"
    fault(f"{tmp_path}/saved:dev", "no split 'dev'", "train, validation, test")


@pytest.mark.cases("False")
@pytest.mark.parametrize("typed", [True, False])
def test_parquet_that_holds_the_pictures(tmp_path, typed):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "pictures.parquet"
    if typed:
        data_set(tmp_path, embed=True).to_parquet(str(path))
    else:
        rows = [
            {"image": {"bytes": jpeg(n), "path": f"{n}.jpg"}, "label": ("cat", "dog", "eel")[n % 3]} for n in range(6)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert sorted(samples(read(path))) == EXPECTED


def wds(number, kind="cls"):
    label = ("cat", "dog", "eel")[number % 3]
    content = label.encode() + b"\n" if kind == "cls" else json.dumps({"label": label, "other": 1}).encode()
    return [(f"dir/{number:04}.jpg", jpeg(number)), (f"dir/{number:04}.{kind}", content)]


@pytest.mark.parametrize("kind", ["cls", "json"])
def test_shards(tmp_path, kind):
    for number in range(3):
        pictures = [member for n in (2 * number, 2 * number + 1) for member in wds(n, kind)]
        shard(tmp_path / "w" / f"s-{number:03}.tar", pictures)
    whole = read(tmp_path / "w")
    assert whole.classes == ["cat", "dog", "eel"]
    assert sorted(samples(whole)) == EXPECTED
    assert whole[3].name == "s-001.tar/dir/0003.jpg"
    assert whole.where(3) == f"{tmp_path}/w/s-001.tar, member dir/0003.jpg"
    for pattern in ("w/s-{000..002}.tar", "w/s-*.tar", "w/s-0{00..02}.tar"):
        records = read(tmp_path / pattern)
        assert samples(records) == samples(whole)
    assert len(read(tmp_path / "w/s-001.tar")) == 2
    put(tmp_path / "w2/train/.keep", b"")
    os.rename(tmp_path / "w", tmp_path / "w2/train/w")
    fault(tmp_path / "w2/train", "a class folder has no images")  # shards one folder deeper are not found by chance


# ---- folders


def test_folders_are_read_at_any_depth_in_an_order_that_does_not_depend_on_the_disk(tmp_path):
    for name in ("b/2.PNG", "b/x/1.JPEG", "b/x/0.jpg", "a/10.jpg", "a/9.webp", "10/a.jpg", "9/a.jpg"):
        put(tmp_path / name)
    put(tmp_path / "a/notes.txt")
    put(tmp_path / "a/._9.jpg")  # macOS
    put(tmp_path / ".hidden/1.jpg")
    records = read(tmp_path)
    assert records.classes == ["10", "9", "a", "b"]
    names = ["10/a.jpg", "9/a.jpg", "a/10.jpg", "a/9.webp", "b/2.PNG", "b/x/0.jpg", "b/x/1.JPEG"]
    assert [records[index].name for index in range(len(records))] == names
    assert records.notes == (f"left out: 1 file below {tmp_path} without the suffix of an image: 1 .txt",)


def test_links_to_folders_are_followed_and_never_around_in_circles(tmp_path):
    put(tmp_path / "set/a/1.jpg")
    put(tmp_path / "elsewhere/2.jpg")
    (tmp_path / "set/a/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/a/around").symlink_to(tmp_path / "set/a")
    assert len(read(tmp_path / "set")) == 2


def test_pictures_beside_the_class_folders_are_noted(folder):
    put(folder / "stray.jpg")
    assert read(folder).notes == (f"left out: 1 image in {folder} outside of a class folder",)


def test_files_that_are_no_pictures_are_counted_by_their_endings(tmp_path):
    """In class folders, and in folders to predict; files of file managers are not counted."""
    for name in ("cat/1.jpg", "dog/2.jpg", "cat/3.HEIC", "cat/4.heic", "dog/x/5.psd", "dog/notes", "dog/Thumbs.db"):
        put(tmp_path / name)
    put(tmp_path / "cat" / ".hidden.psd")
    counted = f"left out: 4 files below {tmp_path} without the suffix of an image: 2 .heic, 1 .psd, 1 without a suffix"
    advice = "; pip install pillow-heif reads .heic"
    assert read(tmp_path).notes == (counted + advice,)
    assert unlabelled_images([str(tmp_path)]).notes == (counted + advice,)


@pytest.mark.parametrize("other", ["val", "validation", "test", "eval"])
def test_the_parts_of_a_folder(tmp_path, other):
    put(tmp_path / "train/a/1.jpg")
    put(tmp_path / "train/b/1.jpg")
    put(tmp_path / other / "b/1.jpg")
    assert evaluation_source(str(tmp_path)) == str(tmp_path)
    train = read(tmp_path)
    held_back = read(tmp_path, "eval", classes=train.classes)
    assert [train[0].name, train[1].name, held_back[0].name] == ["a/1.jpg", "b/1.jpg", "b/1.jpg"]
    assert held_back.classes == ["a", "b"]
    assert held_back.labels.tolist() == [1]
    assert evaluation_source(str(tmp_path / "train")) is None
    assert len(read(tmp_path / other, classes=train.classes)) == 1


def test_a_class_called_train_is_no_part(tmp_path):
    put(tmp_path / "train/1.jpg")
    put(tmp_path / "plane/1.jpg")
    assert read(tmp_path).classes == ["plane", "train"]
    assert evaluation_source(str(tmp_path)) is None


def test_faults_of_folders(tmp_path):
    put(tmp_path / "train/a/1.jpg")
    put(tmp_path / "train/b/readme.txt")
    fault(tmp_path, f"{tmp_path}/train/b: a class folder has no images", "its 1 file ends in .txt", ".png")
    put(tmp_path / "train/b/1.jpg")
    fault(tmp_path, "there is train/, but none of val/", split="eval")
    put(tmp_path / "val/c/1.jpg")
    what = "class 'c' is not among the 2 classes of the training data"
    fault(tmp_path, f"{tmp_path}/val/c: {what}", "The classes are: a, b", split="eval", classes=["a", "b"])
    (tmp_path / "none").mkdir()
    fault(tmp_path / "none", "there are no class folders", "none/CLASS/NAME.jpg")
    fault(tmp_path / "trian", "no such file or folder", "did you mean train?")
    fault(tmp_path / "train/a/1.jpg", "data.train is not a source of images")


@pytest.mark.parametrize(
    ("other", "recipe"), [("masks", "segmentation"), ("annotations", "detection"), ("Labels", "detection")]
)
def test_data_of_another_recipe_are_no_classes(tmp_path, other, recipe):
    images = "Images" if other[0].isupper() else "images"
    for part in ("train", "val"):
        put(tmp_path / part / images / "0.jpg")
        put(tmp_path / part / other / "0.jpg")
    for split in ("train", "eval"):
        fault(
            tmp_path,
            " and ".join(f"{name}/" for name in sorted([images, other])) + " are not classes",
            f"lockstep train {recipe}",
            split=split,
        )
    put(tmp_path / "train" / "others" / "0.jpg")
    assert read(tmp_path).classes == sorted([images, other, "others"])


def test_a_file_that_went_away_is_named(folder):
    records = read(folder)
    (folder / "cat/3.jpg").unlink()
    with pytest.raises(DataError, match=re.escape(f"{folder}/cat/3.jpg: cannot be read: No such file")):
        records[1]


def fixed_time(path, value):
    """A BMP file of 1x1 pixels whose size and time of change tell nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (1, 1), value).save(path)
    os.utime(path, ns=(1, 1))
    return path


def picture_table(folder, *, value):
    fixed_time(folder / "a.bmp", value)
    return put(folder / "t.csv", b"path,label\na.bmp,x\n")


def picture_shard(folder, *, value):
    data = fixed_time(folder / "a.bmp", value).read_bytes()
    made = shard(folder / "s.tar", [("a.bmp", data), ("a.cls", b"x")])
    os.utime(made, ns=(1, 1))
    return made


def picture_set(folder, *, value):
    datasets = pytest.importorskip("datasets")
    path = fixed_time(folder / "a.bmp", value)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    made = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": str(path)}], "label": ["x"]}, features)
    made.save_to_disk(folder / "saved")
    return folder / "saved"


def class_folder(folder, *, value):
    return fixed_time(folder / "x/a.bmp", value).parent.parent


@pytest.mark.parametrize("make", [class_folder, picture_table, picture_shard, picture_set])
def test_the_digest_tells_sources_with_equal_names_sizes_and_times_apart(make, tmp_path):
    one, other = make(tmp_path / "one", value=0), make(tmp_path / "other", value=255)
    first = read(one).digest()
    assert read(one).digest() == first
    assert read(other).digest() != first


@pytest.mark.parametrize("make", [class_folder, picture_table, picture_shard])
def test_the_digest_changes_where_a_file_takes_the_place_of_another(make, tmp_path):
    source = make(tmp_path / "one", value=0)
    first = read(source).digest()
    make(tmp_path / "one", value=255)
    assert read(source).digest() != first


def test_the_digest_changes_where_a_file_changes_that_a_data_set_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    paths = [str(fixed_time(tmp_path / f"{number}.bmp", number)) for number in range(3)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    data = datasets.Dataset.from_dict({"image": paths, "label": ["x", "y", "z"]}, features)
    first, again = (read_data_set(data, ClassificationColumnsOptions(), name="set")[0].digest() for _ in range(2))
    assert first == again
    fixed_time(tmp_path / "1.bmp", 255)
    assert read_data_set(data, ClassificationColumnsOptions(), name="set")[0].digest() != first


def test_the_digest_changes_with_any_file(folder):
    first = read(folder).digest()
    os.utime(folder / "cat/3.jpg", ns=(1, 1))
    assert read(folder).digest() != first


def test_a_pipe_is_no_picture(folder):
    before = len(read(folder))
    os.mkfifo(folder / "cat/pipe.jpg")
    os.symlink(folder / "cat/pipe.jpg", folder / "cat/link.jpg")
    assert len(read(folder)) == before
    for number in range(40):
        put(folder / f"many/{number}.jpg")
    os.mkfifo(folder / "many/pipe.jpg")
    rows = [f"many/{number}.jpg,x" for number in range(40)]
    fault(table(folder, *rows, "many/pipe.jpg,x"), "there is no file", "many/pipe.jpg")


def test_an_archive_is_to_be_unpacked(tmp_path):
    fault(put(tmp_path / "pictures.zip", b"PK"), "data.train is not a source of images", "Unpack it first")


def test_a_broken_picture_names_the_ways_to_go_on_without_it(folder):
    (folder / "cat/3.jpg").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"--allow-change data\.on_error") as caught:
        decode(read(folder)[1].data, channels=3)
    assert "predict: --on-error skip" in caught.value.remedy


# ---- tables


def table(folder, *rows, header="path,label"):
    return put(folder / "table.csv", "\n".join([header, *rows]).encode())


def test_paths_with_backslashes_are_read_with_a_note(folder):
    path = table(folder, r"cat\0.jpg,cat", "cat/3.jpg,cat", r"dog\1.jpg,dog")
    data = read(path)
    assert [data[index].data for index in range(3)] == [
        (folder / name).read_bytes() for name in ("cat/0.jpg", "cat/3.jpg", "dog/1.jpg")
    ]
    assert data.notes == (r"2 paths have backslashes, which are read as slashes, such as cat\0.jpg",)


def test_images_of_a_group_stay_together(tmp_path):
    names = [f"{kind}/video{video}/{frame}.jpg" for kind in "ab" for video in range(8) for frame in range(4)]
    for name in names:
        put(tmp_path / "set" / name)
    options = {"eval_fraction": 0.25, "columns": {"group": "folder"}}
    task = Classification(ClassificationOptions(**options), str(tmp_path / "set"))
    parts = [
        {os.path.dirname(data.records[row].name) for row in range(len(data))} for data in (task._train, task._eval)
    ]
    assert not parts[0] & parts[1]
    assert [len(part) for part in parts] == [12, 4]
    rows = [f"{name},{name[0]},{name.split('/')[1]}" for name in names]
    path = table(tmp_path / "set", *rows, header="path,label,video")
    task = Classification(ClassificationOptions(**options | {"columns": {"group": "video"}}), str(path))
    parts = [{data.records[row].name.split("/")[1] for row in range(len(data))} for data in (task._train, task._eval)]
    assert not parts[0] & parts[1]
    assert [len(part) for part in parts] == [6, 2]
    given = Classification(ClassificationOptions(columns={"group": "video"}), str(path), str(path))
    with pytest.raises(DataError, match="8 groups are in both"):
        given.eval_data()
    fault(tmp_path / "set", "a folder has no column 'video'", group="video")
    fault(path, "there is no column 'patient'", group="patient")


def test_faults_of_tables(folder):
    path = folder / "table.csv"
    table(folder, "cat/0.jpg,cat", "cat/1.jpg,cat", "dog/2.jpg,dog")
    error = fault(path, f"{path}:3: there is no file {folder}/cat/1.jpg (2 of 3 rows", "relative to the folder")
    assert "did you mean 0.jpg" in str(error) or "did you mean 3.jpg" in str(error)
    table(folder, "cat/0.jpg,cat", "elk/3.jpg,")
    fault(path, f"{path}:3: no label in column 'label'")
    table(folder, "cat/0.jpg,cat", ",dog")
    fault(path, f"{path}:3: no path in column 'path': ''")
    table(folder, "cat/0.jpg,cat", "elk/3.jpg,elk")
    fault(path, f"{path}:3: there is no file", f"there is no folder {folder}/elk")
    table(folder, "cat/0.jpg,cat", header="a,b")
    fault(path, "no column has a usual name for the label", "task.columns.label to one of: a, b")
    assert read(path, image="a", label=1).classes == ["cat"]
    fault(path, "there is no column 'c'", "task.columns.image", image="c", label="b")
    table(folder)
    fault(path, "no rows")
    table(folder, "cat/0.jpg,cat")
    what = "label 'cat' does not occur in the training data"
    fault(path, f"{path}:2 ({folder}/cat/0.jpg): {what}", split="eval", classes=["dog"])


def test_labels_are_places_in_the_training_classes(folder):
    table(folder, "cat/0.jpg,eel", "cat/0.jpg,10", "dog/1.jpg,9")
    assert read(folder / "table.csv").classes == ["10", "9", "eel"]
    table(folder, "cat/0.jpg,10", "cat/3.jpg,9")
    assert read(folder / "table.csv").classes == ["9", "10"]
    assert read(folder / "table.csv", classes=["7", "10", "9"]).labels.tolist() == [1, 2]


def test_many_rows_of_a_folder_are_checked_too(folder):
    for number in range(40):
        put(folder / f"many/{number}.jpg")
    rows = [f"many/{number}.jpg,a" for number in range(40)]
    assert len(read(table(folder, *rows))) == 40
    fault(table(folder, *rows, "many/40.jpg,b"), "table.csv:42")


def test_faults_of_data_sets(tmp_path):
    import datasets

    data = data_set(tmp_path, embed=True)
    data.remove_columns("img").save_to_disk(str(tmp_path / "bare"))
    fault(tmp_path / "bare", "no column has a usual name for the image")
    fault(tmp_path / "bare", "not images", "cast it first", image="label")
    data.remove_columns("label").save_to_disk(str(tmp_path / "unlabelled"))
    fault(tmp_path / "unlabelled", "no column has a usual name for the label")
    features = data.features
    empty = datasets.Dataset.from_dict({"img": [None], "label": [-1]}, features)
    empty.save_to_disk(str(tmp_path / "empty"))
    fault(tmp_path / "empty", "row 0: no label")
    datasets.Dataset.from_dict({"img": [None], "label": [1]}, features).save_to_disk(str(tmp_path / "null"))
    with pytest.raises(DataError, match="null, row 0: no image in column 'img'"):
        read(tmp_path / "null")[0]


# ---- shards


def test_the_index_lies_beside_the_shard_and_follows_its_changes(tmp_path):
    path = shard(tmp_path / "s.tar", wds(0))
    assert len(read(path)) == 1
    index = tmp_path / ".s.tar.index"
    kept = index.read_bytes()
    assert len(read(path)) == 1
    assert index.read_bytes() == kept
    shard(path, [*wds(0), *wds(1)])
    os.utime(path, ns=(5, 5))
    assert len(read(path)) == 2
    index.write_bytes(index.read_bytes()[:100])  # damaged
    assert len(read(path)) == 2
    shard(path, [*wds(0), *wds(2)])
    os.utime(path, ns=(6, 6))  # the same size
    assert read(path).classes == ["cat", "eel"]
    assert [file.name for file in tmp_path.iterdir() if "new" in file.name] == []


def test_a_kept_index_spares_reading_the_shard(tmp_path, monkeypatch):
    path = shard(tmp_path / "s.tar", wds(0))
    first = load_index(path, "label")
    monkeypatch.setattr(tarfile, "open", None)
    again = load_index(path, "label")
    assert (again.members, again.labels, again.offsets.tolist()) == (first.members, ["cat"], first.offsets.tolist())


def test_an_index_goes_to_the_cache_where_the_folder_of_the_shard_cannot_be_written(tmp_path, monkeypatch):
    path = shard(tmp_path / "s.tar", wds(0))
    replace = Path.replace
    fails = [path.parent]

    def refuse(self, target):
        if Path(target).parent in fails:
            raise PermissionError(13, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert len(read(path)) == 1
    assert not (tmp_path / ".s.tar.index").exists()
    (kept,) = (tmp_path / "cache").glob("shard-*.index")
    before = kept.stat().st_mtime_ns
    assert len(read(path)) == 1
    assert kept.stat().st_mtime_ns == before
    fails.append(kept.parent)
    kept.unlink()
    assert len(read(path)) == 1  # and without any place for it


def test_another_field_of_the_json(tmp_path):
    content = json.dumps({"label": 3, "kind": "x"}).encode()
    path = shard(tmp_path / "s.tar", [("1.png", jpeg(1)), ("1.json", content)])
    assert read(path).classes == ["3"]
    assert read(path, label="kind").classes == ["x"]
    fault(path, "member 1.png: no label", "KEY.json with the field 'color'", label="color")


def test_the_text_goes_before_the_json_and_other_members_are_noted(tmp_path):
    members = [
        ("1.jpg", jpeg(1)),
        ("1.seg.png", jpeg(2)),
        ("1.cls", b"12"),
        ("1.json", b'{"label": 3}'),
        ("README", b""),
    ]
    records = read(shard(tmp_path / "s.tar", members))
    assert records.classes == ["12"]
    assert records.notes == ("left out: 2 members of 1 shard without an image",)


def test_class_numbers_are_sorted_by_value(tmp_path):
    members = [
        (f"{n}.{kind}", jpeg(n) if kind == "jpg" else str(n).encode()) for n in (10, 9) for kind in ("jpg", "cls")
    ]
    records = read(shard(tmp_path / "s.tar", members))
    assert records.classes == ["9", "10"]
    assert records.labels.tolist() == [1, 0]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_folders_in_shards(tmp_path, form):
    path = tmp_path / "s.tar"
    long = "x" * 150 + "/" + "y" * 150
    with tarfile.open(path, "w", format=form) as tar:
        folder = tarfile.TarInfo("x" * 150)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in ((f"{long}.jpg", jpeg(1)), (f"{long}.cls", b"1"), ("ä.jpg", jpeg(2)), ("ä.cls", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    records = read(path)
    assert samples(records) == [(jpeg(1), "1"), (jpeg(2), "2")]
    assert records[0].name == f"s.tar/{long}.jpg"


def test_faults_of_shards(tmp_path):
    path = tmp_path / "s.tar"
    picture, label = wds(0)
    shard(path, [picture])
    fault(path, f"{path}, member dir/0000.jpg: no label", "KEY.cls")
    shard(path, [*wds(1), label])
    fault(path, f"{path}, KEY dir/0000: a label without an image")
    shard(path, [*wds(0), ("dir/0000.png", jpeg(1))])
    fault(path, f"{path}, member dir/0000.png: a second image of KEY, after dir/0000.jpg")
    shard(path, [picture, ("dir/0000.json", b"{")])
    fault(path, "member dir/0000.json: not JSON")
    shard(path, [picture, ("dir/0000.json", b"[1]")])
    fault(path, "member dir/0000.json: a JSON list, not an object")
    shard(path, [picture, ("dir/0000.json", b'{"label": [1]}')])
    fault(path, "the class in 'label' is [1]")
    shard(path, [picture, ("dir/0000.cls", b"\xff")])
    fault(path, "member dir/0000.cls: the class is not text")
    shard(path, [("README", b"no images")])
    fault(path, "no images in 1 shard")
    put(path, b"no tar file" * 100)
    fault(path, f"{path}: not a tar file")
    put(path, b"")
    fault(path, f"{path}: not a tar file")
    fault(tmp_path / "t.tar", "there is no such shard", "did you mean s.tar?")
    fault(tmp_path / "s-{0..1}.tar", f"{tmp_path}/s-0.tar: there is no such shard", "s-{0..1}.tar")
    fault(tmp_path / "s-{3..1}.tar", "{3..1} does not expand to a list of names")
    fault(tmp_path / "s.tar.gz", "a compressed shard")


def test_truncated_shards_name_shard_and_member(tmp_path):
    path = shard(tmp_path / "s.tar", [*wds(0), *wds(1)])
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\0"))
    for keep in range(512, used + 1, 512):
        put(path, whole[:keep])
        error = fault(path)
        assert re.search(r"s\.tar, (after )?(member|KEY) dir/000|member dir/000", error.where), (keep, error)
    for keep in (700, 513, used - 1):
        put(path, whole[:keep])
        fault(path)
    put(path, whole[: -(-used // 512) * 512 + 512])  # the shortest that is whole: one block of the end mark
    assert len(read(path)) == 2


def test_joined_and_damaged_shards(tmp_path):
    one, two = (shard(tmp_path / f"{n}.tar", wds(n)).read_bytes() for n in range(2))
    fault(put(tmp_path / "joined.tar", one + two), "after the end mark", "`cat`")
    member = -(-len(jpeg(0)) // 512) * 512 + 512
    damaged = bytearray(one)
    damaged[member : member + 512] = b"x" * 512
    fault(put(tmp_path / "damaged.tar", bytes(damaged)), "the next header is invalid", "after member dir/0000.jpg")


def test_links_in_shards_are_refused(tmp_path):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("1.jpg")
        member.type, member.linkname = tarfile.LNKTYPE, "0.jpg"
        tar.addfile(member)
    fault(path, "member 1.jpg: the member is not a regular file", "--hard-dereference")


def test_a_shard_that_shrinks_after_it_was_indexed_is_named(tmp_path):
    path = shard(tmp_path / "s.tar", [*wds(0), *wds(1)])
    records = read(path)
    os.truncate(path, 2048)
    with pytest.raises(DataError, match=r"s\.tar, member dir/0001\.jpg: the shard was truncated since it was indexed"):
        records[1]


def test_few_files_are_open_at_a_time(tmp_path):
    for number in range(8):
        shard(tmp_path / f"{number}.tar", wds(number))
    pictures, _, _, _ = read_shards(str(tmp_path), label="label")
    pictures._most_open = 3
    for index in (*range(8), *reversed(range(8))):
        assert pictures.read(index) == jpeg(index)
        assert len(pictures._open) <= 3
    copy = pickle.loads(pickle.dumps(pictures))
    assert copy._open == {}
    assert copy.read(5) == jpeg(5)
    assert isinstance(copy, ShardImages)


def _read_in_child(records, start, put_result):
    order = np.random.default_rng(start).permutation(len(records))
    put_result.put(all(records[int(index)].data == jpeg(int(index)) for _ in range(30) for index in order))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_forked_processes_share_a_shard_without_disturbing_each_other(tmp_path):
    records = read(shard(tmp_path / "s.tar", [member for number in range(20) for member in wds(number)]))
    assert records[0].data == jpeg(0)  # the file is open before the fork
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    children = [fork.Process(target=_read_in_child, args=(records, n, results)) for n in range(3)]
    for child in children:
        child.start()
    assert [results.get(timeout=HANG_S) for _ in children] == [True, True, True]
    for child in children:
        child.join()


def test_brace_patterns(tmp_path):
    for name in ("s-08", "s-09", "s-10", "a-1", "b-1"):
        shard(tmp_path / f"{name}.tar", wds(0))
    names = [path.name for path in find_shards(f"{tmp_path}/s-{{08..10}}.tar")]
    assert names == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert [path.name for path in find_shards(f"{tmp_path}/a-{{1..1}}.tar")] == ["a-1.tar"]
    os.rename(tmp_path / "a-1.tar", tmp_path / "{1..2}.tar")
    assert [path.name for path in find_shards(f"{tmp_path}/{{1..2}}.tar")] == ["{1..2}.tar"]


# ---- images to predict


def test_pictures_to_predict(folder, tmp_path):
    other = put(tmp_path / "one.dat")
    records = unlabelled_images([str(other), str(folder), f"{folder}/dog/*.jpg", f"{folder}/**/0.jpg"])
    names = [Path(records[index].name).name for index in range(len(records))]
    assert names == ["one.dat", "0.jpg", "3.jpg", "1.jpg", "4.jpg", "2.jpg", "5.jpg"]  # each once
    assert set(records.labels.tolist()) == {-1}
    with pytest.raises(UsageError, match="no such file or folder"):
        unlabelled_images([str(folder / "cat" / "9.jpg")])
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="no file in this folder"):
        unlabelled_images([str(tmp_path / "bare")])
    path = shard(tmp_path / "s.tar", [wds(0)[0]])
    assert unlabelled_images([str(path)])[0].label == -1
    with pytest.raises(DataError, match="cannot be combined"):
        unlabelled_images([str(path), str(folder)])


def test_packed_texts_are_any_file_name():
    texts = ["a", "", "\N{SNOWMAN}", os.fsdecode(b"\xff.jpg"), "z" * 300]
    packed = PackedText(texts)
    assert [packed[index] for index in range(len(packed))] == texts
    assert len(PackedText([])) == 0


# ---- real data


def test_real_folders(shared_data):
    root = shared_data / "classification" / "fashion_mnist"
    train = read(root)
    held_back = read(root, "eval", classes=train.classes)
    assert (len(train), len(held_back), len(train.classes)) == (2000, 500, 10)
    assert np.bincount(held_back.labels).tolist() == [50] * 10
    assert evaluation_source(str(root)) == str(root)
