"""Events of scripts that nobody ran: what ranks would have written."""

from collections import defaultdict

from lockstep_audit.events import EventHistory
from lockstep_audit.report.outcome import outcome
from lockstep_audit.rules.catalogue import BY_ID

FILE = "/home/somebody/train.py"
TITLES = {id: rule.title for id, rule in BY_ID.items()}


def at(line):
    return [FILE, line, "main"]


class Script:
    """Events of `world` ranks, in their order."""

    def __init__(self, world=2, how="ddp", previous=None):
        self.world, self.previous, self.events = world, previous, []
        self.numbers, self.steps, self.indexes = defaultdict(int), defaultdict(int), defaultdict(int)
        self.add("start", world_size=world, host="node")
        if how:
            self.add("wrap", at=at(5), model=0, how=how, parameters=2, trainable=2, frozen=[], buffers=0)

    def add(self, kind, rank=None, **keys):
        """An event of one rank or of all. A value that is a function is called with the rank."""
        for each in range(self.world) if rank is None else [rank]:
            told = {name: value(each) if callable(value) else value for name, value in keys.items()}
            event = {"kind": kind, "rank": each, "number": self.numbers[each], "time": 0.0, "step": self.steps[each]}
            self.events.append(event | {name: value for name, value in told.items() if value is not None})
            self.numbers[each] += 1
        return self

    def optimizer(self, number=0, line=7, **keys):
        told = {"optimizer": number, "class": "AdamW", "owned": 2, "foreign": 0, "missing": {}, "gradients_none": 0}
        return self.add("optimizer", made_at=at(line), groups=[{"parameters": 2, "lr": 0.1}], **(told | keys))

    def step(self, rank=None, number=0, backwards=1, synced=True, digest="same", line=30, sampled=True, **keys):
        """A step after some backward passes. `digest` is that of all gradients and parameters."""
        for each in range(self.world) if rank is None else [rank]:
            count = backwards(each) if callable(backwards) else backwards
            value = digest(each) if callable(digest) else digest
            passes = [{"at": at(25), "synced": synced, "ops": ["NllLossBackward0"]} for _ in range(count)]
            told = {"gradients": {"weight": value, "bias": "b"}, "parameters": {"weight": value, "bias": "b"}}
            told = {"backwards": passes, "model": 0, "sampled": sampled} | (told if sampled else {})
            index = self.indexes[each, number]
            if count > 1:
                told["micro_batches"] = [{"loader": 0, "batch": number, "samples": 2} for number in range(count)]
            mine = {name: value(each) if callable(value) else value for name, value in keys.items()}
            self.add("step", each, optimizer=number, index=index, at=at(line), **(told | mine))
            if not mine.get("skipped"):
                self.indexes[each, number] += 1
                self.steps[each] += 1
        return self

    def epoch(self, indices, number=0, epoch=0, accumulate=1, train=True, complete=True, digest=None, end=None, **keys):
        """An iteration over a loader. `indices`: of each batch, by rank. `end`: keys of its end."""
        digest = digest or (lambda rank, batch: str(batch))
        for rank in range(self.world):
            mine, told = indices(rank), {"loader": number, "epoch": epoch}
            given = {"batches": len(mine), "dataset_size": 64, "dataset": "Data", "is_iterable": False}
            given |= {"sampler_kind": "RandomSampler", "shuffles": True}
            given |= {name: value(rank) if callable(value) else value for name, value in keys.items()}
            self.add("loader", rank, made_at=at(10), at=at(20), **(told | given))
            self.add("indices", rank, first=0, batches=mine, **told)
            for place, batch in enumerate(mine):
                self.add("batch", rank, batch=place, samples=len(batch), digest=digest(rank, batch), **told)
                if train and (place + 1) % accumulate == 0:
                    self.step(rank, backwards=accumulate)
            done = {"batches": len(mine), "samples": sum(map(len, mine)), "is_complete": complete}
            done |= {"backwards": len(mine) * train, "forwards_eval": len(mine) * (not train)}
            done |= {name: value(rank) if callable(value) else value for name, value in (end or {}).items()}
            self.add("loader_end", rank, **(told | done))
        return self

    def exit(self, rank=None, code=0, **keys):
        return self.add("exit", rank, code=code, **keys)

    @property
    def history(self):
        return EventHistory(self.events, self.previous)

    def found(self, id):
        """The findings of a rule."""
        said = BY_ID[id].check(self.history)
        return [] if isinstance(said, str) else list(said)

    def errors(self):
        """The ids of all errors."""
        return {finding.rule for finding in outcome(self.history).of("error")}

    def ids(self):
        return {finding.rule for finding in outcome(self.history).findings}


def dealt(world=2, epoch=0, **keys):
    """What a DistributedSampler deals."""
    return lambda rank: {"replicas": world, "rank": rank, "shuffle": True, "epoch": epoch, "total_size": 64} | keys


def parts(size=16, batch=2, world=2, shift=0):
    """Different indices for each rank."""
    order = [(index * 7 + shift) % size for index in range(size)]
    return lambda rank: in_batches(order[rank::world], batch)


def whole(size=16, batch=2, shift=0):
    """The same indices on each rank; `shift` of a rank: another order."""
    move = shift if callable(shift) else lambda rank: shift
    return lambda rank: in_batches([(index * 7 + move(rank)) % size for index in range(size)], batch)


def in_batches(order, batch):
    return [order[first : first + batch] for first in range(0, len(order), batch)]
