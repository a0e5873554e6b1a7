"""A task that changes samples of an in-memory data set in place is refused before its first step."""

import copy
import random

import numpy as np
import pytest
import torch

from lockstep import LockstepError
from lockstep.parts.checks import untouched_data
from tests import own_tasks, runs


class InMemory(own_tasks.Plain):
    """Its data sets hand out the arrays that they hold, in tuples or in dicts."""

    def __init__(self, change="", nested=False, kind="train"):
        super().__init__(eval_length=24)
        self.change, self.nested, self.kind = change, nested, kind
        self.sets = {name: self.rows(seed) for seed, name in enumerate(("train", "eval"))}

    def rows(self, seed):
        inputs, targets, _ = own_tasks.masked_data(48, seed)
        pairs = list(zip(inputs.numpy(), targets.numpy(), strict=True))
        return [{"inputs": x, "more": {"targets": y}} for x, y in pairs] if self.nested else pairs

    def train_data(self):
        return self.sets["train"]

    def eval_data(self):
        return self.sets["eval"]

    def pair(self, sample):
        return (sample["inputs"], sample["more"]["targets"]) if self.nested else sample

    def prepare(self, sample, epoch, training):
        concerned = training == (self.kind == "train")
        if (self.change == "prepare" and concerned) or (self.change == "later" and epoch > 0):
            inputs, _ = self.pair(sample)
            inputs *= 0.9
        if self.change == "copy":
            sample = copy.deepcopy(sample)
            inputs, _ = self.pair(sample)
            inputs *= 0.9
        return self.pair(sample)

    def collate(self, samples):
        if self.change == "collate":
            samples[0][0][:] = 0
        if self.change == "loss":
            return [torch.as_tensor(part)[None] for part in samples[0]]
        return super().collate(samples)

    def loss(self, model, batch):
        if self.change in ("loss", "batch"):
            batch[0].mul_(0.9)
        return super().loss(model, batch)

    def predict(self, model, batch):
        return model(batch[0])


def trained(task, folder, workers=0, steps=2):
    settings = runs.config(
        batch={"global": 2, "micro": 1} if task.change == "loss" else {},
        train={"steps": steps, "eval_every_steps": 2},
        data={"workers": workers},
    )
    runs.fit(task, settings, folder)
    return (folder / "train.log").read_text()


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"change": "prepare"}, ["Task.prepare: it changes a sample in place", "the training data", "sample.copy()"]),
        ({"change": "prepare", "nested": True}, ["Task.prepare", "copy.deepcopy"]),
        ({"change": "prepare", "kind": "eval"}, ["Task.prepare", "the evaluation data: sample 0 of list"]),
        ({"change": "collate"}, ["Task.collate: it changes a sample"]),
        ({"change": "loss"}, ["Task.loss or Task.predict: it changes a sample", "let Task.collate return"]),
    ],
)
def test_what_changes_the_data_is_named_before_the_first_step(tmp_path, options, texts):
    with pytest.raises(LockstepError) as caught:
        trained(InMemory(**options), tmp_path)
    assert caught.value.exit_code == 2
    for text in texts:
        assert text in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text()


class KeepsInSample(InMemory):
    """Keeps what it has prepared in its sample, which is a dict."""

    def __init__(self, how):
        super().__init__(nested=True)
        self.how = how

    def prepare(self, sample, epoch, training):
        if self.how == "prepare" and "kept" not in sample:
            sample["kept"] = self.pair(sample)[0] * 2
        if self.how == "augmented" and "kept" not in sample:  # of the first epoch, for ever
            sample["kept"] = self.pair(sample)[0] + np.random.rand()
        if self.how == "counts":
            sample["uses"] = sample.get("uses", 0) + 1
        return sample

    def collate(self, samples):
        for sample in samples:
            if self.how == "collate":
                sample.setdefault("kept", self.pair(sample)[0] * 2)
        inputs = [sample.get("kept", sample["inputs"]) for sample in samples]
        return super().collate([(torch.as_tensor(x), self.pair(s)[1]) for x, s in zip(inputs, samples, strict=True)])


@pytest.mark.parametrize("how", ["prepare", "collate", "counts"])
def test_what_is_kept_in_a_sample_and_changes_no_batch_passes(tmp_path, how):
    assert "differs when it is read again" not in trained(KeepsInSample(how), tmp_path)


def test_what_is_kept_in_a_sample_and_changes_a_batch_is_refused(tmp_path):
    with pytest.raises(LockstepError, match=r"Task\.prepare: it changes a sample in place"):
        trained(KeepsInSample("augmented"), tmp_path)
    assert not untouched_data._is_comparable({"batch": [object()]})  # so a change counts


def test_a_change_that_begins_in_a_later_epoch_is_found_before_the_first_step(tmp_path):
    with pytest.raises(LockstepError, match=r"Task\.prepare: it changes a sample in place"):
        trained(InMemory("later"), tmp_path / "two", steps=3)
    trained(InMemory("later"), tmp_path / "one")


def test_workers_find_it_too(tmp_path):
    with pytest.raises(LockstepError, match=r"Task\.prepare: it changes a sample in place"):
        trained(InMemory("prepare"), tmp_path, workers=1)


@pytest.mark.parametrize("options", [{}, {"nested": True}, {"change": "copy"}, {"change": "batch"}])
def test_what_changes_a_copy_passes(tmp_path, options):
    task = InMemory(**options)
    before = copy.deepcopy(task.sets)
    assert "differs when it is read again" not in trained(task, tmp_path)
    assert repr(task.sets) == repr(before)


class NewAtEachRead(InMemory):
    """In place, but the data set gives new arrays: nothing is lost."""

    def train_data(self):
        return runs_copy(self.sets["train"])


def runs_copy(rows):
    class Copies(torch.utils.data.Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return tuple(np.array(part) for part in rows[index])

    return Copies()


class Noisy(InMemory):
    """Reading draws from a generator that nobody seeds."""

    def train_data(self):
        rows = self.sets["train"]

        class WithNoise(torch.utils.data.Dataset):
            def __len__(self):
                return len(rows)

            def __getitem__(self, index):
                inputs, targets = rows[index]
                return inputs + np.random.default_rng().standard_normal(inputs.shape), targets

        return WithNoise()


class Seeded(Noisy):
    """Reading draws from a generator that Lockstep seeds."""

    def train_data(self):
        rows = self.sets["train"]

        class WithNoise(torch.utils.data.Dataset):
            def __len__(self):
                return len(rows)

            def __getitem__(self, index):
                inputs, targets = rows[index]
                return inputs + np.random.standard_normal(inputs.shape), targets

        return WithNoise()


def test_reading_that_is_random_is_told_only_where_nobody_seeds_it(tmp_path):
    assert "of the training data (WithNoise) differs when it is read again" in trained(Noisy(), tmp_path / "n")
    assert "differs when it is read again" not in trained(Seeded(), tmp_path / "s")
    assert "differs when it is read again" not in trained(NewAtEachRead("prepare"), tmp_path / "c")


def test_the_look_leaves_no_trace(tmp_path):
    weights, _ = runs.fit(InMemory(), runs.config(train={"steps": 3}), tmp_path)
    in_memory, _ = runs.fit(InMemory(), runs.config(train={"steps": 3}))
    assert all(torch.equal(weights[name], value) for name, value in in_memory.items())


class OwnGenerator(InMemory):
    """One of its methods draws from a generator that nobody can seed, the other from one that Lockstep seeds."""

    def __init__(self, method):
        super().__init__()
        self.method, self.generator = method, random.SystemRandom()

    def noise(self, method):
        return (self.generator if self.method == method else random).gauss(0, 1)

    def prepare(self, sample, epoch, training):
        return sample[0] + self.noise("prepare"), sample[1]

    def collate(self, samples):
        return super().collate([(inputs + self.noise("collate"), targets) for inputs, targets in samples])


@pytest.mark.parametrize("method", ["prepare", "collate"])
def test_a_method_that_no_seed_determines_is_named_before_the_first_step(tmp_path, method):
    log = trained(OwnGenerator(method), tmp_path)
    assert f"the result of Task.{method} for sample" in log
    assert "Draw from the global generators" in log


def test_draws_from_seeded_generators_pass(tmp_path):
    assert "the result of Task" not in trained(OwnGenerator(None), tmp_path)


class FillsAgain(own_tasks.Plain):
    """The method `how` fills the same memory for each sample, or for each batch."""

    def __init__(self, how, kind="train"):
        super().__init__(eval_length=24)
        self.how, self.kind = how, kind
        self.buffer, self.whole, self.constant = np.zeros(10), torch.zeros(64, 10).double(), torch.ones(3)

    def train_data(self):
        return Rows(self, super().train_data(), self.how if self.kind == "train" else "")

    def eval_data(self):
        return Rows(self, super().eval_data(), self.how if self.kind == "eval" else "")

    def prepare(self, sample, epoch, training):
        inputs, targets = sample
        if self.how == "read, and copied":
            return torch.as_tensor(inputs).clone(), targets
        if self.how == "prepare" and training == (self.kind == "train"):
            np.copyto(self.buffer, inputs)
            return self.buffer, targets
        return torch.as_tensor(inputs), targets

    def collate(self, samples):
        inputs, targets = super().collate(samples)
        if self.how == "collate":
            return {"x": [self.whole[: len(inputs)].copy_(inputs)], "y": targets, "constant": self.constant}
        return {"x": [inputs], "y": targets, "constant": self.constant}

    def loss(self, model, batch):
        return super().loss(model, (batch["x"][0], batch["y"]))

    def predict(self, model, batch):
        return model(batch["x"][0])


class Rows(torch.utils.data.Dataset):
    def __init__(self, task, rows, how):
        self.task, self.rows, self.how = task, rows, how

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        inputs, targets, _ = self.rows[index]
        if not self.how.startswith("read"):
            return inputs, targets
        np.copyto(self.task.buffer, inputs)
        return self.task.buffer.view(), targets


def test_memory_that_is_filled_again_is_refused_where_batches_would_show_it(tmp_path):
    again = "it returns memory that it fills again"
    filled = {
        "read": rf"Rows\.__getitem__: {again}: sample \d+ of the {{}} data changes its values when sample \d+ is made",
        "prepare": rf"Task\.prepare: {again}: sample \d+ of the {{}} data",
        "collate": rf"Task\.collate: {again}: the batch of sample \d+ of the {{}} data",
    }
    cases = [("read", "train", 0), ("read", "eval", 0), ("read", "train", 1), ("prepare", "train", 0)]
    for number, (how, kind, workers) in enumerate([*cases, ("collate", "train", 0)]):
        task = FillsAgain(how, kind)
        task.change = ""
        which = "training" if kind == "train" else "evaluation"
        with pytest.raises(LockstepError, match=filled[how].format(which)) as caught:
            trained(task, tmp_path / str(number), workers)
        assert "array.copy() or tensor.clone()" in caught.value.remedy
    for how in ("read, and copied", ""):
        task = FillsAgain(how)
        task.change = ""
        assert "fills again" not in trained(task, tmp_path / f"passes {how}")
