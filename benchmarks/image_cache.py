"""Pictures per second from files to batches: the second epoch from the cache of decoded pictures.

    python benchmarks/image_cache.py [--rounds 9] [--pictures 480] [--data ../shared/data] [--folder DIR]

The pictures are JPEG files of 500x375 pixels and quality 90, made from real photographs (CamVid). Each is a training
sample: a random resized crop to 224, and a flip. Batches of 64.

    plain        a file is opened by PIL, converted, cropped, resized; NumPy, float, / 255, normalised by channel;
                 default_collate: the usual pipeline
    lockstep     `MicroBatches` with `DecodedImages` and `tasks.vision.pictures`, without the cache: a uint8 batch
    first epoch  the same with an empty cache, which it fills
    cached       the same, from the cache

One process, one torch thread. Seconds are CPU time, the system's included, so that other processes count less. Files
and cache are in the system's memory, as they are where the memory is large enough. The systems alternate. What is
quoted is the median of pictures per second, and the median over rounds of the ratio to `plain`, with the least and the
greatest ratio. Before, the batches of `cached` are compared with those of `lockstep`: they must be bit-identical.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from lockstep.core.data.loader import MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.tasks.vision.classification.options import ClassificationOptions
from lockstep.tasks.vision.pictures.augment import AugmentOptions, train_picture
from lockstep.tasks.vision.pictures.cache import CacheOptions
from lockstep.tasks.vision.pictures.normalise import IMAGENET_MEAN, IMAGENET_STD
from lockstep.tasks.vision.pictures.picture import Picture, stack_images
from lockstep.tasks.vision.readers.decoded_images import DecodedImages
from lockstep.tasks.vision.readers.image_records import ImageRecords, read_image_records

ROOT = Path(__file__).resolve().parents[1]
SIDE, BATCH = 224, 64
MEAN, STD = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]


def write_pictures(data: Path, folder: Path, count: int) -> None:
    """JPEG files of 500x375 pixels: parts of photographs, each part another."""
    photographs = sorted((data / "segmentation/camvid").glob("*/images/*")) or sorted(
        (data / "segmentation/camvid/images").glob("*")
    )
    if not photographs:
        sys.exit(f"no pictures in {data}: give --data, a folder with segmentation/camvid")
    (folder / "a").mkdir(parents=True)
    draw = random.Random(0)
    for number in range(count):
        photograph = Image.open(photographs[number % len(photographs)]).convert("RGB")
        left, top = draw.randint(0, photograph.width // 10), draw.randint(0, photograph.height // 10)
        box = (left, top, left + photograph.width * 9 // 10, top + photograph.height * 9 // 10)
        photograph.resize((500, 375), Image.Resampling.BICUBIC, box=box).save(
            folder / "a" / f"{number:05}.jpg", quality=90
        )


class Task:
    """The part of a task that runs in loader workers."""

    options = AugmentOptions()

    def prepare(self, sample, epoch, training):
        return train_picture(Picture.from_pixels(sample.pixels), SIDE, self.options).image

    def collate(self, samples):
        return stack_images(samples)

    def weight(self, batch):
        return None


def lockstep(records: ImageRecords, cache: CacheOptions | None):
    data = DecodedImages(records, cache=cache)
    batches = MicroBatches(data, Task(), 0, training=True)
    return lambda indices, epoch: batches[MicroBatchPlan(tuple(indices), epoch, False)].batch


def plain(records: ImageRecords):
    def crop(image):
        width, height = image.size
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
            w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < w <= width and 0 < h <= height:
                left, top = random.randint(0, width - w), random.randint(0, height - h)
                return left, top, left + w, top + h
        side = min(width, height)
        return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2

    def sample(path):
        with Image.open(path) as file:
            image = file.convert("RGB")
        image = image.crop(crop(image)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return (pixels.float() / 255 - MEAN) / STD

    return lambda indices, epoch: default_collate([sample(records.where(index)) for index in indices])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pictures", type=int, default=480)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path, help="where pictures and cache are written; default: a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="image-cache-", dir=options.folder))
    os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
    try:
        write_pictures(options.data, folder / "pictures", options.pictures)
        measure(read_image_records(str(folder / "pictures"), "train", ClassificationOptions()), options.rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(records: ImageRecords, rounds: int, folder: Path) -> None:
    count = len(records) // BATCH * BATCH
    order = np.random.default_rng(0)
    cache = CacheOptions(10**10)
    # `first epoch` has a cache of its own, which is emptied before each of its epochs.
    empty = DecodedImages(records, cache=CacheOptions(10**10, 10_000)).cache.folder

    def first_epoch():
        shutil.rmtree(empty, ignore_errors=True)
        return lockstep(records, CacheOptions(10**10, 10_000))

    systems = {"plain": plain(records), "lockstep": lockstep(records, None), "cached": lockstep(records, cache)}
    for start in range(0, count, BATCH):  # the first epoch of `cached`
        systems["cached"](range(start, start + BATCH), 0)
    for start in range(0, count, BATCH):
        indices = range(start, start + BATCH)
        assert torch.equal(systems["cached"](indices, 1), systems["lockstep"](indices, 1)), "the samples differ"
    rates: dict[str, list[float]] = {name: [] for name in (*systems, "first epoch")}
    for epoch in range(rounds + 1):  # the first round warms up
        seconds = dict.fromkeys(rates, 0.0)
        now = systems | {"first epoch": first_epoch()}
        indices = order.permutation(count)
        for start in range(0, count, BATCH):
            for name in sorted(now, key=lambda name: hash((name, start, epoch))):
                begin = time.process_time()
                now[name](indices[start : start + BATCH].tolist(), epoch)
                seconds[name] += time.process_time() - begin
        if epoch:
            for name, spent in seconds.items():
                rates[name].append(count / spent)
    size = sum(path.stat().st_blocks * 512 for path in (folder / "cache").rglob("*.slab")) / 2
    files = sum(os.path.getsize(records.where(index)) for index in range(len(records)))
    print(f"{len(records)} pictures: {files / 1e6:.0f} MB of JPEG, {size / 1e6:.0f} MB of pixels; {rounds} rounds")
    for name, values in rates.items():
        ratios = [value / usual for value, usual in zip(values, rates["plain"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:12} {statistics.median(values):7.0f} /s   {statistics.median(ratios):5.2f} ({spread})")


if __name__ == "__main__":
    main()
