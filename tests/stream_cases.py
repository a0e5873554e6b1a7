"""Streams for tests; and the same training in plain torch."""

import torch
from torch.utils.data import IterableDataset, get_worker_info

import lockstep
from lockstep.core.data.randomness import seed_all
from lockstep_lab.verify.reference.order import seed_of
from tests import runs

LENGTH, BATCH = 31, 9


def row(number, epoch):
    generator = torch.Generator().manual_seed(number + 1000 * epoch)
    return torch.randn(4, generator=generator, dtype=torch.float64), torch.tensor([number / 16.0 - 1, 1.0 + epoch])


class Numbers(IterableDataset):
    """Rows in turn, others in each pass. It divides itself among workers, as many do."""

    def __init__(self, length=LENGTH):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def first(self):
        return 0

    def __iter__(self):
        worker = get_worker_info()
        every, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for number in range(self.first() + first, self.length, every):
            self.at = number
            yield row(number, self.epoch)


class Stateful(Numbers):
    """The same with a state. `read` counts the samples that all its copies have given in this process."""

    start, at, read = 0, -1, 0

    def state_dict(self):
        return {"at": self.at + 1}

    def load_state_dict(self, state):
        self.start = state["at"]
        self.at = self.start - 1

    def first(self):
        return self.start

    def __iter__(self):
        for sample in super().__iter__():
            Stateful.read += 1
            yield sample


class Forgetful(Stateful):
    """Its state is wrong: it leaves a sample out, as states of shuffle buffers leave samples out."""

    def first(self):
        return self.start + (self.start > 0)


class Drawing(Numbers):
    """Its samples draw from the global generators."""

    def __iter__(self):
        for inputs, target in super().__iter__():
            yield inputs + torch.randn(4, dtype=torch.float64), target


class Streamed(lockstep.Task):
    """Regression in float64 on a stream, with noise when a sample is prepared."""

    def __init__(self, kind=Stateful, length=None, state_every=5, **options):
        self.make = lambda: lockstep.Stream(kind(**options), length, state_every=state_every)

    def model(self):
        return torch.nn.Linear(4, 2).double()

    def train_data(self):
        return self.make()

    def prepare(self, sample, epoch, training):
        return sample[0] + 0.1 * torch.randn(4, dtype=torch.float64), sample[1]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()


def settings(steps, **sections):
    sections["train"] = {"steps": steps} | sections.get("train", {})
    return runs.config(**{"batch": {"global": BATCH}, **sections})


def trained(options, config, folder):
    """Weights after a training in `folder`, for ranks; and samples of the stream that this process has read for it."""
    before = Stateful.read
    weights = runs.fit(Streamed(**options), config, folder)[0]
    return weights, Stateful.read - before


def by_hand(steps, kind=Numbers, epochs=False):
    """Weights of plain torch: the samples of all passes in turn, in batches; with `epochs`, no batch has two passes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    stream, batches = [], []
    for epoch in range(1 + steps * BATCH // LENGTH):
        source = kind()
        source.set_epoch(epoch)
        samples = [(inputs, target, epoch, place) for place, (inputs, target) in enumerate(source)]
        stream += samples
        batches += [samples[start : start + BATCH] for start in range(0, LENGTH, BATCH)]
    if not epochs:
        batches = [stream[start : start + BATCH] for start in range(0, steps * BATCH, BATCH)]
    for number, batch in enumerate(batches[:steps]):
        inputs, targets = [], []
        for place, (row_inputs, target, epoch, within) in enumerate(batch):
            seed_all(seed_of(0, epoch, within) if epochs else seed_of(0, 0, number * BATCH + place))
            inputs.append(row_inputs + 0.1 * torch.randn(4, dtype=torch.float64))
            targets.append(target)
        loss = (model(torch.stack(inputs)) - torch.stack(targets)).square().sum() / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
