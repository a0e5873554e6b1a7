"""Examples of Lightning's repository beside a plain loop of the same modules: the losses of each step.

    git clone https://github.com/Lightning-AI/pytorch-lightning && pip install lightning
    python benchmarks/adapters_lightning.py pytorch-lightning/examples/pytorch/basics PICTURES TEXT

Args: the folder of the examples; a folder of pictures by class, which stand for MNIST; a text file, which stands for
WikiText-2. The results are in docs/adapters.md.
"""

import copy
import importlib
import os
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.demos import boring_classes
from lightning.pytorch.demos import transformer as demo
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, random_split

from lockstep import Trainer, adapters
from lockstep.core.data.order import permute

_PICTURES, _HELD_BACK = 1000, 200


def pictures(folder):
    """A data set of gray pictures and the numbers of their folders."""
    files = sorted(Path(folder).glob("*/*.png"))
    files = files[:: max(1, len(files) // _PICTURES)][:_PICTURES]
    names = sorted({file.parent.name for file in files})
    pixels = [torch.from_numpy(np.array(Image.open(file).convert("L"))).float()[None] / 255 for file in files]
    return TensorDataset(torch.stack(pixels), torch.tensor([names.index(file.parent.name) for file in files]))


def without_dropout(module):
    """The same module, which draws no random numbers."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def plain(module, loader, steps, clip):
    """The losses of a plain loop, with the samples of Lockstep's order."""
    data, size, losses = loader.dataset, loader.batch_size, []
    per_epoch = -(-len(data) // size)
    returned = module.configure_optimizers()
    (optimizer,), schedulers = returned if isinstance(returned, tuple) else ([returned], [])
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        places = np.arange(within * size, min(len(data), (within + 1) * size))
        if not isinstance(loader.sampler, SequentialSampler):
            places = permute(places, len(data), 0, epoch)
        loss = module.training_step(loader.collate_fn([data[int(place)] for place in places]), 0)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        for scheduler in schedulers if within == per_epoch - 1 else ():
            scheduler.step()
    return losses


def adapted(module, data, steps, clip, micro):
    """The losses of the adapter."""
    given = {"max_steps": steps} | ({"gradient_clip_val": clip} if clip is not None else {})
    log = {"every_steps": 1, "writers": ["json_lines"], "pictures": 0}
    config = {"device": "cpu", "batch": {"micro": micro}, "log": log, "train": {"eval_every_epochs": 0}}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, run_dir=f"{folder}/run", quiet=True)
        trainer.fit(adapters.lightning(module, data, trainer=given))
        return [entry["train/loss"] for entry in trainer.history if "train/loss" in entry]


def compare(name, make, make_data=lambda: None, clip=None, most=25):
    """Print how far the losses of at most `most` steps are apart."""
    torch.manual_seed(0)
    data, module = make_data(), without_dropout(make())
    source = module if data is None else data
    if hasattr(source, "setup"):
        source.setup("fit")
    loader = source.train_dataloader()
    steps = min(most, 3 * len(loader))
    one = plain(copy.deepcopy(module), loader, steps, clip)
    other = adapted(module, data, steps, clip, max(1, loader.batch_size // 2))
    apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    print(f"{name}: {steps} steps, loss {one[0]:.6f} to {one[-1]:.6f}, largest relative difference {apart:.1e}")


def main(examples, folder, text):
    """Compare the five examples."""
    warnings.simplefilter("ignore")  # of Lightning, about a module without its Trainer
    compare("boring_classes", boring_classes.BoringModel, boring_classes.BoringDataModule)
    sys.path.insert(0, examples)
    for name, kind in (("autoencoder", "LitAutoEncoder"), ("backbone_image_classifier", "LitClassifier")):
        module = importlib.import_module(name)
        module.MNIST = lambda *args, **options: pictures(folder)
        module.transforms = types.SimpleNamespace(ToTensor=lambda: None)
        module.random_split = lambda data, sizes, generator: random_split(
            data, [len(data) - _HELD_BACK, _HELD_BACK], generator=generator
        )
        compare(name, getattr(module, kind), module.MyDataModule)
    torch.set_default_dtype(torch.float64)
    demo._REQUESTS_AVAILABLE = True
    sys.modules.setdefault("requests", types.ModuleType("requests"))
    with tempfile.TemporaryDirectory() as work:
        examples_text = Path(text).read_text(encoding="utf-8")[:60000]
        os.chdir(work)
        Path("data").mkdir()
        Path("data/wikitext-2.txt").write_text(examples_text, encoding="utf-8")
        data = demo.WikiText2()
        loaders = types.SimpleNamespace(train_dataloader=lambda: DataLoader(data, batch_size=20, shuffle=True))
        module = importlib.import_module("transformer")
        words = data.vocab_size
        compare("basics/transformer", lambda: module.LanguageModel(words), lambda: loaders, clip=0.25, most=12)
        compare("demos/transformer", lambda: demo.LightningTransformer(words), most=12)


if __name__ == "__main__":
    main(*(os.path.abspath(argument) for argument in sys.argv[1:]))
