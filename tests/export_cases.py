"""Exports of small trained models, inputs to predict, and what exports say in a process without Lockstep."""

import json
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lockstep import Trainer
from tests import runs

# -I and -S leave out the working directory, PYTHONPATH and .pth files, and None forbids the import.
WITHOUT_LOCKSTEP = """
import sys
sys.path += {paths!r}
sys.modules["lockstep"] = None
import json, pickle, runpy, torch
torch.set_num_threads(1)

def answers(folder, inputs):
    if isinstance(inputs, dict):  # tensors of a batch
        program = torch.export.load(folder + "/model.pt2").module()
        return program(batch=tuple(torch.tensor(values, dtype=torch.float64) for values in inputs["batch"]))
    if inputs[0].startswith("text:"):
        from transformers import pipeline
        classify = pipeline("text-classification", model=folder, top_k=None, device="cpu", trust_remote_code=True)
        return classify([text[5:] for text in inputs])
    predict = runpy.run_path(folder + "/use_model.py")["predict"]
    if inputs[0].endswith(".npz"):
        return [predict(path) for path in inputs]
    return [predict(inputs), [predict(path) for path in inputs]]

found = {{name: answers(*wanted) for name, wanted in json.load(sys.stdin).items()}}
assert not any(name.startswith("lockstep.") for name in sys.modules)
pickle.dump(found, sys.stdout.buffer)
"""


def pictures(folder):
    """Files of pictures that differ in size, mode, orientation and format."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (61, 47, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels[..., :3]).save(folder / "colour.png")
    Image.fromarray(pixels[:29, :, :3]).save(folder / "wide.png")
    Image.fromarray(pixels[..., 0]).save(folder / "grey.png")
    Image.fromarray(pixels).save(folder / "alpha.png")
    Image.fromarray(pixels[..., :3]).quantize(16).save(folder / "palette.png")
    Image.fromarray(pixels[..., :2].copy().view(np.uint16)[..., 0]).save(folder / "deep.png")
    Image.fromarray(pixels[..., :3]).save(folder / "turned.jpg", exif=exif, quality=95)
    return sorted(str(path) for path in folder.iterdir())


def exported(folder, settings):
    """Train a few steps, and export. Returns the Trainer of the run."""
    base = {"batch": {"global": 2}, "train": {"steps": 4}, "optim": {"name": "AdamW", "lr": 0.01}}
    trainer = Trainer(runs.config(**{**base, **settings}), run_dir=folder / "run", quiet=True)
    trainer.fit()
    trainer.export(folder / "out")
    return trainer


def outputs(trainer, arguments, alone=False):
    """The task, and what the run itself says of inputs.

    alone: each input is a batch. Otherwise all are in one batch, whose padding changes the boxes of some models.
    """
    task = trainer.task()
    task.setup(trainer.run_dir / "task", trained=True)
    data = task.presenter(task).inputs(arguments)
    items = [task.prepare(data[index], 0, False) for index in range(len(data))]
    with torch.no_grad():
        if not alone:
            return task, task.predict(trainer.model.float(), task.collate(items))
        parts = [task.predict(trainer.model.float(), task.collate([item])) for item in items]
        return task, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def without_lockstep(wanted):
    """What exports say in a process that has torch and no Lockstep.

    Args:
        wanted: by name, the folder of an export and its inputs: files, texts behind `text:`, or a dict with a `batch`.

    Returns:
        by name: of pictures the answers for all at once and for each alone.
    """
    paths = [*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WITHOUT_LOCKSTEP.format(paths=paths)],
        input=json.dumps({name: [str(folder), inputs] for name, (folder, inputs) in wanted.items()}).encode(),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)
