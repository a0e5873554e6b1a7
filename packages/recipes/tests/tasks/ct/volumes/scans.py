"""CT scans for tests: the same voxels as a DICOM series, as NIfTI and as NumPy."""

import numpy as np

ROWS = 5
COLUMNS = 4


def voxels(slices=6, *, rows=ROWS, columns=COLUMNS, seed=0):
    """int16 (slices, rows, columns) in HU, from feet to head, front to back, right to left."""
    return np.random.default_rng(seed).integers(-1000, 1500, (slices, rows, columns)).astype(np.int16)


def write_nifti(path, values, *, spacing=(3.0, 0.8, 0.7), axes="LPS", affine=None, dtype=None):
    """Write voxels in the orientation of `Volume` as NIfTI with the given axes."""
    import nibabel
    from nibabel import orientations

    matrix = np.diag([-spacing[2], -spacing[1], spacing[0], 1.0]) if affine is None else affine
    image = nibabel.Nifti1Image(values.transpose(2, 1, 0).astype(dtype or values.dtype), matrix)
    wanted = orientations.axcodes2ornt(tuple(axes))
    image = image.as_reoriented(orientations.ornt_transform(orientations.io_orientation(matrix), wanted))
    nibabel.save(image, path)
    return path


def write_dicom(folder, values, *, spacing=(3.0, 0.8, 0.7), series="1.2.3", change=None, intercept=-1024.0, slope=1.0):
    """Write voxels as a DICOM series with file names that are not in the order of the slices.

    Args:
        change: called with (number of the slice, dataset) before a file is written. False: the file is left out.
    """
    import pydicom
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    folder.mkdir(parents=True, exist_ok=True)
    for number, plane in enumerate(values):
        dataset = pydicom.Dataset()
        dataset.file_meta = pydicom.dataset.FileMetaDataset()
        dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = CTImageStorage
        uid = f"{series}.{number + 1}"
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID = uid
        dataset.SeriesInstanceUID, dataset.Modality, dataset.SeriesDescription = series, "CT", f"series {series}"
        dataset.InstanceNumber = (number * 7) % 11
        dataset.Rows, dataset.Columns = plane.shape
        dataset.PixelSpacing = [spacing[1], spacing[2]]
        dataset.SliceThickness = spacing[0]
        dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        dataset.ImagePositionPatient = [-10.0, -20.0, 100.0 + spacing[0] * number]
        dataset.RescaleSlope, dataset.RescaleIntercept = slope, intercept
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
        dataset.BitsAllocated = dataset.BitsStored = 16
        dataset.HighBit, dataset.PixelRepresentation = 15, 1
        stored = np.rint((plane.astype(np.float64) - intercept) / slope).astype(np.int16)
        dataset.PixelData = stored.tobytes()
        if change is not None and change(number, dataset) is False:
            continue
        name = f"{series}-{(number * 5 + 3) % 97:03d}.dcm"
        dataset.save_as(folder / name, enforce_file_format=True)
    return folder
