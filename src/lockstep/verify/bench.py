"""The trials that checks share: each is run once, whoever asks for it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.verify import compare, trial
from lockstep.verify.adjusted import Adjustment
from lockstep.verify.compare import Difference
from lockstep.verify.nature import Nature, look
from lockstep.verify.ranks import Ended, Ranks
from lockstep.verify.trial import Answer, Trial
from lockstep.verify.witness import Seen, Watch


class TrialFailed(Exception):
    """A trial did not go to its end. known, refused: see `Answer`."""

    def __init__(self, trial: str, error: str, known: bool = False, refused: bool = False) -> None:
        super().__init__(f"{trial}: {error}")
        self.error, self.known, self.refused = error, known, refused


@dataclass
class Bench:
    """Runs trials on warm ranks and keeps what they found.

    config: of the training to verify, its global batch a number. nproc: ranks. folder: where trials write. steps: of a comparison.
    learning_steps: of the trial that is to learn something. wrap: applied to what a rank is to run; for tests, which break it.
    """

    config: Mapping[str, Any]
    nproc: int
    folder: Path
    ranks: Ranks
    steps: int = 12
    learning_steps: int = 60
    patience: int = 4
    wrap: Callable[..., Any] = trial.answering
    _answers: dict[str, Any] = field(default_factory=dict)

    # ---- configs

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return int(self.config["batch"]["global"])

    @property
    def part(self) -> int:
        """Training samples of a comparison: four steps and a partial fifth make an epoch, so that few steps see epochs end."""
        return 4 * self.global_batch + max(1, self.global_batch // 3)

    @property
    def hybrid(self) -> bool:
        """Whether parameters are sharded within groups of ranks, and replicated between them."""
        groups = self.config["parallel"]["shard_ranks"]
        return self.strategy == "fsdp" and groups is not None and groups < self.nproc

    @property
    def most_ranks(self) -> int:
        """Of this machine: one per GPU, or one more than was asked for."""
        gpus = 0 if self.config["device"] == "cpu" else torch.cuda.device_count()
        return gpus or self.nproc + 1

    @property
    def strategy(self) -> str:
        """The config's, on several ranks."""
        wanted = str(self.config["parallel"]["strategy"])
        return "ddp" if wanted == "single" else wanted

    def changed(self, **changes: Any) -> dict[str, Any]:
        """The config for a short training, with changes by dotted path (two underscores for the dot)."""
        config: dict[str, Any] = copy.deepcopy(dict(self.config))
        steps = changes.get("train__steps", self.steps)
        warmup = min(config["schedule"]["warmup_steps"], steps // 4)
        short = {"train__epochs": None, "train__min_steps": None, "train__steps": steps}
        short |= {"train__eval_every_epochs": None, "train__eval_every_steps": 0}
        short |= {"schedule__warmup_steps": warmup, "log__every_steps": 1, "log__writers": ["text_log", "json_lines"]}
        short |= {
            "checkpoint__every_steps": 0,
            "checkpoint__keep_best": None,
            "checkpoint__keep_every_steps": None,
            "checkpoint__keep_last": 1,
        }
        for path, value in (short | changes).items():
            *sections, key = path.split("__")
            place = config
            for section in sections:
                place = place[section]
            place[key] = value
        return config

    def natural(self, **changes: Any) -> dict[str, Any]:
        """The training as it is, but short."""
        return self.changed(parallel__strategy=self.strategy, **changes)

    def exact(self, **changes: Any) -> dict[str, Any]:
        """For comparisons: no autocast and no compiled code, which round in their own way."""
        return self.natural(
            precision="fp32", parallel__param_dtype=None, parallel__reduce_dtype=None, compute__compile=None, **changes
        )

    # ---- trials

    def train(
        self,
        name: str,
        world: int,
        config: Mapping[str, Any],
        adjustment: Adjustment,
        watch: Watch | None = None,
        folder: str | None = None,
        keep: bool = True,
        **more: Any,
    ) -> list[Seen]:
        """What each rank saw of a training, in a folder of that name, or in another trial's, whose checkpoint it then goes on from.

        Args:
            keep: whether the checkpoint will be asked for.

        Raises:
            TrialFailed: some rank failed.
        """
        one = Trial(name, world, config, str(self.folder / (folder or name)), adjustment, watch, **more)
        answers = self._ask(name, world, trial.fit, one)
        if not keep:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return [answer.value for answer in answers]

    def ask(self, name: str, world: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns on rank 0 of `world` ranks."""
        return self._ask(name, world, function, *arguments)[0].value

    def _ask(self, name: str, world: int, function: Callable[..., Any], *arguments: Any) -> list[Answer]:
        if name not in self._answers:
            self._answers[name] = self.ranks.run(world, self.wrap, function, *arguments)
        answers = self._answers[name]
        ended = sorted(
            (one for one in answers if isinstance(one, Ended)), key=lambda one: one.why
        )  # by themselves first
        failed = sorted(
            (one for one in answers if isinstance(one, Answer) and one.error),
            key=lambda one: (not one.refused, one.known),
        )
        gone = [one for one in ended if not one.why]
        if failed and not (gone and failed[0].known and not failed[0].refused):  # that another rank is gone is no news
            raise TrialFailed(name, str(failed[0].error), failed[0].known, failed[0].refused)
        if ended:
            raise TrialFailed(name, "; ".join(map(str, ended)))
        return list(answers)

    @property
    def done(self) -> set[str]:
        """Names of the trials that were asked for."""
        return set(self._answers)

    @property
    def last_factor(self) -> int:
        """Of `learned`, as far as it was asked for."""
        return self.patience if f"learned-{self.patience}" in self.done else 1

    @property
    def nature(self) -> Nature:
        """Of the config's task."""
        found: Nature = self.ask("nature", 1, look, self.natural(), self.part)
        return found

    def adjustment(self, reverse: bool = False) -> Adjustment:
        """For comparisons between different numbers of ranks."""
        return Adjustment(exact=True, double=self.nature.double, reverse=reverse, part=self.part)

    # ---- the trials that several checks compare

    def alone(self) -> list[Seen]:
        """One process, whole global batches: what all others are compared with."""
        config = self.exact(batch__micro=None)
        return self.train("one-process", 1, config, self.adjustment(), Watch(follow=config))

    def together(self) -> list[Seen]:
        """All ranks, one micro-batch each."""
        return self.train(f"{self.nproc}-ranks", self.nproc, self.exact(batch__micro=None), self.adjustment())

    def accumulated(self) -> list[Seen]:
        """All ranks, several uneven micro-batches each; some updates, that of an epoch's partial last batch
        among them, are compared with plain torch's."""
        config = self.exact(batch__micro=self.small_micro)
        return self.train(
            "accumulated",
            self.nproc,
            config,
            self.adjustment(),
            Watch(updates=(0, min(4, self.steps - 1), self.steps - 2)),
        )

    def undisturbed(self) -> list[Seen]:
        """All ranks, the training as it is, with checkpoints on the way."""
        watch = Watch(digests=1, batches=True, probes=(1, self.steps // 2, self.steps))
        return self.train("undisturbed", self.nproc, self.saving(), Adjustment(part=self.part), watch)

    def saving(self, **changes: Any) -> dict[str, Any]:
        """The training as it is, with checkpoints on the way."""
        return self.natural(checkpoint__every_steps=max(1, self.steps // 4), checkpoint__keep_last=2, **changes)

    def overheard(self) -> list[Seen]:
        """All ranks, several micro-batches each, and nothing logged: what is said in a step is what the step needs."""
        config = self.natural(batch__micro=self.small_micro, log__every_steps=self.steps, train__unfreeze=[])
        return self.train(
            "overheard",
            self.nproc,
            config,
            Adjustment(part=4 * self.global_batch),
            Watch(talk=tuple(range(2, self.steps - 1))),
            keep=False,
        )

    @property
    def small_micro(self) -> int:
        """A micro-batch that makes about three of them per rank, not all of one size."""
        return max(1, -(-self.global_batch // (3 * self.nproc)) - 1)

    def learned(self, factor: int = 1) -> list[Seen]:
        """All ranks, the training as it is, on all its data, for long enough to learn something."""
        steps = self.learning_steps * factor
        return self.train(
            f"learned-{factor}", self.nproc, self.natural(train__steps=steps), Adjustment(), Watch(used=True)
        )

    def limit(self) -> float:
        """What rounding explains between `alone` and a run that is cut in another way."""
        one = self.alone()
        noisy = self.train("one-process-reversed", 1, self.exact(batch__micro=None), self.adjustment(reverse=True))
        return compare.bound(self.apart("one-process-reversed", noisy), self.nature.epsilon, len(one[0].losses))

    def apart(self, name: str, seen: list[Seen]) -> Difference:
        """How far a trial's model and losses are from those of `alone`."""
        one = self.alone()
        mine, reference = (
            compare.last_checkpoint(self.folder / name),
            compare.last_checkpoint(self.folder / "one-process"),
        )
        if mine is None or reference is None:
            raise TrialFailed(name, "it left no checkpoint")
        return compare.difference(reference, mine, one[0].parameters, one[0].moved, one[0].losses, seen[0].losses)
