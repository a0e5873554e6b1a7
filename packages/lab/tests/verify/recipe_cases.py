"""The shipped recipes on small data, with small models, each with the overrides that make it so.

Learning rates are those of small new models where a recipe has rates for pretrained models or for large batches.
"""

import csv
from pathlib import Path

import numpy as np
import torch

from tests.box_cases import box_folder
from tests.image_cases import picture_folder
from tests.mask_cases import shapes_folder
from tests.risk_cases import volume_table

WORDS = {
    "world": ("treaty", "border", "election", "minister"),
    "sports": ("match", "goal", "coach", "league"),
    "business": ("market", "profit", "shares", "bank"),
    "science": ("planet", "chip", "software", "laser"),
}
BERT = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}"
RESNET = "{architecture: resnet, sizes: {depths: [1, 1], hidden_sizes: [16, 32], embedding_size: 8}}"
VIT = (
    "{architecture: vit, sizes: {hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, "
    "patch_size: 8}}"
)
SMALL_VOLUMES = ["task.image_size=16", "task.max_slices=6", "data.workers=0"]
"""Of volumes, of which the larger part is decoding."""


def overrides(recipe, folder):
    """`key=value` for a recipe that the command line takes, with data and models in `folder`, which are made here."""
    return [*CASES[recipe](Path(folder)), "device=cpu"]


def _texts(folder, count=96):
    draw = np.random.default_rng(0)
    for part, size in (("train", count), ("eval", count // 3)):
        with open(folder / f"{part}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for number in range(size):
                label = list(WORDS)[number % 4]
                own = draw.choice(WORDS[label], 3).tolist()
                writer.writerow([" ".join([*own, f"of the {draw.integers(100)} on", own[0], str(part)]), label])
    return [f"data.train={folder}/train.csv", f"data.eval={folder}/eval.csv"]


def _ag_news(folder):
    """A small BERT with its tokenizer takes the place of the hub's."""
    from lockstep_recipes.tasks.text.options import TextOptions
    from lockstep_recipes.tasks.text.task import Text

    options = _texts(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    scratch = {"architecture": "bert", "vocab_size": 200, "sizes": sizes}
    task = Text(TextOptions.model_validate({"scratch": scratch, "max_length": 16}), f"{folder}/train.csv", None)
    torch.manual_seed(0)
    task.train_data()
    task.model().save_pretrained(folder / "bert")
    task.tokenizer.save_pretrained(folder / "bert")
    return [
        *options,
        f"task.model={folder}/bert",
        "task.max_length=16",
        "batch.per_rank=4",
        "batch.accumulate=2",
        "optim.lr=0.02",
    ]


def _text(folder):
    scratch = "{architecture: bert, vocab_size: 200, sizes: " + BERT + "}"
    return [*_texts(folder), f"task.scratch={scratch}", "task.max_length=16", "batch.global=16"]


def _docstrings(folder):
    scratch = "{architecture: bert, vocab_size: 500, sizes: " + BERT + "}"
    return [f"task.scratch={scratch}", "task.max_length=16", "batch.global=16"]


def _pictures(folder):
    picture_folder(folder / "train", count=20)
    picture_folder(folder / "val", count=9, seed=1)
    return [f"data.train={folder}/train", f"data.eval={folder}/val", "batch.global=16"]


def _cifar(folder):
    return [*_pictures(folder), f"task.scratch={RESNET}", "task.image_size=16", "data.workers=0"]


def _image_folder(folder):
    return [*_pictures(folder), "task.image_size=16"]


def _imagenet(folder):
    """In the folder of ImageNet; images grow within the few epochs."""
    _pictures(folder)
    sizes = ["task.image_size={0: 12, 1: 12, 2: 16}", "task.eval_size=16", "task.eval_resize=18"]
    small = [f"task.scratch={RESNET}", *sizes, "batch.global=16", "batch.micro=8", "data.workers=0"]
    return [f"data.train={folder}", *small, "optim.lr=10", "train.ema_decay=0.9"]


def _detection(folder):
    counts = (0, 5, 1, 0, 3, 2, 0, 4, 2, 0, 1, 3, 1, 2, 0, 1, 2, 3, 1, 1)
    box_folder(folder / "pictures", counts=counts)
    box_folder(folder / "held_out", counts=counts[:9], seed=1, split="val")
    small = ["task.image_size=64", "task.scratch={sizes: {width: 16, levels: 3}}", "batch.global=4"]
    return [f"data.train={folder}/pictures", f"data.eval={folder}/held_out", *small]


def _segmentation(folder):
    data = shapes_folder(folder / "shapes")
    small = ["task.scratch={sizes: {width: 8, depth: 2, stride: 2}}", "task.image_size=32", "batch.global=4"]
    return [f"data.train={data}", *small]


def _volumes(folder):
    answers = [("1", "1", "1"), ("0", "", "0"), ("", "0", "1"), ("0", "1", ""), ("1", "", "0"), ("0", "0", "1")]
    train = volume_table(folder / "volumes", answers * 3, most=7)
    held_out = volume_table(folder / "held_out", answers, most=7, seed=1)
    Path(held_out).write_text(Path(held_out).read_text().replace("\np", "\nq"))  # other patients
    return [f"data.train={train}", f"data.eval={held_out}", *SMALL_VOLUMES]


def _ct_small(folder):
    small = [f"task.scratch={VIT}", "task.aggregator={width: 16, layers: 1, heads: 2}", "task.frozen_epochs=1"]
    return [*_volumes(folder), *small, "train.unfreeze=[{match: [backbone.*], epoch: 1}]"]


def _nlst(folder):
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2}
    Dinov2Model(Dinov2Config(image_size=16, patch_size=8, **sizes)).save_pretrained(folder / "dinov2")
    small = [f"task.model={folder}/dinov2", "task.aggregator={width: 16, layers: 1, heads: 2, dropout: 0.1}"]
    rates = ["optim.lr=0.003", "optim.groups=[{name: backbone, match: [backbone.*], lr: 0.001}]"]
    return [
        *_volumes(folder),
        *small,
        *rates,
        "batch={global: 4, micro: 1}",
        "train.unfreeze=[{match: [backbone.*], epoch: 1}]",
    ]


def _lm(folder):
    from tests import lm_cases

    file = lm_cases.json_lines(folder / "texts.jsonl", [{"text": text} for text in lm_cases.texts(count=300)])
    sizes = ["task.small={layers: 1, width: 16, heads: 2}", "task.vocab_size=300", "task.length=32"]
    return [f"data.train={file}", *sizes, "batch.global=8", "task.new_tokens=8", "optim.lr=0.02"]


CASES = {
    "ag_news": _ag_news,
    "cifar": _cifar,
    "ct_small": _ct_small,
    "detection": _detection,
    "digits": lambda _: ["batch.global=16"],
    "docstrings": _docstrings,
    "image_folder": _image_folder,
    "imagenet": _imagenet,
    "imagenet_88": _imagenet,
    "lm": _lm,
    "nlst": _nlst,
    "segmentation": _segmentation,
    "text": _text,
    "toy": lambda _: [],
}
