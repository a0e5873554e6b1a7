"""A check whether samples depend on the order of a set, which differs between interpreters.

The ranks of a verification are forks of one process, so they share a hash seed. Ranks that torchrun starts do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lockstep.core.parallel.world import join_world
from lockstep.parts.digest import digest_of_batch
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.reference import data

_SAMPLES = 16
_LONGEST_S = 120.0
_SEED = "20011"


def digests(config: Mapping[str, Any]) -> list[list[int]]:
    """A digest of each of some training samples, spread over the data set."""
    task = task_of(Trainer(config, quiet=True))
    samples: Any = task.train_data()
    count = min(_SAMPLES, len(samples))
    with join_world("cpu"):
        found = []
        for number in range(count):
            index = number * len(samples) // count
            for sample in data.read(task, samples, [index], epoch=0, training=False, seed=0, skip=True):
                found.append(list(digest_of_batch(task.collate([sample]))))
        return found


class OtherInterpreter:
    """A new interpreter with a different hash seed, which computes the digests of the same samples."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        environment = os.environ | {"PYTHONHASHSEED": _SEED, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep_lab.verify.hash_seed"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.config = json.dumps(config)

    def difference(self, own: list[list[int]]) -> str:
        """The difference there, as a sentence; empty if nothing differs, or if the interpreter failed.

        Args:
            own: what `digests` returned in this process.
        """
        try:
            answer, _ = self.process.communicate(self.config, timeout=_LONGEST_S)
            theirs = json.loads(answer.splitlines()[-1])
        except (subprocess.TimeoutExpired, OSError, ValueError, IndexError):
            self.process.kill()
            return ""
        differing = sum(mine != other for mine, other in zip(own, theirs, strict=False))
        if not differing and len(own) == len(theirs):
            return ""
        return (
            f"{differing} of {len(own)} samples differ in a new interpreter: do they depend on the order of a set, "
            "or on hash()? Ranks that torchrun starts would train on different samples; use sorted(...)"
        )


if __name__ == "__main__":
    print(json.dumps(digests(json.load(sys.stdin))))
