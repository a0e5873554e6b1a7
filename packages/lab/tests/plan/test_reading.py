"""Whether the CPUs can load samples as fast as the GPUs train."""

import numpy as np
import pytest

from lockstep.core.errors import DataError
from lockstep_lab.plan import reading
from lockstep_lab.plan.estimate import estimate
from lockstep_lab.plan.inputs import Decoding, Reading, Setting
from packages.lab.tests.plan import cases


def found(**other):
    """Eight GPUs that need 64 samples of 6e9 operations in a step: 0.4e12 operations/s make 533 samples/s."""
    world = cases.world(peak_flops={"fp32": 1e12}, link_bytes_per_second=1e12)
    facts = cases.written_facts(**other)
    return estimate(facts, Setting(world, "ddp", "fp32", micro_batch=8))


def test_more_than_a_core_for_each_gpu_is_said_with_its_remedy():
    of_images = Reading(0.03, Decoding(0.02, 562_500.0))
    first, second = reading.lines(of_images, found())
    assert first.startswith(
        "loading: 533 samples/s are needed, and a core of this machine loads 33/s: 16 cores keep up"
    )
    assert "2 for each GPU (data.workers)" in first
    assert "with data.cache=decoded, 6 cores from the second epoch on, and 0.562 GB on the disk" in second
    assert len(reading.lines(of_images._replace(decoding=None), found())) == 1


@pytest.mark.parametrize("one", [None, Reading(0.01, None), Reading(0.0, None)])
def test_nothing_is_said_if_a_core_for_each_gpu_suffices_or_nothing_is_known(one):
    assert reading.lines(one, found()) == []
    assert reading.lines(Reading(9.0, None), found(flops_per_sample=None)) == []


class Pictures:
    """Images of one to four rows, and the samples that were decoded."""

    cache = None

    def __init__(self):
        self.read = []

    def __len__(self):
        return 4

    def decoded(self, index):
        self.read.append(index)
        return np.zeros((index + 1, 10, 3), np.uint8)


def test_images_are_decoded_over_the_whole_data_set():
    images = Pictures()
    assert reading.decoding_of(images).bytes == 75  # 2.5 rows
    assert images.read == [0, 0, 1, 1, 2, 2, 3, 3]
    images.cache = object()
    assert reading.decoding_of(images) is None
    assert reading.decoding_of([1, 2]) is None


def test_damaged_images_are_left_out():
    class Damaged(Pictures):
        def decoded(self, index):
            if index in self.bad:
                raise DataError("cannot be read", where=f"{index}.png", remedy="repair it")
            return super().decoded(index)

    images = Damaged()
    images.bad = {0}
    assert reading.decoding_of(images).bytes == 90  # of 2, 3 and 4 rows
    images.bad = {0, 1, 2, 3}
    assert reading.decoding_of(images) is None
