"""Mixup and cutmix of a pair of images: pixels and shares against NumPy, and the distribution of what is drawn."""

import numpy as np
import pytest
import torch

from lockstep_recipes.tasks.vision.images.mix import cutmix, draw_partner, mix, mixup


def pair(height=20, width=30, channels=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (channels, height, width), dtype=torch.uint8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3333, 1.0])
def test_mixup_is_the_weighted_mean_of_pixels(share):
    image, partner = pair()
    exact = share * image.numpy().astype(np.float64) + (1 - share) * partner.numpy()
    mixed = mixup(image, partner, share)
    assert mixed.dtype == torch.uint8
    assert np.abs(mixed.numpy() - exact).max() <= 0.5001


def test_cutmix_takes_a_box_of_the_partner_and_tells_the_true_share_of_pixels():
    image, partner = torch.zeros(3, 20, 30, dtype=torch.uint8), torch.ones(3, 20, 30, dtype=torch.uint8)
    for seed in range(300):
        torch.manual_seed(seed)
        mixed, share = cutmix(image, partner, seed / 299)
        assert share == pytest.approx(1 - mixed[0].float().mean().item(), abs=1e-7)
        assert torch.equal(mixed[0], mixed[1])
        rows, columns = mixed[0].amax(1).nonzero(), mixed[0].amax(0).nonzero()
        if len(rows):
            box = mixed[0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert box.all()  # the partner's pixels form a box
    assert not image.any()  # the image itself is not changed


def test_cutmix_covers_the_drawn_share_where_no_border_cuts_the_box():
    image, partner = torch.zeros(1, 100, 100, dtype=torch.uint8), torch.ones(1, 100, 100, dtype=torch.uint8)
    torch.manual_seed(0)
    shares = [cutmix(image, partner, 0.75)[1] for _ in range(200)]
    assert min(shares) == pytest.approx(0.75, abs=0.001)
    assert all(share >= 0.749 for share in shares)


def test_shares_are_beta_distributed_and_partners_uniform():
    image, partner = pair(2, 2)
    torch.manual_seed(0)
    shares = np.array([mix(image, partner, mixup_alpha=0.4, cutmix_alpha=0)[1] for _ in range(3000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)  # of Beta(a, a)
    partners = [draw_partner(4, 0.75) for _ in range(4000)]
    assert partners.count(None) == pytest.approx(1000, abs=120)
    assert all(partners.count(index) == pytest.approx(750, abs=110) for index in range(4))
    assert {draw_partner(1, 1.0) for _ in range(9)} == {0}
    assert {draw_partner(5, 0.0) for _ in range(9)} == {None}


def test_both_kinds_are_drawn_equally_often():
    image, partner = torch.zeros(1, 8, 8, dtype=torch.uint8), torch.full((1, 8, 8), 255, dtype=torch.uint8)
    torch.manual_seed(0)
    mixed = [mix(image, partner, mixup_alpha=1.0, cutmix_alpha=1.0)[0] for _ in range(1000)]
    blended = sum(bool(((picture > 0) & (picture < 255)).any()) for picture in mixed)
    assert blended == pytest.approx(500, abs=60)


def test_memory_format_is_kept():
    image, partner = (picture.unsqueeze(0).contiguous(memory_format=torch.channels_last)[0] for picture in pair())
    for kind in ({"mixup_alpha": 1.0, "cutmix_alpha": 0.0}, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}):
        assert mix(image, partner, **kind)[0].permute(1, 2, 0).is_contiguous()
