"""Reading volumes: every format and orientation gives the same volume, and what cannot be read is named."""

import glob
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep_recipes.tasks.ct.volumes.read import read_volume
from packages.recipes.tests.tasks.ct.volumes import scans
from tests.selection import mainly

pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")

SPACING = (3.0, 0.8, 0.7)


def assert_is(volume, values, spacing=SPACING):
    assert volume.slices.dtype == np.int16
    assert volume.positions.dtype == np.float32
    np.testing.assert_array_equal(volume.slices, values)
    np.testing.assert_allclose(volume.spacing, spacing, rtol=1e-6)
    np.testing.assert_allclose(volume.positions, spacing[0] * np.arange(len(values)), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("axes", ["LPS", "RAS", "LAI", "SPL", "ARS", "IRP"])
@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.int32])
def test_nifti_in_any_orientation(tmp_path, axes, dtype):
    values = scans.voxels()
    volume = read_volume(scans.write_nifti(tmp_path / "a.nii.gz", values, axes=axes, dtype=dtype))
    assert_is(volume, values)
    assert volume.notes == ()


def test_slope_and_intercept_of_nifti(tmp_path):
    import nibabel

    values = scans.voxels()
    image = nibabel.Nifti1Image((values // 2 + 300).transpose(2, 1, 0).astype(np.int16), np.diag([-1.0, -1, 1, 1]))
    image.header.set_slope_inter(2, -600)
    nibabel.save(image, tmp_path / "a.nii")
    np.testing.assert_array_equal(read_volume(tmp_path / "a.nii").slices, values // 2 * 2)


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, -1024.0), (1.0, 0.0), (0.5, -1000.0)])
def test_a_series_is_sorted_and_rescaled(tmp_path, slope, intercept):
    values = scans.voxels(9)
    assert_is(read_volume(scans.write_dicom(tmp_path / "a", values, slope=slope, intercept=intercept)), values)


def test_slope_and_intercept_may_differ_between_slices(tmp_path):
    values = scans.voxels()

    def change(number, dataset):
        stored = values[number].astype(np.int16) + 10 * number
        dataset.RescaleIntercept, dataset.PixelData = -10.0 * number, stored.tobytes()

    assert_is(read_volume(scans.write_dicom(tmp_path / "a", values, change=change)), values)


def test_a_series_in_another_orientation_is_the_same_volume(tmp_path):
    values = scans.voxels()

    def turned(number, dataset):  # prone: columns to the right, rows to the front
        dataset.ImageOrientationPatient = [-1, 0, 0, 0, -1, 0]
        dataset.PixelData = (values[number, ::-1, ::-1] + 1024).astype(np.int16).tobytes()

    assert_is(read_volume(scans.write_dicom(tmp_path / "prone", values, change=turned)), values)


def test_a_sagittal_series_is_cut_into_axial_slices(tmp_path):
    values = scans.voxels(6, rows=5, columns=4)
    planes = values.transpose(2, 0, 1)[:, ::-1]  # columns of the volume; rows go from head to feet

    def change(number, dataset):
        dataset.ImageOrientationPatient = [0, 1, 0, 0, 0, -1]
        dataset.ImagePositionPatient = [0.7 * number, 0.0, 0.0]
        dataset.PixelSpacing = [3.0, 0.8]

    volume = read_volume(scans.write_dicom(tmp_path / "a", planes, change=change))
    assert_is(volume, values)
    assert "not axial" in volume.notes[0]


@pytest.mark.parametrize("patient", mainly(["STS_019"], ["STS_019", "STS_024"]))
def test_a_real_patient_from_dicom_and_from_nifti(shared_data, tmp_path, patient):
    folder = shared_data / "ct/sts_dicom" / patient
    volume = read_volume(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = [pydicom.dcmread(file) for file in glob.glob(f"{folder}/*.dcm")]
        datasets.sort(key=lambda dataset: float(dataset.ImagePositionPatient[2]))
        plain = np.stack([dataset.pixel_array for dataset in datasets])
    np.testing.assert_array_equal(volume.slices, plain)
    for axes in ("LPS", "RAS", "PIR"):
        copy = scans.write_nifti(tmp_path / "a.nii.gz", plain, spacing=volume.spacing, axes=axes)
        assert_is(read_volume(copy), plain, volume.spacing)
    # The NIfTI files of the data set are means of 3x3 pixels of the series, rounded.
    small = read_volume(shared_data / f"ct/sts/images/{patient}.nii.gz")
    count, height, width = small.slices.shape
    blocks = plain[:, : 3 * height, : 3 * width].astype(np.float64).reshape(count, height, 3, width, 3)
    assert np.abs(blocks.mean((2, 4)) - small.slices).max() <= 0.5
    np.testing.assert_allclose(small.positions, volume.positions, atol=1e-3)


@pytest.mark.exhaustive
def test_monai_reads_the_same(tmp_path):
    readers = pytest.importorskip("monai.data.image_reader")
    orientation = pytest.importorskip("monai.transforms").Orientation
    torch = pytest.importorskip("torch")
    from monai.data import MetaTensor

    values = scans.voxels(7)

    def in_order(number, dataset):  # MONAI sorts by instance number
        dataset.InstanceNumber = number

    def by_monai(reader, path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array, meta = reader.get_data(reader.read(path))
            image = MetaTensor(
                torch.as_tensor(np.ascontiguousarray(array))[None], affine=torch.as_tensor(meta["affine"])
            )
            return orientation("LPS")(image)[0].numpy().transpose(2, 1, 0)

    folder = scans.write_dicom(tmp_path / "a", values, change=in_order)
    file = scans.write_nifti(tmp_path / "a.nii.gz", values, axes="RSA")
    np.testing.assert_array_equal(by_monai(readers.PydicomReader(), folder), read_volume(folder).slices)
    np.testing.assert_array_equal(by_monai(readers.NibabelReader(), file), read_volume(file).slices)


def test_gantry_tilt_is_reported_in_both_formats(tmp_path):
    values, tilt = scans.voxels(), np.radians(15)

    def change(number, dataset):
        dataset.ImageOrientationPatient = [1, 0, 0, 0, float(np.cos(tilt)), float(np.sin(tilt))]
        dataset.ImagePositionPatient = [0.0, 0.0, 3.0 * number]

    volume = read_volume(scans.write_dicom(tmp_path / "a", values, change=change))
    np.testing.assert_array_equal(volume.slices, values)
    assert "tilted by 15.0 degrees" in volume.notes[0]
    np.testing.assert_allclose(volume.positions, 3 * np.cos(tilt) * np.arange(6), rtol=1e-5)
    shear = np.diag([-0.7, -0.8, 3.0, 1.0])
    shear[:3, 1] = 0.8 * np.array([0, -np.cos(tilt), np.sin(tilt)])
    same = read_volume(scans.write_nifti(tmp_path / "a.nii", values, affine=shear))
    np.testing.assert_array_equal(same.slices, values)
    np.testing.assert_allclose(same.positions, volume.positions, rtol=1e-5)
    assert same.notes == volume.notes


def test_slices_that_are_shifted_to_the_side_are_noted(tmp_path):
    def shifted(number, dataset):
        dataset.ImagePositionPatient = [-10.0 + (25 if number == 3 else 0), -20.0, 100.0 + 3 * number]

    values = scans.voxels()
    volume = read_volume(scans.write_dicom(tmp_path / "a", values, change=shifted))
    assert_is(volume, values)
    assert volume.notes == ("slices are shifted to the side by up to 25.0 mm; this is not corrected",)


def test_compressed_slices(tmp_path):
    def compressed(number, dataset):
        dataset.compress(pydicom.uid.RLELossless)

    def unknown(number, dataset):
        dataset.PixelData = pydicom.encaps.encapsulate([bytes(64)])
        dataset["PixelData"].VR, dataset["PixelData"].is_undefined_length = "OB", True
        dataset.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLossless

    values = scans.voxels()
    assert_is(read_volume(scans.write_dicom(tmp_path / "a", values, change=compressed)), values)
    with pytest.raises(DataError, match=r"not readable as DICOM.*[\s\S]*pylibjpeg\[all\]"):
        read_volume(scans.write_dicom(tmp_path / "b", values, change=unknown))


def test_missing_slices(tmp_path):
    values = scans.voxels(9)
    folder = scans.write_dicom(tmp_path / "a", values, change=lambda number, _: number not in (4, 5))
    with pytest.raises(DataError, match=r"about 2 slices are missing: between 109\.0 and 118\.0 mm"):
        read_volume(folder)
    volume = read_volume(folder, allow_gaps=True)
    np.testing.assert_array_equal(volume.slices, np.delete(values, (4, 5), axis=0))
    np.testing.assert_allclose(volume.positions, 3.0 * np.array([0, 1, 2, 3, 6, 7, 8]))
    assert any("2 slices are missing" in note for note in volume.notes)


def test_doubled_slices(tmp_path):
    values = scans.voxels()
    folder = scans.write_dicom(tmp_path / "a", values)
    first = min(folder.iterdir())
    (folder / "copy.dcm").write_bytes(first.read_bytes())
    volume = read_volume(folder)
    assert_is(volume, values)
    assert volume.notes == ("1 duplicate slice is left out",)
    dataset = pydicom.dcmread(first)
    dataset.PixelData = bytes(len(dataset.PixelData))
    dataset.save_as(folder / "copy.dcm")
    with pytest.raises(DataError, match="two different slices at the position"):
        read_volume(folder)


def test_two_series_are_named(tmp_path):
    scans.write_dicom(tmp_path / "a", scans.voxels(), series="1.2.3")
    scans.write_dicom(tmp_path / "a", scans.voxels(4), series="1.2.4")
    with pytest.raises(DataError, match=r"2 series: 1\.2\.3 .*with 6 slices; 1\.2\.4 .*with 4 slices"):
        read_volume(tmp_path / "a")


def test_other_files_in_the_folder_are_left_out(tmp_path):
    values = scans.voxels()
    folder = scans.write_dicom(tmp_path / "a" / "deeper", values).parent
    (folder / "notes.txt").write_text("no DICOM")
    (folder / ".hidden").write_text("")
    volume = read_volume(folder)
    assert_is(volume, values)
    assert volume.notes == ("left out: 1 file without a DICOM slice",)


def _size(number, dataset):
    if number == 2:
        dataset.Rows, dataset.PixelData = 4, dataset.PixelData[: 4 * 4 * 2]


def _no_position(number, dataset):
    if number == 2:
        del dataset.ImagePositionPatient


def _truncated(number, dataset):
    if number == 2:
        dataset.PixelData = dataset.PixelData[:10]


def _is_mr(number, dataset):
    dataset.Modality = "MR"


def _no_pixels(number, dataset):  # as in a file that ends early
    if number == 5:
        del dataset.Rows, dataset.Columns, dataset.PixelData


def _several_frames(number, dataset):
    dataset.NumberOfFrames, dataset.PixelData = 3, 3 * dataset.PixelData
    del dataset.ImagePositionPatient, dataset.ImageOrientationPatient, dataset.PixelSpacing
    return number == 0


def _no_intercept(number, dataset):
    if number == 2:
        del dataset.RescaleIntercept


def _entry(name, value, only=None):
    def change(number, dataset):
        if only in (None, number):
            dataset.add_new(name, "LO", value)  # a text: pydicom refuses to write what is no number

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_size, r"Rows is \[[45]\.0\], but \[[45]\.0\] in"),
        (_no_position, "the file has no ImagePositionPatient"),
        (_truncated, "not readable as DICOM"),
        (_is_mr, "the modality is MR, not CT"),
        (_no_pixels, "028.dcm: not readable as DICOM: it ends before its pixels"),
        (_several_frames, "a file with several frames"),
        (_no_intercept, "the file has no RescaleIntercept, but other slices do"),
        (_entry("ImagePositionPatient", "1\\2", 2), "ImagePositionPatient is .*, not 3 numbers"),
        (_entry("ImagePositionPatient", "a\\b\\c"), "ImagePositionPatient is .*, not 3 numbers"),
        (_entry("ImageOrientationPatient", "1\\0\\0"), "ImageOrientationPatient is .*, not 6 numbers"),
        (_entry("ImageOrientationPatient", "1\\0\\0\\1\\0\\0"), "not perpendicular directions"),
        (_entry("PixelSpacing", "0.7"), "PixelSpacing is '0.7', not 2 numbers"),
        (_entry("RescaleSlope", ""), "RescaleSlope is .*, not 1 number"),
    ],
)
def test_series_that_cannot_be_used(tmp_path, change, match):
    with pytest.raises(DataError, match=match):
        read_volume(scans.write_dicom(tmp_path / "a", scans.voxels(), change=change))


def test_a_slice_that_is_cut_anywhere_is_an_error(tmp_path):
    folder = scans.write_dicom(tmp_path / "a", scans.voxels(2))
    last = folder / "1.2.3-008.dcm"
    content = last.read_bytes()
    for length in range(0, len(content), 23):
        last.write_bytes(content[:length])
        with pytest.raises(DataError) as caught:
            read_volume(folder)
        assert last.name in str(caught.value), length


def test_changed_bytes_of_a_compressed_file_are_noticed(tmp_path):
    file = scans.write_nifti(tmp_path / "a.nii.gz", scans.voxels(40))
    content = file.read_bytes()
    for place in np.linspace(400, len(content) - 10, 7).astype(int):
        file.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        with pytest.raises(DataError, match="not readable as NIfTI"):
            read_volume(file)


@pytest.mark.parametrize(
    ("place", "kind", "value"),
    [(40, "<4h", (3, 32000, 32000, 32000)), (40, "<4h", (3, -5, 4, 6)), (70, "<h", (9999,)), (112, "<2f", (2, np.nan))],
    ids=["sizes", "negative", "type", "intercept"],
)
@pytest.mark.filterwarnings("ignore")  # nibabel's, about such values
def test_impossible_headers_of_nifti(tmp_path, place, kind, value):
    file = scans.write_nifti(tmp_path / "a.nii", scans.voxels())
    content = bytearray(file.read_bytes())
    struct.pack_into(kind, content, place, *value)
    file.write_bytes(content)
    with pytest.raises(DataError, match="not readable as NIfTI"):
        read_volume(file)


def test_truncated_and_unknown_files(tmp_path):
    folder = scans.write_dicom(tmp_path / "a", scans.voxels())
    first = min(folder.iterdir())
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(DataError, match="not readable as DICOM") as caught:
        read_volume(folder)
    assert first.name in str(caught.value)
    for name in ("a.nii.gz", "a.nii"):
        file = scans.write_nifti(tmp_path / name, scans.voxels(40))
        file.write_bytes(file.read_bytes()[:-200])
        with pytest.raises(DataError, match="not readable as NIfTI"):
            read_volume(file)
    (tmp_path / "b.nii").write_text("nothing")
    with pytest.raises(DataError, match="not readable as NIfTI"):
        read_volume(tmp_path / "b.nii")
    (tmp_path / "b.npy").write_text("nothing")
    with pytest.raises(DataError, match="not readable as NumPy"):
        read_volume(tmp_path / "b.npy")
    (tmp_path / "b.jpg").write_text("nothing")
    with pytest.raises(DataError, match="unknown file type"):
        read_volume(tmp_path / "b.jpg")
    with pytest.raises(DataError, match="there is no such volume"):
        read_volume(tmp_path / "c.nii")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no DICOM slice"):
        read_volume(tmp_path / "empty")


def test_values_that_are_no_volume(tmp_path):
    values = scans.voxels().astype(np.float32)
    values[2, 1, 1:3] = np.nan
    with pytest.raises(DataError, match="2 of 120 voxels are NaN"):
        read_volume(scans.write_nifti(tmp_path / "a.nii", values))
    np.save(tmp_path / "a.npy", values)
    with pytest.raises(DataError, match="2 of 120 voxels are NaN"):
        read_volume(tmp_path / "a.npy")
    with pytest.raises(DataError, match="all 120 voxels have the value 7"):
        read_volume(scans.write_nifti(tmp_path / "b.nii", np.full((6, 5, 4), 7, dtype=np.int16)))
    with pytest.raises(DataError, match="all 120 voxels have the value -1024"):
        read_volume(scans.write_dicom(tmp_path / "b", np.full((6, 5, 4), -1024, dtype=np.int16)))
    np.save(tmp_path / "c.npy", np.zeros((3, 4)))
    with pytest.raises(DataError, match="none of the arrays is a volume"):
        read_volume(tmp_path / "c.npy")


def test_numpy(tmp_path):
    values = scans.voxels()
    np.save(tmp_path / "a.npy", values)
    volume = read_volume(tmp_path / "a.npy")
    assert_is(volume, values, (1.0, 1.0, 1.0))
    assert "no `spacing`" in volume.notes[0]
    np.savez(tmp_path / "a.npz", slices=values.astype(np.float64), spacing=SPACING)
    assert_is(read_volume(tmp_path / "a.npz"), values)
    np.savez(tmp_path / "b.npz", values, positions=np.array([5.0, 7, 9, 11, 15, 17]))
    volume = read_volume(tmp_path / "b.npz")
    np.testing.assert_allclose(volume.positions, [0, 2, 4, 6, 10, 12])
    assert volume.spacing[0] == 2
    np.savez(tmp_path / "c.npz", values, positions=np.zeros(6))
    with pytest.raises(DataError, match="do not ascend"):
        read_volume(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", values, spacing=np.array([1.0, -1, 1]))
    with pytest.raises(DataError, match="spacing is"):
        read_volume(tmp_path / "d.npz")


def test_values_that_are_no_hounsfield_units_are_noted(tmp_path):
    np.savez(tmp_path / "a.npz", slices=scans.voxels() + 1000, spacing=SPACING)
    assert "may not be Hounsfield units" in read_volume(tmp_path / "a.npz").notes[0]


def test_values_beyond_int16_are_clipped(tmp_path):
    values = scans.voxels().astype(np.float32)
    values[0, 0, :2] = 40_000, -40_000
    volume = read_volume(scans.write_nifti(tmp_path / "a.nii", values))
    assert volume.slices[0, 0, :2].tolist() == [32767, -32768]


@pytest.mark.exhaustive
def test_readers_are_imported_when_a_volume_is_read():
    program = (
        "import sys, lockstep, lockstep_recipes.tasks.ct.volume_table, lockstep_recipes.tasks.ct.options\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'monai', 'nibabel', 'pydicom'}))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize("suffix", [".dcm", ""])
def test_slices_without_a_preamble_are_read(tmp_path, suffix):
    values = scans.voxels(8)
    folder = scans.write_dicom(tmp_path / "scan", values)
    (folder / "notes.txt").write_text("of the scanner")
    for number, path in enumerate(sorted(folder.glob("*.dcm"))):
        content = path.read_bytes()
        if number % 3 == 0:  # without the group 2, as old scanners write
            dataset = pydicom.dcmread(path)
            dataset.file_meta = pydicom.dataset.FileMetaDataset()
            dataset.preamble = None
            dataset.save_as(path, implicit_vr=True, little_endian=True, enforce_file_format=False)
            content = path.read_bytes()
            assert content[128:132] != b"DICM"
        elif number % 3 == 1:  # only the preamble is missing
            content = content[132:]
        path.unlink()
        (folder / f"{path.stem}{suffix}").write_bytes(content)
    volume = read_volume(folder)
    assert np.array_equal(volume.slices, values)
    assert "6 slices have no preamble of DICOM, but are read" in volume.notes
    assert "left out: 1 file without a DICOM slice" in volume.notes


@pytest.mark.parametrize(("stored", "written"), [(32767, 32767), (-2000, -2000), (-2000, 63536), (31000, 31000)])
def test_padding_is_never_brighter_than_air(tmp_path, stored, written):
    values = scans.voxels(4)

    def pad(number, dataset):
        pixels = np.frombuffer(dataset.PixelData, np.int16).reshape(dataset.Rows, dataset.Columns).copy()
        pixels[0] = stored
        dataset.PixelData = pixels.tobytes()
        dataset.add_new((0x0028, 0x0120), "US" if written > 32767 else "SS", written)
        if stored == 31000:
            dataset.add_new((0x0028, 0x0121), "SS", 30000)

    volume = read_volume(scans.write_dicom(tmp_path / "scan", values, change=pad))
    assert (volume.slices[:, 0] == (-1000 if stored > 0 else -3024)).all()
    assert np.array_equal(volume.slices[:, 1:], values[:, 1:])
    assert any("PixelPaddingValue" in note for note in volume.notes) == (stored > 0)
