"""A bench whose trials have been made already, as a test says, and what they saw."""

from pathlib import Path

from lockstep import config_file
from lockstep.verify.bench import Bench
from lockstep.verify.nature import Nature
from lockstep.verify.trial import Answer
from lockstep.verify.witness import Seen
from tests import runs


class NoRanks:
    """Ranks that nobody may ask."""

    def run(self, world, function, *arguments):
        raise AssertionError(f"{function} with {arguments} was asked for")


def bench(answers=None, nproc=2, steps=12, folder=Path("nowhere"), ranks=None, **sections):
    """answers: by the name of the trial what its ranks answer, as a list; or what rank 0 does."""
    config = config_file.parse(runs.config(**sections), needs_task=False).model_dump(by_alias=True)
    given = {"nature": Nature(epsilon=1e-16)} | (answers or {})
    made = {
        name: [
            one if isinstance(one, Answer) else Answer(one)
            for one in (answer if isinstance(answer, list) else [answer])
        ]
        for name, answer in given.items()
    }
    return Bench(config, nproc, folder, ranks or NoRanks(), steps=steps, _answers=made)


def seen(losses=(), **more):
    """What a rank saw of a training with these losses."""
    return Seen(
        entries=[{"step": step + 1, "train/loss": loss, "train/skipped": 0} for step, loss in enumerate(losses)], **more
    )
