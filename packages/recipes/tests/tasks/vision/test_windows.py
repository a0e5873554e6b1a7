"""Windows of images, and their cores."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some

from lockstep_recipes.tasks.vision.segmentation.windows import Windows, tiles
from tests.mask_cases import make_task, shapes_folder


@settings(deadline=None, max_examples=30)  # the machine may be busy
@given(some.tuples(some.integers(1, 200), some.integers(1, 200)), some.integers(1, 80), some.floats(0, 0.9))
def test_cores_cover_each_pixel_once_and_lie_in_their_windows(size, side, overlap):
    counted = np.zeros(size, int)
    for (top, left, height, width), (core_top, core_left, rows, columns) in tiles(size, side=side, overlap=overlap):
        assert 0 <= top <= core_top < core_top + rows <= top + height <= size[0]
        assert 0 <= left <= core_left < core_left + columns <= left + width <= size[1]
        assert (height, width) == (min(side, size[0]), min(side, size[1]))
        counted[core_top : core_top + rows, core_left : core_left + columns] += 1
    assert (counted == 1).all()


def test_neighbours_overlap_by_the_wanted_share_or_more():
    found = sorted({tile.window[1] for tile in tiles((10, 1000), side=256, overlap=0.25)})
    assert len(found) == 5
    assert all(after - before <= 192 for before, after in itertools.pairwise(found))
    inner = [tile.core[1] - tile.window[1] for tile in tiles((10, 1000), side=256, overlap=0.25)][1:]
    assert min(inner) >= 32  # each core is half an overlap away from the border of its window


def test_a_data_set_of_windows_names_the_place_of_each(tmp_path):
    pictures = make_task({}, shapes_folder(tmp_path)).train_data()
    sizes = [sample.mask.shape for sample in (pictures[number] for number in range(len(pictures)))]
    windows = Windows(pictures, sizes, side=20, overlap=0.2)
    seen = [np.zeros(size, int) for size in sizes]
    names = [sample.name for sample in (pictures[number] for number in range(len(pictures)))]
    for index in range(len(windows)):
        window = windows[index]
        number = names.index(window.name)
        top, left, height, width = window.tile.window
        assert (window.pixels == pictures[number].pixels[top : top + height, left : left + width]).all()
        top, left, height, width = window.tile.core
        seen[number][top : top + height, left : left + width] += 1
    assert all((counted == 1).all() for counted in seen)
    assert windows.where(0) == f"{pictures.where(0)}, window of 20 x 20 pixels at row 0, column 0"
