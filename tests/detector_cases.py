"""Small detectors of transformers, pictures with very unevenly many boxes, and a task of both in float64."""

import torch
from torch.utils.data import Dataset

from lockstep import Task
from lockstep_recipes.tasks.vision.detection.model_choice import models_for
from lockstep_recipes.tasks.vision.detection.models import Targets
from lockstep_recipes.tasks.vision.detection.options import DetectionOptions

SIZE = 64
CLASSES = ["circle", "square", "star"]

_BLOCKS = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "embedding_size": 8}
_RESNET = {"model_type": "resnet", "layer_type": "basic", "out_features": ["stage4"], **_BLOCKS}
_DETR = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_queries": 6,
    "dropout": 0.0,
    "auxiliary_loss": True,
}
_TWO_STAGES = {
    "d_model": 16,
    "encoder_hidden_dim": 16,
    "encoder_in_channels": [8, 16, 16],
    "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_in_channels": [16, 16, 16],
    "decoder_ffn_dim": 16,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "decoder_n_points": 2,
    "num_queries": 6,
    "hidden_expansion": 0.5,
    "num_denoising": 0,
}
_RT_RESNET = {"model_type": "rt_detr_resnet", "layer_type": "basic", "out_indices": [2, 3, 4], **_BLOCKS}
_HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 16, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "stage_downsample": [False, True, True, True],
    "stage_light_block": [False] * 4,
    "stage_kernel_size": [3, 3, 3, 3],
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "embedding_size": 8,
    "out_indices": [2, 3, 4],
}
_YOLOS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_detection_tokens": 6,
    "use_mid_position_embeddings": False,
}

SIZES = {
    "detr": {"d_model": 16, "backbone_config": _RESNET, **_DETR},
    "table-transformer": {"d_model": 16, "backbone_config": _RESNET, **_DETR},
    "conditional_detr": {"d_model": 16, "backbone_config": _RESNET, **_DETR},
    "deformable_detr": {
        "d_model": 32,
        "backbone_config": _RESNET | {"out_features": ["stage2", "stage3", "stage4"]},
        "num_feature_levels": 3,
        **_DETR,
    },
    "yolos": _YOLOS,
    "rt_detr": {"backbone_config": _RT_RESNET, **_TWO_STAGES},
    "rt_detr_v2": {"backbone_config": _RT_RESNET, **_TWO_STAGES},
    "d_fine": {"backbone_config": _HGNET, **_TWO_STAGES},
}


def options_of(architecture, **sizes):
    """Options of a new detector.

    Args:
        sizes: replace keys of its config.
    """
    scratch = {"architecture": architecture, "sizes": SIZES[architecture] | sizes}
    return DetectionOptions.model_validate({"scratch": scratch, "image_size": SIZE})


def models_of(architecture, **sizes):
    return models_for(options_of(architecture, **sizes), None)


def targets_of(counts, *, seed=0, shapes=None):
    """Boxes at whole pixels, whose shares of a picture are exact numbers."""
    generator = torch.Generator().manual_seed(seed)
    number = sum(counts)
    shapes = torch.full((len(counts), 2), SIZE) if shapes is None else torch.tensor(shapes)
    least = int(shapes.min()) if len(shapes) else SIZE
    corner = torch.randint(0, least // 2, (number, 2), generator=generator)
    extent = torch.randint(2, least // 2, (number, 2), generator=generator)
    return Targets(
        boxes=torch.cat([corner, corner + extent], dim=1).float(),
        labels=torch.randint(0, len(CLASSES), (number,), generator=generator),
        counts=torch.tensor(counts),
        ignored=torch.zeros(0, 4),
        ignored_counts=torch.zeros(len(counts), dtype=torch.int64),
        shapes=shapes,
    )


class Pictures(Dataset):
    """Random pictures; every third has no box, and few have nearly all."""

    def __init__(self, length):
        self.counts = [(0, 1, 7)[index % 3] if index % 8 else 0 for index in range(length)]

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        image = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return image, targets_of([self.counts[index]], seed=index)


class Detectors(Task):
    """A detector of transformers in float64, without BatchNorm."""

    def __init__(self, architecture, length=16, **sizes):
        self.models = models_of(architecture, **sizes)
        self.coefficients = self.models.coefficients()
        self.length = length

    def model(self):
        from lockstep_recipes.tasks.vision.batch_norm import exchange_batch_norm

        model, _ = self.models.make(CLASSES, size=SIZE, trained=False)
        return exchange_batch_norm(model, "group").double()

    def train_data(self):
        return Pictures(self.length)

    def eval_data(self):
        return Pictures(self.length)

    def collate(self, samples):
        images, targets = zip(*samples, strict=True)
        return {
            "images": torch.stack(images),
            "boxes": torch.cat([one.boxes for one in targets]),
            "labels": torch.cat([one.labels for one in targets]),
            "counts": torch.cat([one.counts for one in targets]),
        }

    def targets(self, batch):
        counts = batch["counts"]
        shapes = torch.full((len(counts), 2), SIZE)
        none = torch.zeros(0, 4), torch.zeros_like(counts)
        return Targets(batch["boxes"], batch["labels"], counts, *none, shapes=shapes)

    def weight(self, batch):
        return self.models.weights(self.targets(batch))

    def loss(self, model, batch):
        targets = self.targets(batch)
        outputs = self.models.forward(model, batch["images"], targets.shapes, targets if model.training else None)
        return self.models.losses(model, outputs, targets)


def trained(architecture, settings, run_dir=None, **sizes):
    """Final weights and results of a training. For `run_ranks`."""
    from tests import runs

    return runs.fit(Detectors(architecture, **sizes), settings, run_dir)


def trained_with_denoising(architecture, settings):
    """Final weights of a training that draws noisy boxes in each forward pass. For `run_ranks`."""
    return trained(architecture, settings, num_denoising=8)[0]
