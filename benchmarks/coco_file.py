"""Seconds and memory to read a large COCO annotation file.

    python benchmarks/coco_file.py [--annotations 860000] [--pictures 118000] [--rounds 3]

The file is made at random, about as large as COCO's instances_train2017.json: 80 categories, a polygon of 23 points for
each annotation.

    json          `json.load` of the file, with all that is in it
    lockstep      `read_coco`, for detection
    segmentation  `read_coco` with segmentations

Each reading is a process of its own, and the readings alternate. Seconds are CPU time, the system's included, so that
other processes count less. Peak and kept memory are those of the whole process, Python and NumPy included. What is
quoted is the median over rounds of seconds and memory, and of the ratio of seconds to `json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np  # noqa: F401 - its memory counts for every reading

HOWS = ("json", "lockstep", "segmentation")


def write(path: Path, pictures: int, annotations: int) -> None:
    random.seed(0)

    def number(most: float) -> float:
        return round(random.uniform(1, most), 2)

    images = [{"id": 3 * i + 7, "file_name": f"{i:012d}.jpg", "height": 480, "width": 640} for i in range(pictures)]
    categories = [{"id": 2 * i + 1, "name": f"class {i}"} for i in range(80)]
    with path.open("w") as file:
        file.write(json.dumps({"images": images, "categories": categories})[:-1] + ', "annotations": [')
        for i in range(annotations):
            entry = {
                "segmentation": [[number(600) for _ in range(46)]],
                "area": number(9000),
                "iscrowd": 0,
                "image_id": 3 * random.randrange(pictures) + 7,
                "bbox": [number(500), number(380), number(100), number(90)],
                "category_id": 2 * random.randrange(80) + 1,
                "id": i + 1,
            }
            file.write(("," if i else "") + json.dumps(entry))
        file.write("]}")


def read(path: str, how: str) -> None:
    """Read the file, and print CPU seconds, peak and kept memory in MB."""
    begin = time.process_time()
    if how == "json":
        with open(path) as file:
            kept = json.load(file)
    else:
        from lockstep.tasks.vision.readers.coco_file import read_coco

        kept = read_coco(path, key="data.train", segmentations=how == "segmentation")
    seconds = time.process_time() - begin
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
    assert kept
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, memory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--annotations", type=int, default=860_000)
    parser.add_argument("--pictures", type=int, default=118_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(*arguments.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "annotations.json"
        write(path, arguments.pictures, arguments.annotations)
        print(f"{arguments.annotations:,} annotations, {path.stat().st_size / 1e6:.0f} MB")
        found: dict[str, list[list[float]]] = {how: [] for how in HOWS}
        for _ in range(arguments.rounds):
            for how in HOWS:
                command = [sys.executable, __file__, "--read", str(path), how]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[how].append([float(word) for word in said.split()])
    for how, rounds in found.items():
        seconds, peak, kept = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratio = statistics.median(mine[0] / plain[0] for mine, plain in zip(rounds, found["json"], strict=True))
        print(f"{how:13} {seconds:6.1f} s  {ratio:.2f} of json  peak {peak:6.0f} MB  kept {kept:6.0f} MB")


if __name__ == "__main__":
    main()
