"""Experiments on the spot: when ranks disagree about a micro-batch, all compute it again, and the verdict follows."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lockstep.core.build import Run
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import listed
from lockstep.core.parallel.simulated_rank import acting_as_rank
from lockstep.core.parallel.world import World
from lockstep.launch.device_check.run import wrong_answers
from lockstep.watch import operations
from lockstep.watch.evidence import device_name
from lockstep.watch.gradients import Detail
from lockstep.watch.state import of_all
from lockstep.watch.trial import Share, detail, read, trial
from lockstep.watch.verdict import (
    Noise,
    RecomputeFinding,
    Same,
    Verdict,
    first_difference,
    named,
    same_batch,
    same_bits,
    who,
)


@dataclass(frozen=True)
class Dispute:
    """Two ranks computed different results for one micro-batch. On one rank, both are that rank."""

    share: Share
    """The owner's."""
    recomputer: int
    own: Detail
    other: Detail


class MicroBatchExperiments:
    """Experiments with a micro-batch. All ranks make the same ones.

    Args:
        leaves: of `Strategy.leaves`.
        like: a micro-batch of the training.
        noise: what rounding explains; None: nothing, because kernels are deterministic.
    """

    def __init__(self, run: Run, leaves: Mapping[str, Tensor], like: MicroBatch, noise: Noise | None) -> None:
        self.run, self.leaves, self.like, self.noise = run, leaves, like, noise
        self.repeats: list[tuple[Detail, Detail]] = []
        self.micro_batch: MicroBatch | None = None

    def _read(self, share: Share) -> MicroBatch:
        batches, device = self.run.batches, self.run.world.device
        plan = batches.plan.rank_micro_batches(share.step, share.rank)[0]
        return read(batches.loader.micro_batches, plan, self.like, device)

    def _twice(self, share: Share) -> list[tuple[Detail, Detail]]:
        """What every rank computes of a share, twice, reading it again each time."""
        found = [detail(self.run.state, self._read(share), share, self.leaves) for _ in range(2)]
        return [(first, second) for first, second in of_all(self.run.world, found)]

    def verdict(self, dispute: Dispute) -> Verdict | None:
        """What is at fault. None: only rounding, because kernels are not deterministic."""
        share = dispute.share
        self.micro_batch = self._read(share)
        pairs = [(share.rank, dispute.own), (dispute.recomputer, dispute.other)]
        self.repeats = self._twice(share)
        if not same_batch(dispute.own, dispute.other):
            return self._of_data(who(pairs, self.repeats, same_batch), share)
        same: Same = self.noise.same if self.noise else same_bits
        found = who(pairs, self.repeats, same)
        first = self._first(found, dispute)
        if (
            found.how == "unstable"
            and 2 * len(found.ranks) >= len(self.repeats)
            and not self.run.config.compute.deterministic
        ):
            return None if self.noise is None else self._not_deterministic(found, share, first)
        if found.how in ("once", "nobody") and self._may_be_rounding(dispute):
            return None
        if found.how in ("repeats", "tie") and (code := self._of_code(found, share, same)) is not None:
            return code
        return judged_device(self.run.world, found, first)

    def _first(self, found: RecomputeFinding, dispute: Dispute) -> str:
        """The first tensor that differs."""
        for rank in found.ranks:
            pair = self.repeats[rank]
            one = found.reference or pair[1]
            if name := first_difference(pair[0], one) or first_difference(pair[1], one):
                return name
        return first_difference(dispute.own, dispute.other)

    def _may_be_rounding(self, dispute: Dispute) -> bool:
        """True if a kernel may sometimes add in a different order, and that explains the difference."""
        if self.run.world.device.type == "cpu" or self.run.config.compute.deterministic or self.noise is not None:
            return False
        reference = self.repeats[0][0]
        return all(Noise().same(one, reference) for one in (dispute.own, dispute.other) if one.sums)

    def _of_data(self, found: RecomputeFinding, share: Share) -> Verdict:
        assert self.micro_batch is not None
        samples = f"samples {listed([str(index) for index in self.micro_batch.indices], 32)}"
        if found.how == "unstable":
            text = f"{samples} differ when they are read again on {named(found.ranks)}: their source or "
            return Verdict(
                "data", found.ranks, text + "Task.prepare changes, or draws numbers that the seed does not determine"
            )
        more = "" if found.how in ("repeats", "tie") else ", once: read again, they equal those of the other ranks"
        return Verdict("data", found.ranks, f"{named(found.ranks)} read different bytes for {samples}{more}")

    def _not_deterministic(self, found: RecomputeFinding, share: Share, first: str) -> Verdict:
        operation = self.unstable_operation(share)
        text = f"{named(found.ranks)} differ from themselves by more than before, first in {operation or first}"
        return Verdict("not deterministic", found.ranks, text, first)

    def unstable_operation(self, share: Share) -> str:
        """The first operation whose result differs when a rank repeats a share; of the first rank that has one."""

        def once() -> None:
            trial(self.run.state, self._read(share), share, self.leaves)

        names = of_all(self.run.world, operations.first_difference(once, once))
        return next((name for name in names if name), "")

    def _of_code(self, found: RecomputeFinding, share: Share, same: Same) -> Verdict | None:
        """The verdict if a rank returns its result only because it runs as this rank."""
        for suspect in found.ranks[:2]:
            with acting_as_rank(suspect):
                posed = self._twice(share)
            wanted = self.repeats[suspect][0]
            others = [rank for rank in range(len(posed)) if rank != suspect]
            changed = [
                rank for rank in others if not same(self.repeats[rank][0], wanted) and same(posed[rank][0], wanted)
            ]
            if not others or len(changed) < len(others) - len(found.ranks) + 1 or not changed:
                continue
            where = self._branch(share, suspect)
            text = f"the code behaves differently on rank {suspect}: other ranks compute its result when they run as "
            text += f"rank {suspect}"
            if found.how == "tie":
                text = "the code behaves differently by rank: a rank's result changes when it runs as another rank"
            text += f". The first operation that differs: {where}" if where else ""
            first = first_difference(self.repeats[others[0]][0], wanted)
            return Verdict("code", found.ranks if found.how == "tie" else (suspect,), text, first)
        return None

    def _branch(self, share: Share, suspect: int) -> str:
        def plain() -> None:
            trial(self.run.state, self._read(share), share, self.leaves)

        def posing() -> None:
            with acting_as_rank(suspect):
                plain()

        return next((name for name in of_all(self.run.world, operations.first_difference(plain, posing)) if name), "")


def judged_device(world: World, found: RecomputeFinding, first: str) -> Verdict:
    """The verdict if ranks compute different results from the same inputs. All ranks make the same call.

    Args:
        first: the first result that differs, for people.
    """
    names = of_all(world, f"{socket.gethostname()}, {device_name(world.device)}")
    wrong = of_all(world, wrong_answers(world.device))
    ranks = found.ranks
    if found.how in ("tie", "nobody"):
        liars = tuple(rank for rank, faults in enumerate(wrong) if faults)
        if not liars:
            those = named(ranks or tuple(range(len(names))), "or")
            text = f"{those}: the results differ, and nothing shows which is correct"
            return Verdict("unclear", ranks, text, first)
        ranks = liars
    how = {
        "unstable": "it differs from itself on the same inputs",
        "repeats": "it computes a different result than the others from the same inputs, every time",
        "once": "it computed a different result once, but not when repeated",
    }.get(found.how, "it computes known answers wrongly")
    where = "; ".join(f"rank {rank} ({names[rank]})" for rank in ranks)
    known = "; ".join(f"rank {rank} also computes {', '.join(wrong[rank])} wrongly" for rank in ranks if wrong[rank])
    text = f"the device of {where}: {how}{f', first in {first}' if first else ''}{f'. {known}' if known else ''}"
    return Verdict("device", ranks, text, first, guilty=ranks)
