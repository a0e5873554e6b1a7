"""Two runs of a task of a user, with a change between them: of the code, the config, the data or a library."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lockstep import Trainer
from lockstep.core import plugins
from lockstep.trainer.joining import Recorder
from tests import runs

TASK = """
from pathlib import Path

import numpy as np
import pixels
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Metrics, Task
from words import tokens


class Files(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.png"))
        self.labels = dict(line.split(",") for line in Path(folder, "labels.csv").read_text().split())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path = self.files[index]
        return pixels.decode(path), int(self.labels[path.stem]), f"the image {path.stem} of {path.parent.name}"

    def where(self, index):
        return self.files[index]


def count(metrics, output, batch):
    metrics.update(output.argmax(1), batch["label"])


class Mine(Task):
    def __init__(self, train, eval):
        self.folders = train, eval
        self.calls = 0

    def train_data(self):
        return Files(self.folders[0])

    def eval_data(self):
        return Files(self.folders[1])

    def prepare(self, sample, epoch, training):
        image, label, text = sample
        image = image.resize((8, 8), Image.Resampling.BILINEAR)
        array = torch.from_numpy(np.asarray(image).copy()).to(torch.get_default_dtype()) / 255
        if training and torch.rand(()) < 0.5:
            array = array.flip(1)
        return array, label, tokens(text)

    def collate(self, samples):
        images, labels, words = zip(*samples)
        return {"image": torch.stack(images), "label": torch.tensor(labels), "words": torch.tensor(words)}

    def model(self):
        return nn.ModuleDict({
            "body": nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1)),
            "words": nn.EmbeddingBag(50, 16),
            "head": nn.Linear(16, 3),
        })

    def predict(self, model, batch):
        return model["head"](model["body"](batch["image"]) + model["words"](batch["words"]))

    def loss(self, model, batch):
        self.calls += 1
        output = self.predict(model, batch)
        return functional.cross_entropy(output, batch["label"], reduction="sum"), output

    def metrics(self):
        return Metrics({"accuracy": MulticlassAccuracy(3, average="micro")}, count)
"""
WORDS = """
def tokens(text):
    return [sum(map(ord, word)) % 50 for word in text.split()][:4]
"""
PIXELS = """
from PIL import Image

__version__ = "1.0"


def decode(path):
    return Image.open(path).convert("L")
"""
SETTINGS = {
    "train": {"steps": 20, "eval_every_steps": 10},
    "batch": {"global": 12, "micro": 6},
    "checkpoint": {"every_steps": 10, "keep_last": 5},
    "log": {"every_steps": 1},
    "optim": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1},
}


class Pair:
    """Run A in `folder`, and what run B changes."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("code", "lib", "train", "eval"):
            (folder / name).mkdir(parents=True)
        (folder / "code" / "mine.py").write_text(TASK)
        (folder / "code" / "words.py").write_text(WORDS)
        (folder / "lib" / "pixels.py").write_text(PIXELS)
        random = np.random.default_rng(0)
        for part, count in (("train", 90), ("eval", 30)):
            labels = []
            for number in range(count):
                label = number % 3
                place = folder / part / f"class{label}"
                place.mkdir(exist_ok=True)
                image = random.integers(0, 120, (12, 12), dtype=np.uint8) + np.uint8(60 * label)
                Image.fromarray(image).save(place / f"{number:03}.png")
                labels.append(f"{number:03},{label}")
            (folder / part / "labels.csv").write_text("\n".join(labels))

    def settings(self, **sections):
        config = runs.config(**SETTINGS)
        config["task"] = {"kind": f"{self.folder}/code/mine.py:Mine"}
        config["data"] = {"train": f"{self.folder}/train", "eval": f"{self.folder}/eval"}
        for name, section in sections.items():
            config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
        return config

    def edit(self, old, new, file="code/mine.py"):
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def fit(self, name, lib="lib", settings=None):
        """Train a run in this process."""
        fit(settings or self.settings(), self.folder / name, self.folder / lib)
        return self.folder / name


def fit(settings, run_dir, lib, recorder=None):
    """Train with the library in the folder `lib`."""
    path, dtype, variable = list(sys.path), torch.get_default_dtype(), os.environ.get("PYTHONPATH")
    for name in ("pixels", "words"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(lib))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(lib), *([variable] if variable else [])])
    try:
        Trainer(settings, run_dir=run_dir, quiet=True).fit(recorder=recorder)
    finally:
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        os.environ.pop("PYTHONPATH")
        if variable:
            os.environ["PYTHONPATH"] = variable
        for name in [name for name in sys.modules if name.startswith(plugins.USER_PREFIX)]:
            if Path(sys.modules[name].__file__).is_relative_to(run_dir.parent):
                del sys.modules[name]  # workers of later tests would execute the file, without the library


# ---- changes: each trains run B


def config(**sections):
    def change(pair):
        pair.fit("b", settings=pair.settings(**sections))

    return change


def code(old, new, file="code/mine.py"):
    def change(pair):
        pair.edit(old, new, file)
        pair.fit("b")

    return change


def library(pair):
    shutil.copytree(pair.folder / "lib", pair.folder / "lib2")
    pair.edit('"1.0"', '"1.1"', "lib2/pixels.py")
    pair.edit('convert("L")', 'convert("RGB").getchannel(1)', "lib2/pixels.py")
    pair.edit("def decode", "def _unused", "lib2/pixels.py")
    text = (pair.folder / "lib2" / "pixels.py").read_text()
    text += "\n\ndef decode(path):\n    return Image.eval(_unused(path), lambda value: value ^ 1)\n"
    (pair.folder / "lib2" / "pixels.py").write_text(text)
    pair.fit("b", lib="lib2")


def other_folder(change):
    """Run B has a copy of the data with a change."""

    def made(pair):
        shutil.copytree(pair.folder / "train", pair.folder / "train2")
        change(pair.folder / "train2")
        pair.fit("b", settings=pair.settings(data={"train": f"{pair.folder}/train2"}))

    return made


def in_place(change):
    """The data are changed where they are."""

    def made(pair):
        change(pair.folder / "train")
        pair.fit("b")

    return made


def one_pixel(folder):
    path = folder / "class1" / "031.png"
    array = np.asarray(Image.open(path)).copy()
    array[3, 4] ^= 64
    Image.fromarray(array).save(path)


def black(folder):
    """So different that the loss is, too: units may be dead for all pixels of an image that is only a little darker."""
    Image.fromarray(np.zeros((12, 12), dtype=np.uint8)).save(folder / "class1" / "031.png")


def label(folder):
    path = folder / "labels.csv"
    path.write_text(path.read_text().replace("031,1", "031,2"))


def ranks(pair):
    from tests.ranks import run_ranks

    run_ranks(2, fit, pair.settings(), pair.folder / "b", pair.folder / "lib")


class Flip(Recorder):
    """A bit flips, in the memory of weights or of gradients, which no code of the run explains."""

    def __init__(self, step, event):
        self.step, self.event = step, event

    def after_step(self, training):
        if (training.step, self.event) == (self.step, "weights"):
            self.flip(training.model["head"].weight.detach())

    def start(self, training):
        def hook(gradient):
            if training.step + 1 == self.step:
                gradient = gradient.clone()
                self.flip(gradient)
            return gradient

        if self.event == "gradients":
            training.model["head"].weight.register_hook(hook)

    def before_step(self, training):
        pass  # `training.step` is that of the event

    def flip(self, tensor):
        tensor.view(torch.int32)[1, 2] ^= 1 << 20


def flipped(step, event):
    def change(pair):
        fit(pair.settings(), pair.folder / "b", pair.folder / "lib", Flip(step, event))

    return change


FLIP = """self.calls += 1
        if self.calls >= 15 and model.training:
            self.calls = -1_000_000
            with torch.no_grad():
                model["head"].weight.view(torch.int32)[0, 0] ^= 1 << 20"""
HOOK = """def model(self):
        made = self.built()
        count = [0]

        def hook(gradient):
            count[0] += 1
            if count[0] == 30:
                gradient = gradient.clone()
                gradient.view(torch.int32)[0, 0] ^= 1 << 25
            return gradient

        made["head"].weight.register_hook(hook)
        return made

    def built(self):"""
CHANGES = {
    # name: (change, stage, a part of the cause, a part of the sentence)
    "default dtype": (code("def model(self):", "def model(self):\n        torch.set_default_dtype(torch.float64)"),
                      "setup", "Mine.model", "default dtype: torch.float32 against torch.float64"),
    "tokenizer": (code("% 50", "% 49", "code/words.py"), "prepared", "words.py differs", "the prepared sample"),
    "resize filter": (code("BILINEAR", "BICUBIC"), "prepared", "BICUBIC", "the prepared sample"),
    "library": (library, "decoded", "pixels 1.0 against 1.1", "the decoded sample"),
    "seed": (config(seed=1), "order", "seed: 0 against 1", "the order of the samples"),
    "flipped weight": (code("self.calls += 1", FLIP), "moved", "Mine.loss", "the weights, which change"),
    # The hook counts its calls, so it acts at a different step when the run continues from a checkpoint.
    "flipped gradient": (code("def model(self):", HOOK), "gradient", "Mine.model", "does not compute its own"),
    "global batch": (config(batch={"global": 18}), "order", "batch.global: 12 against 18", "12 samples against 18"),
    "augmentation": (code("array.flip(1)", "array.flip(0)"), "prepared", "Mine.prepare", "the prepared sample"),
    "learning rate": (config(optim={"lr": 0.02}), "settings", "optim.lr: 0.01 against 0.02", "the settings"),
    "weight decay": (config(optim={"weight_decay": 0.2}), "settings", "optim.weight_decay", "weight_decay"),
    "schedule": (config(schedule={"name": "cosine"}), "settings", "schedule.name", "lr of"),
    "clipping": (config(optim={"clip_norm": 0.1}), "exchange", "optim.clip_norm", "the gradient after the exchange"),
    "loss": (code('reduction="sum")', 'reduction="sum", label_smoothing=0.1)'), "forward", "Mine.loss", "operation"),
    "model": (code("nn.ReLU()", "nn.GELU()"), "forward", "Mine.model", "aten::relu"),
    "dropout": (code("nn.Dropout(0.1)", "nn.Dropout(0.2)"), "forward", "Mine.model", "operation"),
    "data file": (other_folder(one_pixel), "bytes", "data.train", "031.png"),
    "label": (other_folder(label), "decoded", "data.train", "031.png"),
    "data file in place": (in_place(black), "bytes", "031.png", "031.png"),
    "label in place": (in_place(label), "bytes", "labels.csv", "labels.csv"),
    "ranks": (ranks, "split", "ranks: 1 against 2", "the split of the global batch"),
    "precision": (config(precision="bf16"), "forward", "precision: fp32 against bf16", "operation"),
    "order of files": (code('glob("*/*.png"))', 'glob("*/*.png"), reverse=True)'), "file", "Files.__init__", "class"),
    "initial weights": (code("return nn.ModuleDict", "torch.rand(1)\n        return nn.ModuleDict"), "weights",
                        "Mine.model", "the initial weights"),
    "evaluation code": (code("output.argmax(1)", "output.argmin(1)"), "results", "in count", "accuracy"),
    "evaluation data": (config(data={"eval_limit": 20}), "evaluated", "data.eval_limit", "the batch of an evaluation"),
    "bit of a weight": (flipped(10, "weights"), "weights", "flipped bit", "model.head.weight, in 1 element by 1 bit"),
    "bit of a gradient": (flipped(5, "gradients"), "gradient", "flipped bit", "train/grad_norm"),
}  # fmt: skip
