"""What tasks learn from their data before they train, in a process of its own: `python -m tests.learned_cases CASES`.

CASES is a JSON file of [recipe, overrides] by name. The process prints a digest by name of all that it learned:
of each file in the cache and in the folder that is kept with a run, and of what a training takes from memory.
Folders are listed backwards if `LOCKSTEP_TEST_BACKWARDS` is set: no order of a file system may count.
"""

import contextlib
import glob
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

BACKWARDS = "LOCKSTEP_TEST_BACKWARDS"


def list_backwards():
    """Let the functions that list a folder return its entries in the opposite order."""
    listdir, scandir = os.listdir, os.scandir

    class Entries:
        def __init__(self, *arguments):
            with scandir(*arguments) as entries:
                self._entries = iter(list(entries)[::-1])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            return self._entries

        def __next__(self):
            return next(self._entries)

        def close(self):
            pass

    os.listdir = lambda *arguments: listdir(*arguments)[::-1]
    os.scandir = Entries
    glob.glob, own = lambda *arguments, **options: own(*arguments, **options)[::-1], glob.glob


def files_below(folder):
    """A digest of each file below a folder. Locks are empty."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def learned(recipe, overrides, folder):
    """What a task has learned, by name. The run keeps it in `folder`."""
    from lockstep.configs import config_file
    from lockstep.configs.registry import build_task
    from lockstep.core.data.fingerprint import digest_of, digests
    from lockstep.sampling.of_data import order_of

    config = config_file.load(recipe, overrides)
    task = build_task(config.task, config.data.train, config.data.eval)
    task.setup(folder, False)
    found = files_below(folder)
    for part in ("train", "eval"):
        data = getattr(task, f"{part}_data")()
        if data is None:
            continue
        found[f"{part} samples"] = digest_of(digests(data, range(len(data))))
        found[f"{part} lengths"] = digest_of(getattr(data, "lengths", None))
    order = order_of(config, task.train_data())
    found["balance"] = digest_of(None if order is None else order.digest)
    torch.manual_seed(0)
    found["model"] = digest_of(dict(task.model().state_dict()))
    found["class weights"] = digest_of(getattr(getattr(task, "_weights", None), "tensor", None))
    return found


def shards(source, out):
    """The files of new shards."""
    from lockstep.cli.application import app

    app(["shards", source, str(out)], standalone_mode=False)
    return files_below(out)


def main(file):
    from lockstep.cache_folder import cache_root

    if os.environ.get(BACKWARDS):
        list_backwards()
    found = {}
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(sys.stderr):
        for number, (name, (recipe, overrides)) in enumerate(json.loads(Path(file).read_text()).items()):
            folder = Path(root, str(number))
            found[name] = shards(overrides[0], folder) if recipe == "shards" else learned(recipe, overrides, folder)
    found["cache"] = files_below(cache_root())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
