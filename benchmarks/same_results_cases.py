"""The trainings that `same_results.py` compares, and their data.

All are tiny: at most 10 steps of some dozens of samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TASKS = Path(__file__).with_name("same_results_task.py").resolve()
Settings = dict[str, Any]
LAYOUTS = {  # by name: ranks, and keys of the config
    "1": (1, {}),
    "single": (1, {"parallel.strategy": "single"}),
    "2": (2, {}),
    "3": (3, {}),
    "2-fsdp": (2, {"parallel.strategy": "fsdp"}),
    "3-fsdp": (3, {"parallel.strategy": "fsdp"}),
    "4-hybrid": (4, {"parallel.strategy": "fsdp", "parallel.shard_ranks": 2}),
}
COMMON = {
    "device": "cpu",
    "log.every_steps": 2,
    "log.pictures": 0,
    "log.writers": ["text_log", "json_lines"],
    "checkpoint.keep_last": 2,
}


@dataclass
class Case:
    """A training, and what is done with it."""

    name: str
    starts: list[tuple[int, Settings]]
    """The starts of the training: number of ranks, and the whole config by dotted keys. Later starts resume."""
    crosses: bool = False
    """After the first start, which only BEFORE makes, the run directory is copied, and AFTER resumes from the copy."""
    commands: bool = False
    """Train, evaluate, predict and export with commands, instead of in persistent processes."""
    config_of: str = ""
    """Nothing is trained: the resolved config of this recipe is compared."""
    exports: bool = field(default=False)


def all_cases(data: Path) -> list[Case]:
    """All cases, on the data from `write_data`."""
    cases = [*_toys(), *_users_tasks(), *_digits(), *_pictures(data), *_texts(data), *_volumes(data)]
    cases += [*_resumed(), *_by_commands()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases have the same name"
    return cases


def _grid(kind: str, base: Settings, variants: Mapping[str, Settings], layouts: str) -> Iterator[Case]:
    for variant, keys in variants.items():
        for layout in layouts.split():
            ranks, parallel = LAYOUTS[layout]
            settings = COMMON | base | keys | parallel
            yield Case(f"{kind}/{variant}/{layout}", [(ranks, settings)], exports=layout == "1")


# ---- regression on made-up numbers, and tasks of users

TOY = {
    "task": {"kind": "toy", "samples": 100, "eval_samples": 31},  # 24 do not divide 100: the last batch is uneven
    "batch.global": 24,
    "train.steps": 9,
    "train.eval_every_steps": 4,
    "optim.lr": 0.01,
}
HEADS = TOY | {"task": {"kind": f"{TASKS}:Heads"}}
ENDED_EARLY = {"train.stop_when": {"metric": "eval/loss", "mode": "min", "target": 100.0}}


def _toys() -> Iterator[Case]:
    main = {
        "plain": {"optim.clip_norm": 0.5},
        "micro": {"batch.micro": 3, "train.ema_decay": 0.9},
        "bf16": {"precision": "bf16", "schedule.name": "cosine", "schedule.warmup_steps": 3},
    }
    yield from _grid("toy", TOY, main, "1 single 2 3 2-fsdp 3-fsdp 4-hybrid")
    few = {
        "fp16": {"precision": "fp16"},
        "accumulate": {"batch": {"per_rank": 5, "accumulate": 2}, "batch.global": None},
        "drop_last": {"data.drop_last": True, "batch.micro": {0: 24, 1: 4}},
        "workers": {"data.workers": 2},
        "best": {"checkpoint.keep_best": "min eval/loss", "checkpoint.every_steps": 2, "checkpoint.mode": "sync"},
        "target": ENDED_EARLY,
    }
    yield from _grid("toy", TOY, few, "1 2 2-fsdp")
    for name, args in {
        "SGD": {"momentum": 0.9, "nesterov": True},
        "Adam": {"amsgrad": True},
        "NAdam": {},
        "RAdam": {},
        "Adagrad": {},
        "RMSprop": {"momentum": 0.5},
        "Adadelta": {},
        "Adafactor": {},
    }.items():
        task = {"task": TOY["task"] | {"layers": 2}, "optim": {"name": name, "lr": 0.01, "args": args}}
        yield from _grid("optimizer", TOY, {name: task | {"optim.weight_decay": 0.1}}, "2")
    for name in ("constant", "linear", "cosine", "step", "one_cycle", "polynomial"):
        keys = {"schedule": {"name": name, "warmup_steps": 2, "step_epochs": 1, "power": 2.0}}
        yield from _grid("schedule", TOY, {name: keys}, "2")
    compiled = {
        "model": {"compute.compile": "model", "compute.compile_backend": "aot_eager"},
        "inductor": {"compute.compile": "model", "train.steps": 4},
    }
    yield from _grid("compile", TOY, compiled, "2")


def _users_tasks() -> Iterator[Case]:
    main = {
        "plain": {},
        "rich": {
            # the last batch has at least three samples per rank, so BatchNorm has a variance
            "task": HEADS["task"] | {"length": 108, "dropout": 0.1, "batch_norm": True},
            "batch.micro": 5,
            "optim.clip_norm": 1.0,
            "train.ema_decay": 0.95,
        },
        "broken": {"task": HEADS["task"] | {"broken": True}, "data.on_error": "skip"},
        "unfreeze": {
            "train.unfreeze": [{"match": ["blocks.0.*"], "epoch": 1}, {"match": ["inner.*"], "step": 6}],
            "optim.groups": [{"name": "heads", "match": ["classes.*", "answers.*"], "lr": 0.1, "weight_decay": 0.0}],
        },
    }
    yield from _grid("heads", HEADS, main, "1 2 3 2-fsdp 4-hybrid")
    few = {
        "recomputed": {"compute.activation_checkpointing": True, "task": HEADS["task"] | {"dropout": 0.2}},
        "grouped": {"data.group_by_length": 2, "batch.micro": 4},
        "layer_decay": {"optim.layer_decay": 0.8, "optim.lr_scaling": "sqrt", "optim.reference_batch": 8},
        "part": {"train.parts": [f"{TASKS}:Halves"]},
        "ends": {"train.parts": [f"{TASKS}:Ends"]},
    }
    yield from _grid("heads", HEADS, few, "1 2 2-fsdp")
    other = {
        "probed": {"watch.every": 3, "parallel.find_unused_parameters": True},
        "compiled": {"compute.compile": "blocks", "compute.compile_backend": "aot_eager"},
        "broken-workers": main["broken"] | {"data.workers": 2, "batch.micro": 4},
        "seed": {"seed": 7, "train.eval_every_steps": None, "train.steps": None, "train.epochs": 2},
        "no-metrics": {"log.train_metrics": False, "log.flops": False, "data.eval_limit": 10},
    }
    yield from _grid("heads", HEADS, other, "2")


# ---- shipped tasks


def _digits() -> Iterator[Case]:
    base = {"extends": "digits", "train.steps": 5, "train.eval_every_steps": 5, "batch.global": 96}
    variants = {
        "recipe": {"log.every_steps": 1},
        "accumulated": {"batch.micro": 17, "train.ema_decay": 0.99, "data.workers": 2},
    }
    yield from _grid("digits", base, variants, "1 2 3 2-fsdp 4-hybrid")
    yield from _grid("digits", base, {"fp16": {"precision": "fp16", "optim.name": "SGD", "log.pictures": 4}}, "1 2")


def _pictures(data: Path) -> Iterator[Case]:
    short = {"train.steps": 4, "train.eval_every_steps": 4, "optim.lr": 0.01}
    images = {"data.train": str(data / "images/train"), "data.eval": str(data / "images/val")}
    base = short | images | {"task": {"kind": "classification", "image_size": 24}, "batch.global": 10}
    resnet = {"architecture": "resnet", "sizes": {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 8}}
    variants = {
        "small": {},
        "resnet": {"task": base["task"] | {"scratch": resnet, "label_smoothing": 0.1}, "compute.channels_last": True},
        "mixed": {"task": base["task"] | {"cutmix_alpha": 1.0, "mixup_alpha": 0.5, "class_weights": "balanced"}},
        "broken": {"data.train": str(data / "broken/train"), "data.on_error": "skip", "data.workers": 2},
    }
    yield from _grid("images", base, variants, "1 2 3")
    masks = {"kind": "segmentation", "image_size": 32, "scratch": {"sizes": {"width": 8, "depth": 2, "stride": 2}}}
    base = short | {"task": masks, "data.train": str(data / "masks"), "batch.global": 4}
    variants = {
        "plain": {},
        "losses": {"task": masks | {"losses": {"cross_entropy": 1.0, "dice": 0.5}}, "batch.micro": 1},
    }
    yield from _grid("masks", base, variants, "1 2 2-fsdp")
    boxes = {"kind": "detection", "image_size": 64, "scratch": {"sizes": {"width": 16, "levels": 3}}}
    base = short | {"task": boxes, "data.train": str(data / "boxes"), "batch.global": 4}
    variants = {"plain": {}, "averaged": {"train.ema_decay": 0.9, "batch.micro": 1, "optim.clip_norm": 10.0}}
    yield from _grid("boxes", base, variants, "1 2 2-fsdp")


def _texts(data: Path) -> Iterator[Case]:
    base = {"task": {"kind": "text", "max_length": 24, "scratch": {"vocab_size": 200}, "eval_fraction": 0.2}}
    base |= {"data.train": str(data / "texts.csv"), "batch.global": 14, "train.steps": 5, "train.eval_every_steps": 5}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = base["task"] | {"scratch": {"architecture": "bert", "vocab_size": 200, "sizes": sizes}}
    variants = {
        "bag": {"optim.lr": 0.01},
        "bert": {"task": bert, "optim": {"lr": 0.001, "layer_decay": 0.9, "clip_norm": 1.0}, "batch.micro": 5},
        "grouped": {"task": bert, "data.group_by_length": 2, "precision": "bf16", "optim.lr": 0.001},
    }
    yield from _grid("texts", base, variants, "1 2 2-fsdp 4-hybrid")


def _volumes(data: Path) -> Iterator[Case]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    task = {"kind": "volume_risk", "image_size": 16, "max_slices": 6, "resamples": 20}
    task |= {"scratch": {"architecture": "vit", "sizes": sizes | {"patch_size": 8}}}
    task |= {"aggregator": {"width": 16, "layers": 2, "heads": 2}}
    base = {"task": task, "data.train": str(data / "volumes/labels.csv"), "batch.global": 4}
    base |= {"train.steps": 4, "train.eval_every_steps": 4, "optim.lr": 0.01}
    variants = {
        "plain": {"batch.micro": 1},
        "frozen": {
            "task": task
            | {"frozen_epochs": 1, "augment": None, "train_slices": "even", "positive_weights": "balanced"},
            "train.unfreeze": [{"match": ["backbone.*"], "epoch": 1}],
        },
        "fold": {"data.fold": "1/3", "task": task | {"head": "hazard", "loss": "survival"}},
    }
    yield from _grid("volumes", base, variants, "1 2 2-fsdp")


# ---- runs that resume, and commands


def _resumed() -> Iterator[Case]:
    changes = ("1 1", "2 2", "1 2", "2 3", "3 1", "2 2-fsdp", "2-fsdp 1", "1 4-hybrid", "4-hybrid 3")
    bases = {
        "toy": TOY | {"train.ema_decay": 0.9, "optim.clip_norm": 1.0},
        "heads": HEADS | {"task": HEADS["task"] | {"dropout": 0.1}, "train.parts": [f"{TASKS}:Halves"]},
    }
    for kind, base in bases.items():
        for change in changes:
            first, second = change.split()
            for crosses in (False, True):
                starts = []
                for layout, steps in ((first, 5), (second, 10)):
                    ranks, parallel = LAYOUTS[layout]
                    curve = {"name": "cosine", "warmup_steps": 2, "total_steps": 10}
                    starts.append((ranks, COMMON | base | parallel | {"schedule": curve, "train.steps": steps}))
                name = f"{'crossed' if crosses else 'resumed'}/{kind}/{first}-to-{second}"
                if kind == "toy" or crosses or change in ("1 2", "2 2-fsdp"):
                    yield Case(name, starts, crosses=crosses)


def _by_commands() -> Iterator[Case]:
    for layout in ("1", "2", "2-fsdp"):
        ranks, parallel = LAYOUTS[layout]
        keys = {"extends": "digits", "train.steps": 5, "train.eval_every_steps": 5, "train.ema_decay": 0.9}
        yield Case(f"commands/digits/{layout}", [(ranks, COMMON | keys | parallel)], commands=True, exports=True)
    yield Case("commands/heads/2", [(2, COMMON | HEADS)], commands=True)
    for recipe in ("digits", "toy", "docstrings", "cifar", "imagenet", "imagenet_88", "ag_news"):
        yield Case(f"config/{recipe}", [], config_of=recipe)


# ---- data


def write_data(root: Path) -> None:
    """Small images with classes, masks and boxes, texts and volumes."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 9), ("val", 4)):
        for folder in ("images", "broken"):
            _write_pictures(root / folder / part, count, draw)
        _write_masks(root / "masks" / part, count + 2, draw)
        _write_boxes(root / "boxes", part, count + 2, draw)
    for name in ("blue/001.png", "red/004.png"):
        file = root / "broken/train" / name
        file.write_bytes(file.read_bytes()[:60])
    words = {"sport": "ball goal team match", "food": "bread soup salt spoon", "sky": "cloud star rain moon"}
    rows = ["text,label"]
    for _ in range(90):
        label = str(draw.choice(list(words)))
        chosen = draw.choice([*words[label].split(), "the", "a", "and", "of"], int(draw.integers(2, 30)))
        rows.append(f"{' '.join(chosen)} {len(rows)},{label}")
    (root / "texts.csv").write_text("\n".join(rows) + "\n")
    _write_volumes(root / "volumes", draw)


def _write_pictures(folder: Path, count: int, draw: np.random.Generator) -> None:
    for place, name in enumerate(("blue", "green", "red")):
        for number in range(count):
            pixels = draw.integers(0, 200, (*draw.integers(18, 30, 2), 3), dtype=np.uint8)
            pixels[..., 2 - place] += 55
            _save(pixels, folder / name / f"{number:03}.png")


def _write_masks(folder: Path, count: int, draw: np.random.Generator) -> None:
    for number in range(count):
        mask = np.zeros(draw.integers(26, 44, 2), np.uint8)
        mask[4:14, 3 : 10 + number] = 1
        mask[-8:-4, 2:] = 2
        pixels = np.array([110, 230, 20])[mask][..., None] + draw.normal(0, 12, (*mask.shape, 3))
        mask[:, : 4 * (number % 4)] = 255
        _save(pixels.clip(0, 255).astype(np.uint8), folder / "images" / f"{number}.png")
        _save(mask, folder / "masks" / f"{number}.png")
    classes = {"classes": ["ground", "disc", "bar"], "ignore": 255}
    (folder.parent / "classes.json").write_text(json.dumps(classes))


def _write_boxes(root: Path, part: str, count: int, draw: np.random.Generator) -> None:
    images, annotations = [], []
    for number in range(count):
        height, width = (int(side) for side in draw.integers(44, 80, 2))
        pixels = draw.integers(90, 130, (height, width, 3), dtype=np.uint8)
        for _ in range((0, 5, 1, 2)[number % 4]):
            across, down = (int(side) for side in draw.integers(6, 20, 2))
            left, top = int(draw.integers(0, width - across)), int(draw.integers(0, height - down))
            kind = int(draw.integers(3))
            pixels[top : top + down, left : left + across] = 255 * np.eye(3, dtype=np.uint8)[kind]
            box = {"bbox": [left, top, across, down], "area": across * down, "iscrowd": 0, "category_id": kind}
            annotations.append(box | {"id": len(annotations) + 1, "image_id": number})
        _save(pixels, root / "images" / part / f"{number:03}.png")
        images.append({"id": number, "file_name": f"{number:03}.png", "height": height, "width": width})
    categories = [{"id": number, "name": name} for number, name in enumerate(("red", "green", "blue"))]
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


def _write_volumes(root: Path, draw: np.random.Generator) -> None:
    root.mkdir(parents=True)
    answers = ("0,0", "1,1", "0,1", ",1", "0,", "0,0", "1,1", "0,1", ",", "0,0", "1,1", "0,1")
    rows = ["patient,image,split,death_1y,death_3y"]
    for number, answer in enumerate(answers):
        count = 4 + number % 5
        slices = draw.normal(-300, 200, (count, 24, 20)) + 100 * number
        positions = np.arange(count, dtype=np.float32) * (1 + number % 3)
        np.savez(root / f"{number}.npz", slices=slices.astype(np.int16), positions=positions, spacing=[2, 1, 1])
        rows.append(f"p{number},{number}.npz,{'val' if number % 3 == 2 else 'train'},{answer}")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")


def _save(pixels: np.ndarray, file: Path) -> None:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)
