"""Sheets of images and confusion matrices: their sizes, what stands where, and bad input."""

import io

import numpy as np
import pytest

from lockstep.drawing import diagrams, drawing

Image = pytest.importorskip("PIL.Image")


def plain(height, width, colour):
    return np.full((height, width, 3), colour, dtype=np.uint8)


def test_pictures_stand_in_rows_at_the_size_of_a_tile():
    red, green, blue = plain(20, 40, (255, 0, 0)), plain(8, 8, (0, 255, 0)), plain(500, 300, (0, 0, 255))
    page = drawing.sheet([red, green, blue], ["a", "b\nc", ""], columns=2)
    assert page.dtype == np.uint8
    assert page.shape == (8 + (160 + 8 + 2 * 14) + (160 + 8), 8 + 2 * 168, 3)  # the second row has no caption
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
    page = diagrams.confusion_matrix(counts, ["cat", "dog", "a name that does not fit beside the matrix"])
    brightness = cells(page, 3, 40, 110 + 14 + 8)
    assert brightness[0, 0] < brightness[0, 1] < brightness[0, 2] == brightness[2, 2] == 3 * 255
    assert brightness[1, 1] < brightness[0, 0]


@pytest.mark.parametrize(
    ("classes", "cell", "names"), [(2, 40, True), (21, 16, True), (61, 15, False), (1000, 1, False)]
)
def test_matrix_of_any_size_is_drawn(classes, cell, names):
    page = diagrams.confusion_matrix(np.eye(classes, dtype=np.int64) * 7, [])
    margin = (110 if names else 0) + 14 + 8
    assert page.shape == (margin + classes * cell + 8,) * 2 + (3,)


def test_matrix_of_too_many_classes_is_not_drawn():
    assert diagrams.confusion_matrix(np.zeros((2001, 2001))) is None


def test_png_holds_the_pixels(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawing.png(picture)))), picture)
    drawing.write(tmp_path / "new" / "a.png", picture)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]


def test_a_picture_that_is_taller_than_most_does_not_make_the_sheet_tall():
    """A row is as tall as its images, and a tall image fits beside the others."""
    wide, tall = plain(40, 300, 90), plain(300, 100, 200)
    page = drawing.sheet([wide, wide, wide, tall], [""] * 4, columns=2, side=300)
    assert page.shape == (8 + (40 + 8) + (160 + 8), 8 + 2 * (300 + 8), 3)
    rows, columns = np.nonzero((page == 200).all(axis=2))
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == (160, 53)


def test_wide_pictures_leave_no_empty_rows():
    page = drawing.sheet([plain(20, 200, 90)] * 2, ["a", "a"], columns=1, side=300)
    assert page.shape == (8 + 2 * (20 + 8 + 14), 216, 3)  # it is as large as it was


def test_a_sheet_of_wide_pictures_has_fewer_columns():
    wide = [plain(20, 200, 90)] * 8
    shapes = {
        width: drawing.sheet(wide, [""] * 8, columns=4, side=300, width=width).shape for width in (832, 831, 415, 1)
    }
    row = 20 + 8
    assert shapes == {
        832: (8 + 2 * row, 840, 3),
        831: (8 + 4 * row, 424, 3),
        415: (8 + 8 * row, 216, 3),
        1: (232, 216, 3),
    }
    assert drawing.sheet([plain(20, 400, 90)], [""], columns=4, side=300).shape == (8 + 15 + 8, 316, 3)


def test_masks_are_blended_by_class_and_ignored_pixels_are_hatched():
    image = np.full((20, 30), 100, np.uint8)
    mask = np.zeros((20, 30), int)
    mask[:, 10:] = 1
    mask[10:] = -1
    mask[15:] = -7
    colors = [[200, 0, 0], [0, 0, 50]]
    page = drawing.colored_mask(image, mask, colors, alpha=0.25)
    assert (page[:10, :10] == [125, 75, 75]).all()
    assert (page[:10, 10:] == [75, 75, 88]).all()
    greys, counts = np.unique(page[10:].reshape(-1, 3), axis=0, return_counts=True)
    assert greys.tolist() == [[99] * 3, [139] * 3]  # stripes of grey and white
    assert counts.min() > 80
    alone = drawing.colored_mask(image[..., None], mask, colors, alpha=1.0)
    assert alone[0, [0, 29]].tolist() == colors


def test_colours_of_classes_differ_from_black_white_and_each_other():
    given = [[0, 0, 0], [128, 0, 0], [255, 255, 255], [130, 4, 0], [0, 0, 9]]
    found = drawing.distinct(given).astype(int)
    assert found[0].tolist() == [128, 128, 128]  # a background stays without a colour
    assert found[1].tolist() == given[1]
    apart = abs(found[:, None] - found).sum(axis=2) + 1000 * np.eye(5, dtype=int)
    assert apart.min() >= 60
    assert all(color.max() >= 40 and color.min() <= 215 for color in found)
    many = drawing.distinct(np.zeros((60, 3)))
    assert len({tuple(color) for color in many.tolist()}) == 60


@pytest.mark.parametrize(
    ("mask", "says"),
    [(np.zeros((3, 3), int), r"\(3, 3\) for an image of shape \(2, 3\)"), (np.full((2, 3), 4), "class 4.* 2 colours")],
)
def test_masks_that_do_not_fit_are_refused(mask, says):
    with pytest.raises(ValueError, match=says):
        drawing.colored_mask(plain(2, 3, 0), mask, drawing.palette(2))


def test_boxes_are_drawn_at_their_place_in_the_scaled_picture():
    boxes = [[10, 5, 20, 15], [30, 10, 90, 90], [np.nan, 0, 1, 1]]
    page = drawing.with_boxes(plain(20, 40, 0), boxes, colors=[[0, 255, 0], [0, 0, 255], [255, 0, 0]], side=400)
    assert page.shape == (200, 400, 3)
    rows, columns = np.nonzero((page == (0, 255, 0)).all(axis=2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (50, 150, 100, 200)
    rows, columns = np.nonzero((page == (0, 0, 255)).all(axis=2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (100, 199, 300, 399)
    assert not (page == (255, 0, 0)).all(axis=2).any()


def places_of_texts(page, boxes, **options):
    """Left, top, right and bottom of the pixels that texts have changed."""
    changed = (page != drawing.with_boxes(boxes=boxes, **options)).any(axis=2)
    rows, columns = np.nonzero(changed)
    return (columns.min(), rows.min(), columns.max(), rows.max()) if len(rows) else None


@pytest.mark.parametrize(
    ("box", "top"),
    [((20, 60, 100, 80), 48), ((20, 4, 100, 24), 25), ((20, 4, 100, 110), 5)],
    ids=["above", "below, where there is no room above", "inside a large box"],
)
def test_a_text_stands_beside_its_box(box, top):
    plain_page = {"image": plain(120, 200, 0), "colors": (0, 255, 0)}
    page = drawing.with_boxes(boxes=[box], texts=["cell 0.93"], **plain_page)
    left, first, right, last = places_of_texts(page, [box], **plain_page)
    assert left in (20, 21)  # the line of the box itself has the same colour
    assert (first, last) == (top, top + 11)
    assert right <= box[2]


def test_texts_hide_no_small_box_and_no_other_text():
    plain_page = {"image": plain(120, 200, 0), "colors": (0, 255, 0)}
    narrow, wide = [50, 60, 60, 70], [50, 60, 75, 90]
    assert (
        places_of_texts(drawing.with_boxes(boxes=[narrow], texts=["cell"], **plain_page), [narrow], **plain_page)
        is None
    )
    only = drawing.with_boxes(boxes=[wide], texts=["0.93"], **plain_page)
    assert np.array_equal(drawing.with_boxes(boxes=[wide], texts=[("cell 0.93", "0.93")], **plain_page), only)
    boxes = [[52, 50, 60, 58], wide]  # the small box is where the text would be above
    assert (
        places_of_texts(drawing.with_boxes(boxes=boxes, texts=["", "0.93"], **plain_page), boxes, **plain_page)[1] == 91
    )
    twice = drawing.with_boxes(boxes=[wide] * 3, texts=["0.93"] * 3, **plain_page)
    assert places_of_texts(twice, [wide] * 3, **plain_page)[3] == 102  # above and below; the third has no text
    assert np.array_equal(drawing.with_boxes(plain(6, 7, 9), []), plain(6, 7, 9))
    assert np.array_equal(drawing.with_boxes(plain(6, 7, 9), [], ["x"]), plain(6, 7, 9))


def test_lines_and_texts_of_boxes_are_larger_in_large_pictures():
    """And the lines of a small box are thin."""
    for side, line in ((320, 2), (2000, 10)):
        box = [[side // 10, side // 10, side // 3, side // 3]]
        page = drawing.with_boxes(plain(side, side, 0), box, colors=(0, 255, 0))
        assert (page[side // 5] > 0).any(axis=1).sum() == 2 * line
    tiny = drawing.with_boxes(plain(2000, 2000, 0), [[100, 100, 108, 108]], colors=(0, 255, 0))
    assert (tiny[104] > 0).any(axis=1).sum() == 2
    large = {"image": plain(2000, 2000, 0), "colors": (0, 255, 0)}
    box = [[300, 300, 900, 900]]
    _, top, _, last = places_of_texts(drawing.with_boxes(boxes=box, texts=["cell"], **large), box, **large)
    assert last - top + 1 == 30


def test_pictures_in_a_row_have_one_height_and_the_asked_width():
    row = drawing.side_by_side(
        [plain(10, 20, 1), np.zeros((30, 30), np.uint8), plain(5, 10, 3)], ["a", "b", ""], side=508
    )
    assert row.shape == (100 + 16, 508, 3)
    assert (row[16:, :200] == 1).all()
    assert (row[16:, 204:304] == 0).all()
    assert (row[16:, 308:] == 3).all()
    assert drawing.side_by_side([plain(10, 20, 1), plain(20, 20, 2)]).shape == (10, 34, 3)


def test_legend_breaks_lines_and_names_every_class():
    colors = drawing.palette(12)
    assert len({tuple(color) for color in colors.tolist()}) == 12
    page = drawing.legend([f"class {number}" for number in range(12)], colors, width=200)
    assert page.shape[1] == 200
    for color in colors:
        assert (page == color).all(axis=2).sum() >= 80
    tall = drawing.stacked([plain(5, 100, 0), page])
    assert tall.shape == (5 + page.shape[0], 200, 3)
    assert (tall[:5, 100:] == 255).all()


def test_curves_pass_through_their_points_and_stop_where_there_is_no_number():
    x = np.linspace(0, 1, 11)
    page = diagrams.curves(
        {"up": (x, x), "half": (x, np.where(x > 0.55, np.nan, 0.5)), "none": ([], [])},
        title="t",
        x_label="recall",
        y_label="precision",
    )
    red, blue, _ = drawing.palette(3)
    left, top, wide, high = 56, 30, 480, 320
    for share in (0.25, 0.75):
        near = page[top + round((1 - share) * high) - 2 :, left + round(share * wide) - 2 :][:5, :5]
        assert (near == red).all(axis=2).any()
    columns = np.nonzero((page[top + high // 2 - 2 : top + high // 2 + 2] == blue).all(axis=2))[1]
    assert left + 0.45 * wide < columns.max() <= left + 0.5 * wide + 2
    assert diagrams.curves({}).ndim == 3


def test_panels_have_at_most_five_curves_each_and_name_what_is_not_drawn():
    def series(count):
        return {f"s{number}": ([0, 1], [number / count, 1]) for number in range(count)}

    def shape(groups, **options):
        return diagrams.panels(groups, title="t", also={"chance": ([0, 1], [0, 1])}, **options).shape

    one = shape({"": series(5)})
    assert one[1] == 56 + 480 + 24
    assert shape({"": series(6)})[1] == 2 * one[1]
    assert shape({"a": series(3), "b": series(3), "c": series(3)}) == (2 * one[0], 2 * one[1], 3)
    assert shape({"": series(30)}) == (3 * one[0], 2 * one[1], 3)
    more = shape({"": series(80)})
    assert more[0] in (3 * one[0] + lines * 14 + 8 for lines in (1, 2, 3))  # the names of fifty curves


def test_a_legend_shows_ignored_pixels_hatched():
    page = drawing.legend(["a"], [[255, 0, 0]], width=200, ignored="ignored")
    assert page.shape == drawing.legend(["a", "ignored"], [[255, 0, 0], [255] * 3], width=200).shape
    assert (page == 96).all(axis=2).sum() > 20
    assert drawing.legend(["a"], [[255, 0, 0]], width=200, scale=2.0).shape[0] > 1.8 * (page.shape[0] - 2)
