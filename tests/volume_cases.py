"""Small models and batches of volumes for tests."""

from pathlib import Path

import torch

from lockstep import Task
from lockstep_recipes.tasks.ct.aggregators import make_aggregator
from lockstep_recipes.tasks.ct.backbone import make_backbone
from lockstep_recipes.tasks.ct.features import KeptFeatures, batch_entries
from lockstep_recipes.tasks.ct.heads import make_head
from lockstep_recipes.tasks.ct.losses import answer_loss, answer_units
from lockstep_recipes.tasks.ct.model import VolumeRiskModel
from lockstep_recipes.tasks.ct.options import AggregatorOptions, VolumeRiskOptions

SIZE = 16
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
}
HALF = [0.5, 0.5, 0.5]


def backbone_options(architecture="vit", sizes=VIT, **options):
    """Options of a small backbone."""
    scratch = {"architecture": architecture, "sizes": sizes}
    return VolumeRiskOptions(scratch=scratch, image_size=SIZE, **options)


def make_model(
    aggregator="transformer",
    head="question",
    *,
    architecture="vit",
    sizes=None,
    questions=3,
    chunk=None,
    dropout=0.0,
    seed=0,
    dtype=torch.float64,
):
    """A small model with all its weights drawn from `seed`."""
    torch.manual_seed(seed)
    wanted = (VIT if sizes is None else sizes) | ({"hidden_dropout_prob": dropout} if dropout else {})
    backbone, _ = make_backbone(backbone_options(architecture, wanted))
    sizes_of_pooling = {"width": 16, "layers": 2, "heads": 2, "dropout": dropout}
    pooling = make_aggregator(AggregatorOptions(name=aggregator, **sizes_of_pooling), backbone.width)
    model = VolumeRiskModel(
        backbone,
        pooling,
        make_head(head, pooling.width, questions),
        mean=HALF,
        std=HALF,
        slices_per_chunk=chunk,
    )
    return model.to(dtype)


def make_volumes(*counts, questions=3, seed=0):
    """Volumes as (slices, positions, labels): about a third of the labels is unknown."""
    generator = torch.Generator().manual_seed(seed)
    volumes = []
    for count in counts:
        slices = torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)
        positions = torch.rand(count, generator=generator).cumsum(0) * 5
        labels = torch.randint(0, 3, (questions,), generator=generator).float()
        volumes.append((slices, positions, labels.where(labels < 2, torch.nan)))
    return volumes


def make_batch(volumes):
    """A batch of volumes, as `VolumeRiskModel` takes it, with `labels` (B, Q)."""
    slices, positions, labels = zip(*volumes, strict=True)
    counts = [len(one) for one in slices]
    return {
        "slices": torch.cat(slices),
        "counts": torch.tensor(counts),
        "longest": max(counts),
        "positions": torch.cat(positions),
        "labels": torch.stack(labels),
    }


class Volumes(Task):
    """Volumes of 1 to 9 slices, of which each sample takes at most 6 at random; many labels are unknown.

    Args:
        keep: the epochs in which features are looked up. 0: none are kept.
        root: where features are kept.
    """

    def __init__(self, length=10, keep=0, root=None, dtype=torch.float64, dropout=0.0, chunk=None):
        counts = torch.randint(1, 10, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        self.volumes = make_volumes(*counts)
        self.keep, self.kept = keep, KeptFeatures("test", Path(root)) if keep else None
        self.dtype, self.dropout, self.chunk = dtype, dropout, chunk
        self.read = []
        """The number of slices whose pixels were read, by sample."""

    def model(self):
        return make_model(dropout=self.dropout, chunk=self.chunk, dtype=self.dtype)

    def train_data(self):
        return list(range(len(self.volumes)))

    def prepare(self, sample, epoch, training):
        slices, positions, labels = self.volumes[sample]
        numbers = torch.randperm(len(slices))[:6].sort().values.tolist()
        rows = self.kept.look_up(f"volume-{sample}", numbers) if epoch < self.keep else None
        missing = numbers if rows is None else rows.missing
        self.read.append(len(missing))
        return (slices[missing], positions[numbers], labels), rows

    def collate(self, samples):
        parts, rows = zip(*samples, strict=True)
        counts = [len(positions) for _, positions, _ in parts]
        batch = make_batch(parts) | {"counts": torch.tensor(counts), "longest": max(counts)}
        return batch if rows[0] is None else batch | batch_entries(rows)

    def weight(self, batch):
        return answer_units(batch["labels"], "question")

    def loss(self, model, batch):
        features = model.slice_features(batch)
        if self.kept is not None:
            self.kept.update(model, batch, features)
        return answer_loss(model(batch, features).logits, batch["labels"], reduction="question")


def train(options, settings):
    """Final weights, the slices read by sample, and whether the model is sharded."""
    from tests import runs

    task = Volumes(**options)
    weights, _ = runs.fit(task, settings)
    return weights, task.read


def reduced_buckets(options, settings):
    """The buckets that DDP reduces, in their order: place in the step, whether the bucket is the last of the step, its
    elements, the elements of trainable parameters, and the number of trainable parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from lockstep.core.parallel.ddp import DDP

    reduced, wrap = [], DDP.wrap

    def counting_wrap(strategy, *arguments):
        wrap(strategy, *arguments)
        sizes = [p.numel() for p in strategy.unwrapped.model.parameters() if p.requires_grad]

        def hook(state, bucket):
            reduced.append((bucket.index(), bucket.is_last(), bucket.buffer().numel(), sum(sizes), len(sizes)))
            return allreduce_hook(state, bucket)

        strategy.forward.register_comm_hook(None, hook)

    DDP.wrap = counting_wrap
    try:
        train(options, settings)
    finally:
        DDP.wrap = wrap
    return reduced
