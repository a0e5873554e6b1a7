"""Tables of volumes: labels that are known in part, patients, parts, and every wrong row named."""

import json

import numpy as np
import pytest

from lockstep.core.errors import DataError, UsageError
from lockstep_recipes.tasks.ct.options import VolumeRiskOptions
from lockstep_recipes.tasks.ct.volume_table import check_patients_apart, horizons, read_volume_table
from packages.recipes.tests.tasks.ct.volumes import scans

pytest.importorskip("nibabel")

HEADER = "patient_id,image,split,status,death_1y,death_3y,relapse"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that writes a table with the columns of `HEADER`, beside the volumes a.npz to h.npz."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for number, name in enumerate("abcdefgh"):
        np.savez(tmp_path / f"{name}.npz", slices=scans.voxels(4 + number, seed=number), spacing=(2.0, 1.0, 1.0))

    def write(*rows, header=HEADER, name="labels.csv"):
        (tmp_path / name).write_text("\n".join([header, *rows]) + "\n")
        return str(tmp_path / name)

    return write


def read(source, split="train", *, questions=None, fold=None, image=None, **options):
    options = VolumeRiskOptions(columns={"image": image}, **options)
    return read_volume_table(source, split, options, questions=questions, fold=fold)


ROWS = ("p1,a.npz,train,D,0,1,1", "p2,b.npz,train,A,0,,", "p3,c.npz,val,A,1,1,0", "p4,d.npz,train,A,,,")


def test_samples(table):
    source = table(*ROWS)
    data = read(source, labels=["death_*", "relapse"])
    assert len(data) == 2
    assert data.questions == ["death_1y", "death_3y", "relapse"]
    np.testing.assert_array_equal(data.labels, np.array([[0, 1, 1], [0, np.nan, np.nan]], dtype=np.float32))
    assert data.labels.dtype == np.float32
    assert data.patients == ["p1", "p2"]
    assert any("left out: 1 row without a known label" in note for note in data.notes)
    sample = data[1]
    np.testing.assert_array_equal(sample.slices, scans.voxels(5, seed=1))
    np.testing.assert_array_equal(sample.positions, 2.0 * np.arange(5))
    assert (sample.patient, sample.name, sample.index) == ("p2", "b.npz", 1)
    assert data.where(1) == f"{source}:3"
    evaluation = read(source, "eval", questions=data.questions)
    assert evaluation.patients == ["p3"]
    assert any("no volume has the answer no to death_1y" in note for note in evaluation.notes)
    check_patients_apart(data, evaluation)


def test_labels_with_a_time_are_the_usual_questions(table):
    assert read(table(*ROWS)).questions == ["death_1y", "death_3y"]
    with pytest.raises(DataError, match="no column has the name of a label"):
        read(table("a.npz,1", header="image,relapse"))
    with pytest.raises(DataError, match="there is no label column 'deth_1y'"):
        read(table(*ROWS), labels=["deth_1y"])


def test_spellings_of_labels(table):
    values = read(table("p,a.npz,train,A, 1 ,1.0,", "q,b.npz,train,A,0.0,nan,"), labels=["death_1y", "death_3y"]).labels
    np.testing.assert_array_equal(values, [[1, 1], [0, np.nan]])
    for wrong in ("2", "yes", "0.5", "-1"):
        with pytest.raises(
            DataError, match=f"the label in column 'death_3y' is '{wrong}', not 0, 1 or blank"
        ) as caught:
            read(table("p,a.npz,train,A,1,1,", f"q,b.npz,train,A,0,{wrong},"))
        assert caught.value.where.endswith("labels.csv:3")


def test_an_event_that_is_taken_back(table):
    source = table(*ROWS, "p5,e.npz,train,A,1,0,")
    with pytest.raises(DataError, match="death_1y is 1 but death_3y is 0") as caught:
        read(source)
    assert caught.value.where == f"{source}:6"
    read(table("p5,e.npz,train,A,0,1,"))
    for early, late in (("1", "0"), ("0", "1")):  # the same time in two units
        with pytest.raises(DataError, match="an event within the shorter time is also within the longer one"):
            read(table(f"p5,e.npz,{early},{late}", header="patient,image,death_1y,death_12m"))


def test_horizons():
    names = ["death_3y", "death_12m", "x", "relapse-6 months", "death_90d", "y1", "2years"]
    assert horizons(names) == {
        "death": [(90 / 365, 4), (1.0, 1), (3.0, 0)],
        "relapse": [(0.5, 3)],
        "": [(2.0, 6)],
    }


def test_paths_that_do_not_exist(table):
    source = table(*ROWS, "p5,x.npz,train,A,1,1,", "p6,,train,A,1,1,")
    with pytest.raises(
        DataError, match=r"2 of 4 volumes not found: .*labels.csv:6 \(x.npz\), .*labels.csv:7 \(blank\)"
    ):
        read(source)
    with pytest.raises(DataError, match=r"1 volume has several rows: .*a\.npz"):
        read(table("p1,a.npz,train,D,0,1,1", "p2,a.npz,train,D,0,1,1"))


def test_a_patient_in_both_parts(table):
    source = table(*ROWS, "p1,e.npz,val,A,0,0,")
    with pytest.raises(DataError, match=r"1 patient is in .*: p1 \(.*labels.csv:2 and .*labels.csv:6\)"):
        check_patients_apart(read(source), read(source, "eval"))


def test_a_volume_in_both_parts(table, tmp_path):
    train = read(table("p1,a.npz,1", "p2,b.npz,0", header="patient,image,death_1y"))
    other = read(table("p9,./b.npz,1", header="patient,image,death_1y", name="other.csv"), "eval")
    with pytest.raises(DataError, match=r"1 volume is in .*b.npz \(.*labels.csv:3 and .*other.csv:2\)"):
        check_patients_apart(train, other)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    np.savez(elsewhere / "a.npz", slices=scans.voxels(), spacing=(2.0, 1.0, 1.0))
    train = read(table("a.npz,1", header="image,death_1y"))
    check_patients_apart(train, read(table("a.npz,1", header="image,death_1y", name="elsewhere/t.csv"), "eval"))


def test_a_part_that_is_none(table):
    with pytest.raises(DataError, match="'later' in column 'split' is not a split"):
        read(table(*ROWS, "p5,e.npz,later,A,0,0,"))
    source = table(*ROWS[:2])
    with pytest.raises(DataError, match="contains no volume for eval: column 'split' has 'train' in 2 rows") as caught:
        read(source, "eval")
    assert "set data.fold=1/5" in caught.value.remedy


def test_folds_leave_no_patient_in_both_parts(table):
    rows = [f"p{number // 2},{name}.npz,{number % 2},,," for number, name in enumerate("abcdefgh")]
    source = table(*rows, header="patient,image,death_1y,death_3y,relapse,status")
    seen = []
    for number in range(1, 5):
        train, evaluation = (read(source, split, fold=f"{number}/4") for split in ("train", "eval"))
        check_patients_apart(train, evaluation)
        assert sorted(train.names + evaluation.names) == [f"{name}.npz" for name in "abcdefgh"]
        seen += evaluation.names
    assert sorted(seen) == sorted(train.names + evaluation.names)
    with pytest.raises(UsageError, match="is not a fold"):
        read(source, fold="5/4")


@pytest.mark.parametrize("header", ["patient,image,death_1y", "image,death_1y"])
def test_folds_do_not_depend_on_the_order_of_rows_and_the_name_of_the_table(table, header):
    first = 3 - len(header.split(","))
    rows = [
        ",".join((f"p{number}", f"{name}.npz", "1" if number < 3 else "0")[first:])
        for number, name in enumerate("abcdefgh")
    ]
    one, other = table(*rows, header=header), table(*rows[::-1], header=header, name="other.csv")
    for number in (1, 2, 3):
        assert set(read(one, "eval", fold=f"{number}/3").names) == set(read(other, "eval", fold=f"{number}/3").names)


def test_rows_that_are_not_used_are_noted(table):
    header = "patient,image,split,death_1y"
    source = table("p1,a.npz,train,1", "p2,b.npz,val,0", "p3,c.npz,test,1", "p4,d.npz,test,0", header=header)
    assert "not used: 2 rows of other evaluation splits: test" in read(source, "eval").notes
    assert "folds use all rows: column 'split' is ignored" in read(source, fold="1/2").notes


def test_columns_that_hold_the_outcome(table):
    source = table(*ROWS)
    read(source, leaks=["status", "death_*"])
    with pytest.raises(UsageError, match="status contains the outcome"):
        read(source, image="status", leaks=["stat*"])
    with pytest.raises(DataError, match="there is no column 'statu'"):
        read(source, leaks=["statu"])


def test_without_a_column_of_patients_each_row_is_a_patient(table):
    data = read(table("a.npz,1", "b.npz,0", header="image,death_1y"))
    assert len(set(data.patients)) == 2
    assert any("each volume counts as a patient" in note for note in data.notes)
    with pytest.raises(DataError, match="no patient in column 'patient'"):
        read(table("a.npz,1,x", "b.npz,0,", header="image,death_1y,patient"))


def test_patients_are_the_same_text_in_every_format(table, tmp_path):
    rows = [{"patient": 3, "image": "a.npz", "death_1y": 1}, {"patient": 4.0, "image": "b.npz", "death_1y": None}]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "patient": "5", "image": "c.npz"}])))
    assert read(str(source)).patients == ["3", "5"]
    assert read(str(source), "eval").patients == ["3", "4", "5"]
    source.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "patient": None, "image": "c.npz"}])))
    with pytest.raises(DataError, match="no patient in column 'patient'"):
        read(str(source))


def test_a_volume_that_cannot_be_used_is_named_with_its_row(table, tmp_path):
    source = table(*ROWS)
    data = read(source)
    (tmp_path / "a.npz").write_text("nothing")
    with pytest.raises(DataError, match="not readable as NumPy") as caught:
        data[0]
    assert caught.value.where.startswith(f"{source}:2: ")
    (tmp_path / "b.npz").write_text("nothing")
    for index in range(2):
        with pytest.raises(DataError, match=f"labels.csv:{index + 2}: .*not readable as NumPy"):
            data.check(index)


def test_check_fills_the_cache_and_gives_remarks(table, tmp_path):
    data = read(table(*ROWS))
    np.savez(tmp_path / "a.npz", slices=scans.voxels() + 1000, spacing=(1.0, 1, 1))
    assert data.check(0).startswith("a.npz: no value is below 0")
    assert data.check(1) is None
    assert len(list((tmp_path / "cache").glob("volume-*/slices.npy"))) == 2


def test_a_digest_changes_with_labels_volumes_and_options(table, tmp_path):
    source = table(*ROWS)
    digests = [read(source).digest(), read(source, slice_distance_mm=5.0).digest()]
    assert read(source).digest() == digests[0]
    np.savez(tmp_path / "a.npz", slices=scans.voxels(9), spacing=(1.0, 1, 1))
    digests.append(read(source).digest())
    digests.append(read(table("p1,a.npz,train,D,0,0,1", *ROWS[1:])).digest())
    assert len(set(digests)) == 4


def test_real_patients(shared_data, table):
    source = str(shared_data / "ct/sts/labels.csv")
    train, evaluation = read(source), read(source, "eval")
    assert (len(train), len(evaluation), len(train.questions)) == (18, 6, 15)
    check_patients_apart(train, evaluation)
    known = np.isnan(np.concatenate([train.labels, evaluation.labels])).mean()
    assert round(float(known), 2) == 0.36
    assert [train.check(index) for index in range(18)] == 18 * [None]
    sizes = [len(sample.slices) for sample in train]
    assert (min(sizes) >= 47, max(sizes) <= 114) == (True, True)
    series = read(str(shared_data / "ct/sts_dicom/labels.csv"), questions=train.questions)
    sample, small = series[0], train[train.patients.index("STS_019")]
    np.testing.assert_allclose(sample.positions, small.positions, atol=1e-3)
    np.testing.assert_array_equal(sample.labels, small.labels)
