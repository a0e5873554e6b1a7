"""`lockstep look` on CT volumes."""

import shutil

import numpy as np
import pytest

from lockstep.configs import registry
from lockstep_recipes.look.finding import ALL, HEAD
from lockstep_recipes.look.look import look
from packages.recipes.tests.tasks.ct.volumes import scans

pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")

SCRATCH = {"architecture": "vit", "sizes": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    rows = ["image,patient_id,split,death_1y"]
    for number in range(6):
        scans.write_dicom(tmp_path / f"scan{number}", scans.voxels(8, seed=number), series=f"1.2.{number}")
        rows.append(f"scan{number},p{number},{'train' if number < 4 else 'val'},{number % 2}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def found(folder, extent=ALL):
    task = registry.build_task({"kind": "volume_risk", "scratch": SCRATCH}, str(folder / "labels.csv"), None)
    return {fault.first.code: fault.first for fault in look(task, extent)}


def test_nothing_is_found_in_clean_data_and_the_head_of_a_log_opens_no_volume(folder):
    assert found(folder) == {}
    shutil.rmtree(folder / "cache", ignore_errors=True)
    for path in (folder / "scan0").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert found(folder, HEAD) == {}
    assert "scan0" in found(folder)["unreadable"].file


def test_what_the_reader_corrects_is_named(folder):
    def pad(number, dataset):
        dataset.PixelPaddingValue = 20
        dataset.PixelData = np.full((dataset.Rows, dataset.Columns), 20 + number % 2 * 100, np.int16).tobytes()

    def high(number, dataset):
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, 500

    scans.write_dicom(folder / "scan1", scans.voxels(8, seed=9), series="1.2.1", change=high)
    assert "may not be Hounsfield" in found(folder)["volume-note"].what
    shutil.rmtree(folder / "scan1")
    scans.write_dicom(folder / "scan1", scans.voxels(8, seed=9), series="1.2.1")
    path = next((folder / "scan1").iterdir())
    path.write_bytes(path.read_bytes()[132:])
    assert "no preamble" in found(folder)["volume-note"].what


def test_copies_and_scans_of_few_slices_are_named(folder):
    shutil.rmtree(folder / "scan4")
    shutil.copytree(folder / "scan0", folder / "scan4")
    assert "scan4" in found(folder)["train-in-eval"].file
    shutil.rmtree(folder / "scan4")
    scans.write_dicom(folder / "scan4", scans.voxels(1, seed=9), series="1.2.4")
    assert {code for code, one in found(folder).items() if "scan4" in one.file} <= {"few-slices"}


@pytest.mark.parametrize(("distance", "is_odd"), [(1.0, True), (2.5, False)])
def test_a_scan_that_is_much_shorter_than_others_with_as_many_slices_is_named(folder, distance, is_odd):
    shutil.rmtree(folder / "scan2")
    scans.write_dicom(folder / "scan2", scans.voxels(8, seed=2), series="1.2.2", spacing=(distance, 0.8, 0.7))
    odd = found(folder)
    assert set(odd) == ({"odd-length"} if is_odd else set())
    if is_odd:
        assert "scan2" in odd["odd-length"].file
        assert "1.00 mm apart, 7 mm in total" in odd["odd-length"].what


def test_bright_padding_and_equal_volumes_with_different_labels_are_named(folder):
    values = scans.voxels(8, seed=2)
    values[:, 0] = np.iinfo(np.int16).max
    shutil.rmtree(folder / "scan2")
    scans.write_dicom(folder / "scan2", values, series="1.2.2", intercept=0.0)
    shutil.rmtree(folder / "scan1")
    shutil.copytree(folder / "scan0", folder / "scan1")
    odd = found(folder)
    assert set(odd) == {"bright-padding", "label-conflict"}
    assert "scan2" in odd["bright-padding"].file
    assert "scan1" in odd["label-conflict"].file
