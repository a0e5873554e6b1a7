"""Resampling of slices: linear between slices, averages where slices become fewer."""

import numpy as np
import pytest

from lockstep_recipes.tasks.ct.volumes.resample import resampled, resampling_weights
from lockstep_recipes.tasks.ct.volumes.volume import Volume
from packages.recipes.tests.tasks.ct.volumes import scans


def volume_at(positions, values):
    steps = np.diff(positions)
    return Volume(values, (float(np.median(steps)), 1.0, 1.0), np.asarray(positions, dtype=np.float32))


def test_finer_slices_are_interpolated_linearly():
    values, positions = scans.voxels(6), np.array([0.0, 2, 4, 7, 8, 10])
    volume = resampled(volume_at(positions, values), 0.5)
    np.testing.assert_allclose(volume.positions, np.arange(0, 10.1, 0.5))
    plain = np.stack([np.interp(volume.positions, positions, line) for line in values.reshape(6, -1).T], axis=1)
    assert np.abs(volume.slices.reshape(len(plain), -1) - plain).max() <= 0.51
    assert volume.spacing[0] == 0.5


@pytest.mark.parametrize("distance", [0.7, 1.0, 1.25, 2.0, 3.3, 9.0])
@pytest.mark.parametrize("positions", [np.arange(20.0), np.r_[0.0, 1, 2, 3, 9, 10, 11.5]])
def test_weights_keep_constants_and_straight_lines(distance, positions):
    weights = resampling_weights(positions, distance)
    np.testing.assert_allclose(weights.sum(1), 1)
    assert weights.min() >= 0
    places = distance * np.arange(len(weights))
    inner = (places >= distance) & (places <= positions[-1] - distance)  # the triangle ends at the first and last slice
    np.testing.assert_allclose((weights @ positions)[inner], places[inner], atol=1e-9)


def test_fewer_slices_use_all_slices():
    weights = resampling_weights(np.arange(21.0), 4.0)
    assert weights.shape == (6, 21)
    assert (weights.sum(0) > 0).all()


def test_the_same_distance_changes_nothing():
    volume = volume_at(np.arange(6) * 3.0, scans.voxels(6))
    assert resampled(volume, 3.0) is volume
    one = Volume(scans.voxels(1), (3.0, 1.0, 1.0), np.zeros(1, dtype=np.float32))
    assert resampled(one, 1.0) is one


@pytest.mark.parametrize("length", [500.6, 500.9995, 501.0])
def test_no_new_slice_lies_beyond_the_last(length):
    weights = resampling_weights(np.array([0.0, length]), 1.0)
    assert len(weights) == (501 if length == 500.6 else 502)
