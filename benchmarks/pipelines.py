"""Pipelines of real libraries of augmentations: their samples are equal on any ranks, workers and restarts.

    python benchmarks/pipelines.py [--libraries FOLDER] [--only NAME ...] [--samples 24]

Each pipeline trains for two epochs on 1, 2 and 3 ranks, with 0, 1 and 4 workers, and once more with a SIGKILL in the
second epoch and a resumed run. The task records a digest of each prepared sample by epoch and index. The tool prints
how many digests differ from those on one rank without workers, and the time that Lockstep's seeding takes for a sample.

`--libraries` is a folder of packages that are not installed: `pip install --target FOLDER --no-deps albumentations
albucore simsimd stringzilla opencv-python-headless kornia kornia_rs`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import free_port
from torch.utils.data import Dataset

import lockstep

BATCH = 6


def albumentations_flips() -> Any:
    import albumentations as A

    pipeline = A.Compose([A.HorizontalFlip(), A.RandomCrop(24, 24), A.RandomBrightnessContrast()])
    return lambda image: pipeline(image=image)["image"]


def albumentations_one_of() -> Any:
    import albumentations as A

    choice = A.OneOf([A.GaussNoise(p=1), A.GaussianBlur(p=1), A.MotionBlur(p=1)], p=0.9)
    pipeline = A.Compose(
        [choice, A.SomeOf([A.Rotate(), A.RandomGamma(), A.CoarseDropout()], n=2), A.ElasticTransform()]
    )
    return lambda image: pipeline(image=image)["image"]


def albumentations_seeded() -> Any:
    import albumentations as A

    pipeline = A.Compose([A.Affine(rotate=(-30, 30)), A.HueSaturationValue(), A.RandomResizedCrop((24, 24))], seed=7)
    return lambda image: pipeline(image=image)["image"]


def albumentations_boxes() -> Any:
    import albumentations as A

    pipeline = A.Compose(
        [A.HorizontalFlip(), A.Perspective(), A.Rotate()],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]),
    )

    def apply(image: Any) -> Any:
        found = pipeline(image=image, bboxes=[(4, 4, 20, 24)], labels=[1])
        boxes = np.zeros((1, 4)) if not len(found["bboxes"]) else np.asarray(found["bboxes"])[:, :4]
        return np.concatenate([found["image"].reshape(-1).astype("f8"), boxes.reshape(-1)])

    return apply


def albumentations_alone() -> Any:
    import albumentations as A

    noise, flip = A.GaussNoise(p=1), A.RandomRotate90(p=0.8)
    return lambda image: noise(image=flip(image=image)["image"])["image"]


def monai_images() -> Any:
    import monai.transforms as M

    return M.Compose(
        [M.EnsureChannelFirst(channel_dim=-1), M.RandFlip(0.5), M.RandGaussianNoise(0.9), M.RandRotate(0.3, prob=0.9)]
    )


def monai_dictionaries() -> Any:
    import monai.transforms as M

    names = ["image", "label"]
    pipeline = M.Compose(
        [
            M.EnsureChannelFirstd(names, channel_dim=-1),
            M.RandCropByPosNegLabeld(names, "label", (16, 16), num_samples=2),
            M.RandAffined(names, prob=0.9, rotate_range=0.3, mode=("bilinear", "nearest")),
            M.RandShiftIntensityd("image", 0.2, prob=0.9),
        ]
    )

    def apply(image: Any) -> Any:
        found = pipeline({"image": image, "label": (image[..., :1] > 100).astype("u1")})
        return np.stack([np.asarray(each["image"]) for each in found])

    return apply


def monai_alone() -> Any:
    import monai.transforms as M

    shift, smooth = M.RandScaleIntensity(0.3, prob=0.9), M.RandGaussianSmooth(prob=0.9)  # share MONAI's generator
    return lambda image: smooth(shift(torch.as_tensor(image, dtype=torch.float32).permute(2, 0, 1)))


def monai_one_of() -> Any:
    import monai.transforms as M

    choice = M.OneOf([M.RandAdjustContrast(prob=1), M.RandHistogramShift(prob=1), M.RandGibbsNoise(prob=1)])
    return M.Compose([M.EnsureChannelFirst(channel_dim=-1), M.ScaleIntensity(), choice, M.RandZoom(prob=0.9)])


def kornia_images() -> Any:
    import kornia.augmentation as K

    pipeline = torch.nn.Sequential(K.RandomHorizontalFlip(), K.ColorJitter(0.2, 0.2, 0.2, 0.1), K.RandomAffine(20.0))
    return lambda image: pipeline(torch.as_tensor(image).permute(2, 0, 1)[None].float() / 255)[0]


def kornia_with_numpy() -> Any:
    import kornia.augmentation as K

    erase, generator = K.RandomErasing(p=0.8), np.random.default_rng()

    def apply(image: Any) -> Any:
        noisy = image + generator.normal(0, 5, image.shape)
        return erase(torch.as_tensor(noisy).permute(2, 0, 1)[None].float() / 255)[0]

    return apply


PIPELINES = {
    function.__name__: function
    for function in (
        albumentations_flips,
        albumentations_one_of,
        albumentations_seeded,
        albumentations_boxes,
        albumentations_alone,
        monai_images,
        monai_dictionaries,
        monai_alone,
        monai_one_of,
        kornia_images,
        kornia_with_numpy,
    )
}


class Images(Dataset[Any]):
    """Random images, augmented by a pipeline when they are read."""

    def __init__(self, name: str, samples: int) -> None:
        self.images = np.random.default_rng(0).integers(0, 255, (samples, 32, 32, 3), dtype=np.uint8)
        self.pipeline = PIPELINES[name]()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, np.asarray(self.pipeline(self.images[index].copy())).astype("f8")


class Pipeline(lockstep.Task):
    """Records the digest of each sample that is prepared for a step."""

    def __init__(self, name: str, samples: int, folder: str) -> None:
        self.name, self.samples, self.folder = name, samples, folder

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def train_data(self) -> Images:
        return Images(self.name, self.samples)

    def prepare(self, sample: Any, epoch: int, training: bool) -> Any:
        return sample[0], epoch, hash_of(sample[1])

    def collate(self, samples: list[Any]) -> Any:
        return torch.tensor(samples, dtype=torch.int64)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if model.training and torch.is_grad_enabled():
            with open(f"{self.folder}/rank{os.environ.get('RANK', 0)}.txt", "a") as file:
                file.writelines(f"{index} {epoch} {digest}\n" for index, epoch, digest in batch.tolist())
        if os.environ.get("KILL") and (batch[:, 1] == 1).any():
            os.kill(os.getpid(), 9)
        return model(torch.ones(len(batch), 1)).sum()


def hash_of(array: Any) -> int:
    """A digest of an array as a signed number of 64 bits."""
    import hashlib

    content = str(array.shape).encode() + np.ascontiguousarray(array).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def of_rank(variables: dict[str, str], name: str, samples: int, folder: str, workers: int) -> None:
    """Train on a rank, in a process that was forked for it."""
    os.environ |= variables
    config = {
        "train": {"epochs": 2},
        "batch": {"global": BATCH},
        "data": {"workers": workers},
        "checkpoint": {"every_steps": samples // BATCH},
        "log": {"writers": []},
    }
    lockstep.Trainer(config, run_dir=f"{folder}/run", quiet=True).fit(Pipeline(name, samples, folder))


def trained(name: str, samples: int, ranks: int, workers: int, kill: bool = False) -> dict[Any, int]:
    """The digest of each sample by index and epoch, of a training in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        for kills in [True, False] if kill else [False]:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | ({"KILL": "1"} if kills else {})
            processes = []
            for rank in range(ranks):
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                variables = {key: str(value) for key, value in numbers.items()} | shared
                arguments = (variables, name, samples, folder, workers)
                processes.append(multiprocessing.get_context("fork").Process(target=of_rank, args=arguments))
                processes[-1].start()
            if kills:
                while all(process.is_alive() for process in processes):
                    time.sleep(0.1)
                for process in processes:
                    process.kill()
            for process in processes:
                process.join()
            if not kills and any(process.exitcode for process in processes):
                raise SystemExit(f"{name}: a training on {ranks} ranks failed")
        found: dict[Any, set[int]] = {}
        for path in Path(folder).glob("rank*.txt"):
            for line in path.read_text().splitlines():
                index, epoch, digest = map(int, line.split())
                found.setdefault((index, epoch), set()).add(digest)
        if clashing := [key for key, digests in found.items() if len(digests) > 1]:
            print(f"{name}: {len(clashing)} samples differ within a run", flush=True)
        return {key: digests.pop() for key, digests in found.items()}


def cost(name: str, samples: int) -> tuple[int, float, float]:
    """The private generators of a pipeline, and microseconds per sample: seeding those that it draws from, and all."""
    from lockstep.core.data.loader import MicroBatches
    from lockstep.core.data.order import MicroBatchPlan

    data = Images(name, samples)
    micro_batches = MicroBatches(data, Pipeline(name, samples, ""), 0, training=True)
    for epoch in range(3):
        micro_batches[MicroBatchPlan(tuple(range(samples)), epoch, False)]
    start = time.perf_counter()
    for epoch in range(3, 6):
        micro_batches[MicroBatchPlan(tuple(range(samples)), epoch, False)]
    whole = (time.perf_counter() - start) / 3 / samples * 1e6
    seeders, times = micro_batches.seeding.seeders(), []
    for seed in range(300):
        start = time.perf_counter()
        for seeder in seeders:
            seeder(seed * 0x9E3779B97F4A7C15 % (1 << 64))
        times.append((time.perf_counter() - start) * 1e6)
    return len(micro_batches.seeding.private), sorted(times)[150], whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", default="")
    parser.add_argument("--only", nargs="*", default=list(PIPELINES))
    parser.add_argument("--samples", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.libraries:
        sys.path.append(arguments.libraries)
    runs = [(ranks, workers, False) for ranks in (1, 2, 3) for workers in (0, 1, 4)] + [(2, 1, True)]
    print("| pipeline | generators | seeding, of a sample | samples that differ | runs |\n|---|---|---|---|---|")
    for name in arguments.only:
        found = [trained(name, arguments.samples, *each) for each in runs]
        differ = sum(one.get(key) != value for one in found[1:] for key, value in found[0].items())
        assert len(set(found[0].values())) > len(found[0]) / 2, f"{name}: it draws nothing"
        count, seeding, whole = cost(name, arguments.samples)
        total = len(found[0]) * (len(runs) - 1)
        print(
            f"| `{name}` | {count} | {seeding:.0f} of {whole:.0f} us | {differ} of {total} | {len(runs)} |", flush=True
        )


if __name__ == "__main__":
    main()
