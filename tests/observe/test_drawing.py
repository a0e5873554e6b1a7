"""Sheets of pictures and confusion matrices: their sizes, what stands where, and bad input."""

import io

import numpy as np
import pytest

from lockstep.observe import drawing

Image = pytest.importorskip("PIL.Image")


def plain(height, width, colour):
    return np.full((height, width, 3), colour, dtype=np.uint8)


def test_pictures_stand_in_rows_at_the_size_of_a_tile():
    red, green, blue = plain(20, 40, (255, 0, 0)), plain(8, 8, (0, 255, 0)), plain(500, 300, (0, 0, 255))
    page = drawing.sheet([red, green, blue], ["a", "b\nc", ""], columns=2)
    assert page.dtype == np.uint8
    assert page.shape == (8 + 2 * (160 + 8 + 2 * 14), 8 + 2 * 168, 3)
    areas = {name: (page == colour).all(axis=2).sum() for name, colour in zip("rgb", np.eye(3) * 255, strict=True)}
    assert areas == {"r": 80 * 160, "g": 160 * 160, "b": 160 * 96}
    rows, columns = np.nonzero((page == (0, 0, 255)).all(axis=2))
    assert rows.min() == 8 + 196
    assert columns.max() < 8 + 168


def test_caption_is_below_its_picture_and_is_cut():
    page = drawing.sheet([plain(160, 160, 0), plain(160, 160, 0)], ["x" * 500, ""], columns=2)
    below = page[8 + 160 :]
    assert (below[:, 8:168] < 128).any()
    assert not (below[:, 170:] < 128).any()


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)],
)
def test_other_arrays_are_refused_with_their_shape(wrong):
    with pytest.raises(ValueError, match=r"must be uint8 of shape \(height, width, 3\)") as caught:
        drawing.sheet([wrong], [""], columns=1)
    assert str(wrong.shape) in str(caught.value)


def cells(page, classes, cell, margin):
    centre = page[margin + cell // 4 :: cell, margin + cell // 4 :: cell][:classes, :classes]
    return centre.astype(int).sum(axis=2)


def test_cells_of_a_confusion_matrix_darken_with_the_share_of_their_row():
    counts = np.array([[8, 2, 0], [0, 100, 0], [0, 0, 0]])
    page = drawing.confusion_matrix(counts, ["cat", "dog", "a name that does not fit beside the matrix"])
    brightness = cells(page, 3, 40, 110 + 14 + 8)
    assert brightness[0, 0] < brightness[0, 1] < brightness[0, 2] == brightness[2, 2] == 3 * 255
    assert brightness[1, 1] < brightness[0, 0]


@pytest.mark.parametrize(
    ("classes", "cell", "names"), [(2, 40, True), (21, 16, True), (61, 15, False), (1000, 1, False)]
)
def test_matrix_of_any_size_is_drawn(classes, cell, names):
    page = drawing.confusion_matrix(np.eye(classes, dtype=np.int64) * 7, [])
    margin = (110 if names else 0) + 14 + 8
    assert page.shape == (margin + classes * cell + 8,) * 2 + (3,)


def test_matrix_of_too_many_classes_is_not_drawn():
    assert drawing.confusion_matrix(np.zeros((2001, 2001))) is None


def test_png_holds_the_pixels(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawing.png(picture)))), picture)
    drawing.write(tmp_path / "new" / "a.png", picture)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]
