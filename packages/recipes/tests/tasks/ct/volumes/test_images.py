"""HU windows, the choice of slices, and augmentation that is the same for all slices of a volume."""

import numpy as np
import pytest
import torch

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.volumes.choice import choose_slices, slice_groups
from lockstep_recipes.tasks.ct.volumes.images import slice_images
from lockstep_recipes.tasks.ct.volumes.windows import NAMED, windowed, windows_of
from lockstep_recipes.tasks.vision.images.options import (
    AugmentOptions,
    ColorJitterOptions,
    RandAugmentOptions,
    RandomErasingOptions,
)
from tests.selection import mainly

USUAL = ("lung", "soft_tissue", "bone")


def test_windows_are_the_exact_linear_function():
    values = np.arange(-1100, 2000, dtype=np.int16).reshape(1, 31, 100)
    pictures = windowed(values, windows_of([*USUAL, [0, 100]]))
    assert pictures.shape == (1, 31, 100, 4)
    assert pictures.dtype == np.uint8
    for channel, (center, width) in enumerate([*(NAMED[name] for name in USUAL), (0, 100)]):
        # DICOM PS3.3, C.11.2.1.3.2: LINEAR_EXACT, from 0 to 255
        plain = ((values.astype(np.float64) - center) / width + 0.5) * 255
        assert np.abs(pictures[..., channel] - np.clip(plain, 0, 255)).max() <= 0.5 + 1e-9


def test_windows_that_are_none():
    with pytest.raises(UsageError, match="did you mean lung"):
        windows_of(["lungs"])
    for pair in ([0, 0], [0, -5], [1], [float("nan"), 1]):
        with pytest.raises(UsageError, match="is not an HU window"):
            windows_of([pair])


@pytest.mark.parametrize("count", mainly([1, 27, 57], [1, 2, 27, 28, 29, 57, 500]))
@pytest.mark.parametrize("most", [1, 7, 28])
@pytest.mark.parametrize("how", ["window", "stratified", "even"])
def test_chosen_slices(count, most, how):
    for seed in range(5):
        torch.manual_seed(seed)
        places = choose_slices(count, most, how=how)
        torch.manual_seed(seed)
        np.testing.assert_array_equal(places, choose_slices(count, most, how=how))
        assert places.dtype == np.int64
        assert len(places) == min(count, most)
        assert (np.diff(places) > 0).all()
        assert 0 <= places[0] <= places[-1] < count
        if how == "window":
            assert (np.diff(places) == 1).all()
        elif count > most:  # one of each part
            np.testing.assert_array_equal(
                np.searchsorted(count * np.arange(1, most + 1) // most, places, "right"), range(most)
            )


def test_every_slice_can_be_chosen():
    for how in ("window", "stratified"):
        assert set(np.concatenate([choose_slices(11, 4, how=how) for _ in range(300)])) == set(range(11))


def test_even_slices_are_symmetric_and_draw_nothing():
    state = torch.get_rng_state()
    assert choose_slices(9, 3, how="even").tolist() == [1, 4, 7]
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("how", ["window", "stratified", "even"])
@pytest.mark.parametrize(("count", "most"), [(1, 4), (4, 4), (5, 4), (30, 7), (500, 28)])
def test_groups_have_each_slice_once(how, count, most):
    groups = slice_groups(count, most, how=how)
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)), range(count))
    sizes = [len(group) for group in groups]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert all(len(set(np.diff(group))) <= 1 for group in groups)


STRONG = AugmentOptions(
    scale=(0.3, 0.9),
    vertical_flip=0.5,
    randaugment=RandAugmentOptions(),
    color_jitter=ColorJitterOptions(brightness=0.5, contrast=0.5),
    random_erasing=RandomErasingOptions(probability=0.5),
)


@pytest.mark.parametrize(
    "augment", [AugmentOptions(), STRONG, AugmentOptions(crop="fit"), AugmentOptions(crop="shift")]
)
def test_random_changes_are_the_same_for_all_slices(augment):
    plane = np.random.default_rng(0).integers(-1000, 1000, (1, 40, 50)).astype(np.int16)
    for seed in range(8):
        torch.manual_seed(seed)
        pictures = slice_images(np.repeat(plane, 5, axis=0), windows_of(USUAL), 32, augment=augment)
        after = torch.rand(())
        assert pictures.shape == (5, 3, 32, 32)
        assert pictures.dtype == torch.uint8
        assert (pictures == pictures[:1]).all()
        torch.manual_seed(seed)
        again = slice_images(np.repeat(plane, 2, axis=0), windows_of(USUAL), 32, augment=augment)
        assert torch.equal(again, pictures[:2])
        assert torch.rand(()) == after  # the number of slices moves no generator


def test_volumes_have_changes_of_their_own():
    plane = np.random.default_rng(0).integers(-1000, 1000, (1, 40, 50)).astype(np.int16)
    one, other = (slice_images(plane, windows_of(USUAL), 32, augment=AugmentOptions()) for _ in range(2))
    assert not torch.equal(one, other)


def test_evaluation_draws_nothing():
    plane = np.random.default_rng(0).integers(-1000, 1000, (2, 40, 50)).astype(np.int16)
    state = torch.get_rng_state()
    stretched = slice_images(plane, windows_of(["lung"]), 32, augment=None)
    padded = slice_images(plane, windows_of(["lung"]), 32, augment=None, keep_shape=True)
    assert torch.equal(state, torch.get_rng_state())
    assert stretched.shape == padded.shape == (2, 1, 32, 32)
    assert (padded[:, :, 26:] == 0).all()
    assert (padded[:, :, :26] > 0).any()
