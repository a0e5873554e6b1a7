"""Histograms of the gradients, one per parameter, in powers of ten: `gradients.jsonl` in the run directory.

lockstep train digits train.parts='[examples/parts/gradient_histograms.py:GradientHistograms]'
"""

import json

import torch

from lockstep import Part

LOWEST, HIGHEST = -12, 2  # powers of ten; the first and the last bin also count smaller and larger values


class GradientHistograms(Part):
    def __init__(self, every=10):
        self.every = every

    def before_update(self, training):
        if training.step % self.every:
            return
        counts = {name: histogram(gradient) for name, gradient in training.gradients().items()}
        if training.is_sharded:  # FSDP: each rank has a shard of each gradient
            totals = iter(training.all_sum([number for bins in counts.values() for number in bins]))
            counts = {name: [int(next(totals)) for _ in bins] for name, bins in counts.items()}
        every_bin = [sum(bins) for bins in zip(*counts.values(), strict=True)]
        training.log("gradients/tiny_share", every_bin[0] / sum(every_bin))
        if training.rank == 0:
            with (training.folder / "gradients.jsonl").open("a") as file:
                file.write(json.dumps({"step": training.step, "counts": counts}) + "\n")


def histogram(gradient):
    powers = gradient.abs().log10().floor().clamp(LOWEST, HIGHEST).nan_to_num(HIGHEST).long() - LOWEST
    return torch.bincount(powers.flatten(), minlength=HIGHEST - LOWEST + 1).tolist()
