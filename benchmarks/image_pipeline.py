"""Images per second from JPEG files to batches: Lockstep, PIL with plain torch, transformers, kornia.

    pip install --no-deps kornia kornia_rs          # optional: systems that are not installed are skipped
    python benchmarks/image_pipeline.py [--rounds 7] [--batch 64] [--batches 2] [--cases ABC]
    python benchmarks/image_pipeline.py --loader        # end to end: 2 workers, batches arrive in the main process
    python benchmarks/image_pipeline.py --operations    # operations on 224x224 pixels, by torch, PIL and kornia

The images are real photographs (CamVid, BCCD), resized to 500x375, saved as JPEG of quality 90, and held in memory.
--data names their folder, by default ../shared/data.

    A    random resized crop to 224, flip
    B    random resized crop to 128, flip
    C    shorter side to 256, the centre of 224

One process, one torch thread, seconds of CPU time, so that other processes matter less. With --loader, seconds are
wall-clock time. Systems alternate in every round. The results are the median of images per second, and the median over
rounds of the ratio to `plain`, with the minimum and the maximum.

    lockstep      `MicroBatches` with the functions of `pictures`: a uint8 batch, to be normalised on the device
    normalised    the same, and the batch is normalised on the CPU
    plain         PIL opens, converts, crops, resizes; NumPy, float, / 255, normalised by channel; default_collate
    transformers  PIL opens, converts, crops; transformers' processor (for PIL) resizes, crops the centre, normalises
    kornia        PIL opens and converts; kornia's modules do the rest, on a float batch of one image
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import ratios, spread, take_turns
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage, stack_images
from lockstep_recipes.tasks.vision.images.augment import AugmentOptions, eval_image, train_image
from lockstep_recipes.tasks.vision.images.decode import decode
from lockstep_recipes.tasks.vision.images.normalise import IMAGENET_MEAN, IMAGENET_STD, normalise

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"A": 224, "B": 128, "C": 224}
MEAN, STD = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]


def photographs(folder: Path, count: int) -> list[bytes]:
    """JPEG files of 500x375 pixels, quality 90."""
    files = [
        file
        for pattern in ("segmentation/camvid/*/images/*", "detection/bccd/images/*/*")
        for file in sorted(folder.glob(pattern))[: count // 2]
    ]
    if not files:
        sys.exit(f"no images in {folder}: give --data, a folder with segmentation/camvid and detection/bccd")
    pictures = []
    for file in files:
        written = io.BytesIO()
        Image.open(file).convert("RGB").resize((500, 375), Image.Resampling.BICUBIC).save(written, "JPEG", quality=90)
        pictures.append(written.getvalue())
    return pictures


class Files(Dataset[bytes]):
    """The bytes of files, as if they were read."""

    def __init__(self, pictures: list[bytes]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> bytes:
        return self.pictures[index % len(self.pictures)]


# ---- Lockstep


class Task:
    """The part of a task that runs in loader workers."""

    def __init__(self, case: str) -> None:
        self.case, self.options = case, AugmentOptions()

    def prepare(self, sample: bytes, epoch: int, training: bool) -> torch.Tensor:
        picture = AnnotatedImage.from_pixels(decode(sample))
        if self.case == "C":
            return eval_image(picture, 224, resize=256).image
        return train_image(picture, SIZES[self.case], self.options).image

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return stack_images(samples)

    def weight(self, batch: torch.Tensor) -> None:
        return None


def lockstep(files: Files, case: str, batch: int):
    batches = MicroBatches(files, Task(case), 0, training=True)
    return lambda first: batches[MicroBatchPlan(tuple(range(first, first + batch)), 0, False)].batch


def normalised(files: Files, case: str, batch: int):
    read = lockstep(files, case, batch)
    return lambda first: normalise(read(first), IMAGENET_MEAN, IMAGENET_STD)


# ---- the others


def random_crop(image: Image.Image) -> Image.Image:
    """The crop of torchvision's RandomResizedCrop, without the resizing."""
    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = random.randint(0, width - columns), random.randint(0, height - rows)
            return image.crop((left, top, left + columns, top + rows))
    return image


def plain_sample(data: bytes, case: str) -> torch.Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    size = SIZES[case]
    if case == "C":
        width, height = image.size
        factor = 256 / min(width, height)
        image = image.resize((int(width * factor), int(height * factor)), Image.Resampling.BILINEAR)
        left, top = (image.width - size) // 2, (image.height - size) // 2
        image = image.crop((left, top, left + size, top + size))
    else:
        image = random_crop(image).resize((size, size), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return (pixels.float() / 255 - MEAN) / STD


def transformers_sample(case: str):
    from transformers.models.levit.image_processing_pil_levit import LevitImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    size = SIZES[case]
    constants = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD), "resample": 2}
    if case == "C":  # Levit's resizes the shorter side to 256/224 of the size, and crops the centre
        processor = LevitImageProcessorPil(size={"shortest_edge": 224}, crop_size=224, **constants)
    else:
        processor = ViTImageProcessorPil(size={"height": size, "width": size}, **constants)

    def sample(data: bytes) -> torch.Tensor:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if case != "C":
            image = random_crop(image)
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return processor(image, return_tensors="pt")["pixel_values"][0]

    return sample


def kornia_sample(case: str):
    import kornia.augmentation as augmentation

    size = SIZES[case]
    if case == "C":
        steps = [
            augmentation.Resize(256, side="short", antialias=True),
            augmentation.CenterCrop(size),
        ]
    else:
        steps = [augmentation.RandomResizedCrop((size, size)), augmentation.RandomHorizontalFlip()]
    steps.append(augmentation.Normalize(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)))
    steps = torch.nn.Sequential(*steps)

    def sample(data: bytes) -> torch.Tensor:
        pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
        return steps(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)[0]

    return sample


def by_sample(sample):
    def system(files: Files, case: str, batch: int):
        prepare = sample(case)
        return lambda first: default_collate([prepare(files[index]) for index in range(first, first + batch)])

    return system


def systems() -> dict:
    known = {
        "lockstep": lockstep,
        "normalised": normalised,
        "plain": by_sample(lambda case: lambda data: plain_sample(data, case)),
    }
    if importlib.util.find_spec("transformers"):
        known["transformers"] = by_sample(transformers_sample)
    if importlib.util.find_spec("kornia"):
        known["kornia"] = by_sample(kornia_sample)
    return known


# ---- measurements


def report(speeds: dict[str, list[float]]) -> None:
    for name, values in speeds.items():
        print(f"  {name:13s}{statistics.median(values):8.0f} /s   {spread(ratios(values, speeds['plain']))}")


def one_process(files: Files, options: argparse.Namespace) -> None:
    for case in options.cases:
        prepared = {name: make(files, case, options.batch) for name, make in systems().items()}

        def speed(read):
            begin = time.process_time()
            for turn in range(options.batches):
                read(turn * options.batch)
            return options.batch * options.batches / (time.process_time() - begin)

        ways = {name: partial(speed, read) for name, read in prepared.items()}
        speeds = take_turns(ways, options.rounds, warm_up=1)
        print(f"{case}: images per second on one core, and the ratio to plain")
        report(speeds)


class PlainData(Dataset[torch.Tensor]):
    def __init__(self, files: Files, case: str, count: int) -> None:
        self.files, self.case, self.count = files, case, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return plain_sample(self.files[index], self.case)


def with_workers(files: Files, options: argparse.Namespace) -> None:
    """Time from requesting the first batch to receiving the last. Workers are already running, and stay."""
    count = options.batch * options.batches * 2
    plans = [
        MicroBatchPlan(tuple(range(first, first + options.batch)), 0, False) for first in range(0, count, options.batch)
    ]
    for case in options.cases:
        ours = Loader(MicroBatches(files, Task(case), 0, training=True), workers=2, device=torch.device("cpu"))
        plain = DataLoader(PlainData(files, case, count), options.batch, num_workers=2, persistent_workers=True)
        read = {"lockstep": lambda ours=ours: ours.run(lambda: plans), "plain": lambda plain=plain: iter(plain)}

        def speed(batches):
            begin = time.perf_counter()
            for _ in batches():
                pass
            return count / (time.perf_counter() - begin)

        ways = {name: partial(speed, batches) for name, batches in read.items()}
        speeds = take_turns(ways, options.rounds, warm_up=1)
        print(f"{case}: images per second end to end with 2 workers, and the ratio to plain")
        report(speeds)


def operations(files: Files, options: argparse.Namespace) -> None:
    from PIL import ImageEnhance, ImageOps

    from lockstep_recipes.tasks.vision.images import color, geometry

    pictures = [
        eval_image(AnnotatedImage.from_pixels(decode(data)), 224, resize=256)
        for data in files.pictures[: options.batch]
    ]

    def by_pil(change):
        def convert(image):
            changed = change(Image.fromarray(image.permute(1, 2, 0).numpy()))
            return torch.from_numpy(np.array(changed)).permute(2, 0, 1)

        return convert

    def by_kornia(change):
        return lambda image: (change(image[None].float() / 255) * 255 + 0.5).clamp_(0, 255).to(torch.uint8)[0]

    turn = geometry.about((112, 112), geometry.rotation(20))
    rows = {
        "brightness": (
            lambda i: color.brightness(i, 1.4),
            lambda p: ImageEnhance.Brightness(p).enhance(1.4),
            lambda k, x: k.enhance.adjust_brightness(x, 0.4),
        ),
        "contrast": (
            lambda i: color.contrast(i, 1.4),
            lambda p: ImageEnhance.Contrast(p).enhance(1.4),
            lambda k, x: k.enhance.adjust_contrast_with_mean_subtraction(x, 1.4),
        ),
        "saturation": (
            lambda i: color.saturation(i, 1.4),
            lambda p: ImageEnhance.Color(p).enhance(1.4),
            lambda k, x: k.enhance.adjust_saturation_with_gray_subtraction(x, 1.4),
        ),
        "sharpness": (
            lambda i: color.sharpness(i, 1.4),
            lambda p: ImageEnhance.Sharpness(p).enhance(1.4),
            lambda k, x: k.enhance.sharpness(x, 1.4),
        ),
        "posterize": (
            lambda i: color.posterize(i, 4),
            lambda p: ImageOps.posterize(p, 4),
            lambda k, x: k.enhance.posterize(x, 4),
        ),
        "solarize": (
            lambda i: color.solarize(i, 128),
            lambda p: ImageOps.solarize(p, 128),
            lambda k, x: k.enhance.solarize(x, 0.5),
        ),
        "auto contrast": (color.auto_contrast, ImageOps.autocontrast, lambda k, x: k.enhance.normalize_min_max(x)),
        "equalize (PIL's)": (color.equalize, ImageOps.equalize, lambda k, x: k.enhance.equalize(x)),
        "hue (PIL's)": (
            lambda i: color.hue(i, 0.1),
            lambda p: p.convert("HSV").convert("RGB"),
            lambda k, x: k.enhance.adjust_hue(x, 0.6),
        ),
        "rotation": (
            lambda i: geometry.affine(AnnotatedImage(i), turn, fill=128).image,
            lambda p: p.rotate(20, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128)),
            lambda k, x: k.geometry.transform.rotate(x, torch.tensor([20.0])),
        ),
    }
    kornia = None
    if importlib.util.find_spec("kornia"):
        import kornia
    print("microseconds for a uint8 tensor of 224x224 pixels, to a uint8 tensor: median (minimum)")
    for name, (ours, pil, other) in rows.items():
        ways = {"lockstep": ours, "PIL": by_pil(pil)}
        if kornia is not None:
            ways["kornia"] = by_kornia(lambda x, other=other: other(kornia, x))

        def microseconds(change):
            begin = time.perf_counter()
            for picture in pictures:
                change(picture.image)
            return (time.perf_counter() - begin) / len(pictures) * 1e6

        times = take_turns({way: partial(microseconds, change) for way, change in ways.items()}, options.rounds)
        listed = "   ".join(f"{way} {statistics.median(t):6.0f} ({min(t):.0f})" for way, t in times.items())
        print(f"  {name:18s}{listed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2, help="batches per round")
    parser.add_argument("--cases", default="ABC", help="letters of the cases to run")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--loader", action="store_true", help="measure end to end with 2 workers")
    parser.add_argument("--operations", action="store_true", help="colour operations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = Files(photographs(options.data, 128))
    mean = statistics.mean(map(len, files.pictures)) / 1000
    print(f"{len(files)} images of 500x375 pixels, {mean:.0f} kB on average")
    if options.operations:
        operations(files, options)
    elif options.loader:
        with_workers(files, options)
    else:
        one_process(files, options)


if __name__ == "__main__":
    main()
