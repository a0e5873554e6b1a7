"""Dice for each sample, and over the global batch, against plain torch: however the batch is cut."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task, losses
from lockstep.core.errors import UsageError
from tests import runs
from tests.ranks import run_ranks


class Blobs(Task):
    """Masks of three classes, of very different sizes: a ratio over a micro-batch is far from that of the batch."""

    def __init__(self, smooth=1.0):
        self.smooth = smooth

    def model(self):
        return nn.Conv2d(1, 3, 3, padding=1).double()

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(96, 1, 6, 6, generator=generator, dtype=torch.float64)
        level = torch.rand(96, 1, 1, generator=generator) * 3
        return TensorDataset(images, (images[:, 0] > level).long() + (images[:, 0] > level + 0.5).long())

    def loss(self, model, batch):
        return losses.dice(model(batch[0]).softmax(dim=1), batch[1], smooth=self.smooth)


class WholeBlobs(Blobs):
    def embed(self, model, batch):
        return losses.overlaps(model(batch[0]).softmax(dim=1), batch[1])

    def loss(self, model, sums):
        return losses.batch_dice(sums, smooth=self.smooth)


def plain_dice(shares, masks, smooth):
    """As papers write it, for each class, over all that is given."""
    ratios = []
    for number in range(shares.shape[1]):
        truth = (masks == number).to(shares.dtype)
        if smooth or truth.any():
            common, sizes = (shares[:, number] * truth).sum(), shares[:, number].sum() + truth.sum()
            ratios.append((2 * common + smooth) / (sizes + smooth))
    return 1 - torch.stack(ratios).mean()


class PlainBlobs(Blobs):
    def loss(self, model, batch):
        shares = model(batch[0]).softmax(dim=1)
        return sum(
            plain_dice(share[None], mask[None], self.smooth) for share, mask in zip(shares, batch[1], strict=True)
        )


class PlainWholeBlobs(Blobs):
    def loss(self, model, batch):
        return plain_dice(model(batch[0]).softmax(dim=1), batch[1], self.smooth) * len(batch[1])


def fit(kind, smooth, micro):
    return runs.fit(globals()[kind](smooth), runs.config(batch={"global": 24, "micro": micro}, train={"steps": 6}))[0]


def test_dice_is_that_of_plain_torch_on_ranks_and_in_micro_batches():
    for kind, plain in (("Blobs", PlainBlobs), ("WholeBlobs", PlainWholeBlobs)):
        for smooth in (1.0, 0.0):
            expected, _ = runs.by_hand(plain(smooth), steps=6)
            for ranks, micro in ((1, 12), (2, 6)):  # two micro-batches each
                for weights in run_ranks(ranks, fit, kind, smooth, micro):
                    assert runs.difference(weights, expected) < 1e-10, (kind, smooth, ranks)


def test_targets_may_be_numbers_or_shares_with_pixels_left_out():
    generator = torch.Generator().manual_seed(0)
    shares, masks = torch.rand(4, 3, 5, 5, generator=generator), torch.randint(0, 3, (4, 5, 5), generator=generator)
    valid = torch.rand(4, 5, 5, generator=generator) > 0.3
    numbered = losses.overlaps(shares, masks, valid=valid)
    dense = losses.overlaps(shares, nn.functional.one_hot(masks, 3).movedim(-1, 1), valid=valid)
    for one, other in zip(numbered, dense, strict=True):
        torch.testing.assert_close(one, other)
    assert numbered.targets.sum() == valid.sum()
    # One class: 1 where a pixel has it.
    found = losses.overlaps(shares[:, :1], masks.clamp(max=1))
    torch.testing.assert_close(found.common[:, 0], (shares[:, 0] * masks.clamp(max=1)).sum(dim=(1, 2)))
    assert losses.overlaps(shares.half(), masks).outputs.dtype == torch.float32
    assert losses.overlaps(shares[:, :, 0, 0], masks[:, 0, 0]).common.shape == (4, 3)


def test_shapes_that_do_not_fit_are_an_error():
    shares = torch.rand(4, 3, 5, 5)
    for targets, valid in ((torch.zeros(4, 5, 6), None), (torch.zeros(4, 1, 5, 5), None), (shares, torch.ones(5, 5))):
        with pytest.raises(UsageError, match=r"the shapes do not match: probabilities \(4, 3, 5, 5\), targets \(4, "):
            losses.dice(shares, targets, valid=valid)
