"""Predict with the exported model next to this file. Needs only torch, NumPy and Pillow.

    python use_model.py IMAGE...          a line of JSON for each image

    import use_model
    use_model.predict("image.jpg")        a dict; for a list of images a list of dicts

`lockstep export` copies this file. An image is a path, a Pillow image, or uint8 (height, width, channels). It is
prepared as in an evaluation, according to the .json file in this folder. `model.pt2` computes the rest.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
BATCH = 8
"""The number of images, or of tiles, that the model processes at a time, if it can process several."""
MOST_TRIED = 1024
"""Pixels of the largest square to try if a program refuses an image."""

Size = tuple[int, int]
"""(height, width) in pixels."""


def predict(pictures: Any, *, folder: str | Path = HERE, device: str = "cpu") -> Any:
    """The prediction for an image as a dict; for a list of images, a list.

    | model | keys |
    |---|---|
    | classification | `prediction`, `probability`, and `probabilities` by class |
    | segmentation | `classes`: (height, width) class numbers; `names`; `shares`: the fraction of pixels by class |
    | detection | `boxes`: dicts of `class`, `score` and `box`: left, top, right, bottom in pixels; the best first. |
    | | Without boxes, also `note`: whether the score threshold is the reason |

    Args:
        device: the device that runs the model: `cpu`, `cuda`, `mps`.
    """
    several = isinstance(pictures, list | tuple)
    kind, about, run = _loaded(Path(folder), device)
    given = pictures if several else [pictures]
    read = [pixels_of(picture, about) for picture in given]
    try:
        found = KINDS[kind](about, run, read)
    except (AssertionError, RuntimeError):  # torch's guards raise both
        small = _too_small(given, read, about, run) if kind == "segmentation" else None
        if small is None:
            raise
        raise small from None
    return found if several else found[0]


@functools.cache
def _loaded(folder: Path, device: str) -> tuple[str, dict[str, Any], Callable[..., Any]]:
    kind = next(name for name in KINDS if (folder / f"{name}.json").is_file())
    exported = torch.export.load(folder / "model.pt2")
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, device)
    program = exported.module()

    def run(**inputs: Tensor) -> Any:
        with torch.no_grad():
            return program(**{name: value.to(device) for name, value in inputs.items()})

    about = json.loads((folder / f"{kind}.json").read_text())
    return kind, about | {"batch": json.loads((folder / "model.json").read_text())["batch"] or BATCH}, run


def _too_small(
    given: Sequence[Any], read: Sequence[Tensor], about: dict[str, Any], run: Callable[..., Any]
) -> ValueError | None:
    """The error about the first image that is too small for the program. None: there is no such image.

    The limits of a program follow from guards that torch added while tracing the model, so they are found by trying.
    """

    def takes(side: int) -> bool:
        try:
            run(images=torch.zeros(1, about["channels"], side, side, dtype=torch.uint8))
        except (AssertionError, RuntimeError):
            return False
        return True

    least = next((side for side in range(1, MOST_TRIED + 1) if takes(side)), 0)
    for number, (picture, pixels) in enumerate(zip(given, read, strict=True)):
        height, width = pixels.shape[1:]
        if min(height, width) < least:
            name = picture if isinstance(picture, str | Path) else f"image {number}"
            what = f"the image has {width} x {height} pixels, but model.pt2 needs at least {least} x {least}"
            return ValueError(f"{name}: {what}; enlarge it, or try `lockstep predict`, which has a lower limit")
    return None


# ---- from a file to pixels


def pixels_of(picture: Any, about: dict[str, Any]) -> Tensor:
    """uint8 (channels, height, width): upright, grey or RGB. An alpha channel is dropped."""
    from PIL import Image, ImageOps

    channels = about["channels"]
    if isinstance(picture, str | Path):
        with Image.open(picture) as image:
            image.load()
            return pixels_of(ImageOps.exif_transpose(image), about)
    if isinstance(picture, np.ndarray):
        picture = Image.fromarray(picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture)
    if picture.mode == "F":
        what = "the pixels are floating-point numbers, whose range is unknown; save them as integers"
        raise ValueError(what)
    if picture.mode.startswith("I"):  # 16 bits
        values, levels = np.asarray(picture).astype(np.uint32), about.get("levels", 65535)
        if values.max() > levels:
            raise ValueError(f"the grey value {values.max()} is above {levels}, which is white in the training images")
        picture = Image.fromarray(((values * 255 + levels // 2) // levels).astype(np.uint8))
    if picture.mode in ("P", "PA") and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    picture = picture.convert("L" if channels == 1 else "RGB")
    side, shorter = about.get("cache_size"), min(picture.size)
    if side is not None and shorter > side:  # training images were cached at this size
        width, height = ((length * side + shorter // 2) // shorter for length in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if channels == 1 else pixels.permute(2, 0, 1)


def resized(pixels: Tensor, size: Size, about: dict[str, Any]) -> Tensor:
    """uint8 (channels, *size), with antialiasing."""
    if pixels.shape[1:] == size:
        return pixels
    # torch rounds differently for a different memory layout, so use that of Lockstep: by rows.
    by_rows = pixels.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    mode = about["interpolation"]
    return functional.interpolate(by_rows, size=size, mode=mode, antialias=True, align_corners=False)[0]


def in_batches(about: dict[str, Any], run: Callable[..., Any], **inputs: Sequence[Tensor]) -> Any:
    """The outputs of the model for inputs, a few at a time: a tensor, or a tuple of tensors."""
    count, step = len(next(iter(inputs.values()))), about["batch"]
    parts = [
        run(**{name: stacked(values[begin : begin + step]) for name, values in inputs.items()})
        for begin in range(0, count, step)
    ]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts).cpu()
    return tuple(torch.cat(part).cpu() for part in zip(*parts, strict=True))


def stacked(values: Sequence[Tensor]) -> Tensor:
    """A batch. Images are stored by rows, as in Lockstep: with a different layout, results differ by rounding."""
    batch = torch.stack(list(values))
    is_colour = batch.dim() == 4 and batch.shape[1] > 1
    return batch.contiguous(memory_format=torch.channels_last) if is_colour else batch.contiguous()


# ---- classification


def classified(about: dict[str, Any], run: Callable[..., Any], pictures: Sequence[Tensor]) -> list[dict[str, Any]]:
    prepared = [_centre(pixels, about["size"], about) for pixels in pictures]
    found = []
    for values in in_batches(about, run, images=prepared).tolist():
        named = dict(zip(about["classes"], values, strict=True))
        best = max(named, key=named.__getitem__)
        found.append({"prediction": best, "probability": named[best], "probabilities": named})
    return found


def _centre(pixels: Tensor, size: int, about: dict[str, Any]) -> Tensor:
    """The whole image as a square; with `eval_resize`, the centre crop of an image with this shorter side."""
    if about["eval_resize"] is None:
        return resized(pixels, (size, size), about)
    (height, width), side = pixels.shape[1:], about["eval_resize"]
    if width <= height:
        whole = max(int(side * height / width), size), side
    else:
        whole = side, max(int(side * width / height), size)
    top, left = (whole[0] - size) // 2, (whole[1] - size) // 2
    return resized(pixels, whole, about)[:, top : top + size, left : left + size]


# ---- segmentation


def segmented(about: dict[str, Any], run: Callable[..., Any], pictures: Sequence[Tensor]) -> list[dict[str, Any]]:
    found = []
    for pixels in pictures:
        height, width = size = (int(pixels.shape[1]), int(pixels.shape[2]))
        classes = torch.empty(size, dtype=torch.int16 if len(about["classes"]) > 256 else torch.uint8)
        side = about["eval_window"]
        down, across = (windows_along(length, side or length, about["eval_overlap"]) for length in size)
        for top, high, core_top, core_high in down:
            for left, wide, core_left, core_wide in across:
                window = pixels[:, top : top + high, left : left + wide]
                seen = resized(window, _seen_size((high, wide), about), about)
                logits = in_batches(about, run, images=[seen])
                if logits.shape[2:] != (high, wide):
                    logits = functional.interpolate(logits, size=(high, wide), mode="bilinear", align_corners=False)
                y, x = core_top - top, core_left - left
                core = logits[0, :, y : y + core_high, x : x + core_wide].argmax(0)
                classes[core_top : core_top + core_high, core_left : core_left + core_wide] = core
        counts = torch.bincount(classes.flatten().long(), minlength=len(about["classes"])).tolist()
        shares = {name: count / (height * width) for name, count in zip(about["classes"], counts, strict=True) if count}
        numbers = classes.numpy()
        found.append({"classes": numbers, "mask": _mask(numbers, about), "names": about["classes"], "shares": shares})
    return found


def _mask(numbers: Any, about: dict[str, Any]) -> Any:
    """The values of the training data's mask files: ids (height, width), or colours (height, width, 3)."""
    if about["mask_kind"] == "color":
        return np.array(about["colors"], dtype=np.uint8)[numbers]
    return np.array(about["ids"], dtype=np.uint8 if max(about["ids"]) < 256 else np.int32)[numbers]


def _seen_size(size: Size, about: dict[str, Any]) -> Size:
    """The input size of the model for an image or a window."""
    if about["eval_window"] is not None:
        return size
    if about["eval_shape"] == "square" and about["size"] is not None:
        return about["size"], about["size"]
    return fitted_size(size, about["size"])


def fitted_size(size: Size, shorter: int | None) -> Size:
    """Height and width with `shorter` pixels along the shorter side, and the same aspect ratio. None: `size` itself."""
    if shorter is None:
        return size
    height, width = size
    if height <= width:
        return shorter, max(shorter, width * shorter // height)
    return max(shorter, height * shorter // width), shorter


def windows_along(length: int, side: int, overlap: float) -> list[tuple[int, int, int, int]]:
    """For each window along one direction: its start and length, and start and length of the region that is used."""
    if length <= side:
        return [(0, length, 0, length)]
    stride = max(1, side - int(side * overlap))
    count = -(-(length - side) // stride) + 1
    starts = [number * (length - side) // (count - 1) for number in range(count)]
    ends = [(after + before + side) // 2 for before, after in itertools.pairwise(starts)]
    cores = [0, *ends, length]
    return [(start, side, cores[place], cores[place + 1] - cores[place]) for place, start in enumerate(starts)]


# ---- detection


def detected(about: dict[str, Any], run: Callable[..., Any], pictures: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [_boxes(about, run, pixels) for pixels in pictures]


def _boxes(about: dict[str, Any], run: Callable[..., Any], pixels: Tensor) -> dict[str, Any]:
    height, width = pixels.shape[1:]
    views, shapes, scales, offsets = [], [], [], []
    along = [tiles_along(length, about["tile"], about["tile_overlap"]) for length in (height, width)]
    for (top, high), (left, wide) in itertools.product(*along):
        view, (rows, columns) = _in_square(pixels[:, top : top + high, left : left + wide], about)
        views.append(view)
        shapes.append(torch.tensor([rows, columns]))
        scales.append(torch.tensor([columns / wide, rows / high] * 2))
        offsets.append(torch.tensor([left, top] * 2))
    found = zip(*in_batches(about, run, images=views, shapes=shapes), strict=True)
    kept = [_without_doubles(*of_view, most=about["nms_of_model"]) for of_view in found]
    moved = [
        (of_view / scale + offset, of_scores, of_labels)
        for (of_view, of_scores, of_labels), scale, offset in zip(kept, scales, offsets, strict=True)
    ]
    boxes, scores, labels = (torch.cat(part) for part in zip(*moved, strict=True))
    if len(moved) > 1:
        order = scores.argsort(descending=True, stable=True)
        boxes, scores, labels = _without_doubles(boxes[order], scores[order], labels[order], most=about["nms"])
    boxes = torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height, width, height]))
    listed = list(zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True))
    best = [row for row in listed if row[1] >= about["score_threshold"]][: about["most_boxes"]]
    named = [{"class": about["classes"][label], "score": score, "box": box} for box, score, label in best]
    return {"boxes": named} if named else {"boxes": [], "note": _why_none(listed, about)}


def _why_none(rows: Sequence[Any], about: dict[str, Any]) -> str:
    if not rows:
        return "the model found no boxes"
    highest = max(score for _, score, _ in rows)
    return (
        f"the model found {len(rows)} boxes, but the highest score is {highest:.3g}: none reaches the threshold of "
        f"{about['score_threshold']:g}. Lower score_threshold in detection.json to get them, or train longer"
    )


def _in_square(pixels: Tensor, about: dict[str, Any]) -> tuple[Tensor, Size]:
    """float32 (channels, size, size): the image, and the height and width that it has in the square.

    The rest is padding. For models that do not accept padding, the image is stretched to the square.
    """
    side, (height, width) = about["size"], pixels.shape[1:]
    factor = min(side / height, side / width)
    inner = min(side, max(1, round(height * factor))), min(side, max(1, round(width * factor)))
    seen = resized(pixels, inner, about).float()
    if not about["stretched"]:
        return functional.pad(seen, (0, side - inner[1], 0, side - inner[0]), value=float(about["fill"])), inner
    if inner != (side, side):
        seen = functional.interpolate(seen[None], size=(side, side), mode="bilinear", align_corners=False)[0]
    return seen, inner


def tiles_along(length: int, side: int | None, overlap: float) -> list[tuple[int, int]]:
    """The start and length of tiles along an axis, in pixels."""
    if side is None or length <= side:
        return [(0, length)]
    count = 1 + int(-(-(length - side) // max(1.0, side * (1 - overlap))))
    return [(round(number * (length - side) / (count - 1)), side) for number in range(count)]


def _without_doubles(boxes: Tensor, scores: Tensor, labels: Tensor, *, most: float | None) -> tuple[Tensor, ...]:
    """Non-maximum suppression within each class: a box is removed if a better box overlaps it by more than `most`."""
    kept: list[int] = []
    classes, is_box = labels.tolist(), ((labels >= 0) & (scores > 0)).tolist()
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    for place in range(len(boxes)):
        if not is_box[place]:
            continue
        others = [other for other in kept if classes[other] == classes[place]]
        if most is not None and others:
            begin = torch.maximum(boxes[place, :2], boxes[others, :2])
            end = torch.minimum(boxes[place, 2:], boxes[others, 2:])
            both = (end - begin).clamp(min=0).prod(1)
            if (both / (areas[place] + areas[others] - both).clamp(min=1e-7) > most).any():
                continue
        kept.append(place)
    return boxes[kept], scores[kept], labels[kept]


KINDS = {"classification": classified, "segmentation": segmented, "detection": detected}

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    if missing := [name for name in sys.argv[1:] if not Path(name).is_file()]:
        sys.exit(f"error: there is no such file: {', '.join(missing)}")
    for name in sys.argv[1:]:
        said = predict(name)
        for pixels in ("classes", "mask"):  # one number per pixel
            said.pop(pixels, None)
        print(json.dumps({"input": name, **said}))
