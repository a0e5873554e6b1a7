"""The watch of a training: checks every `watch.every` steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core import step as engine
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import MicroBatchPlan, StepPlan
from lockstep.core.errors import WatchError, number_of
from lockstep.core.parallel import sharded_tensor
from lockstep.core.parallel.buffers import ModuleBuffers
from lockstep.core.part import Training
from lockstep.core.step import TrainState
from lockstep.core.task import needs_global_batch
from lockstep.parts.digest import fold, fold_batch
from lockstep.watch import evidence, exchange
from lockstep.watch.examine import Dispute, MicroBatchExperiments
from lockstep.watch.gradients import Detail, Seen, bare, watched
from lockstep.watch.history import FigureHistory
from lockstep.watch.replicas import Replicas, differing_replicas
from lockstep.watch.state import gathered, in_turn, of_all, state_digest
from lockstep.watch.trial import Share, trial
from lockstep.watch.updates import Updates, is_of_engine
from lockstep.watch.verdict import ROUNDING, Noise, Verdict, blamed_on_parts, named


def other_rank(step: int, every: int, rank: int, world: int) -> int:
    """The rank whose share `rank` computes again at a check: each other rank in turn."""
    return (rank + 1 + step // every % max(1, world - 1)) % world


@dataclass(frozen=True)
class Due:
    """The steps at which a whole check runs. Counted from 0.

    The first step of a start is left out, because strategies warm up in it. So are steps at which other parameters
    start to train.
    """

    every: int
    first: int
    last: int
    left_out: tuple[int, ...] = ()

    def __call__(self, step: int) -> bool:
        is_due = (step + 1) % self.every == 0 or step + 1 == self.last
        return is_due and step > self.first and step not in self.left_out


class _Pending:
    """A check that starts before a step and ends before its update."""

    def __init__(self, state: TrainState, micro_batch: MicroBatch) -> None:
        self.step, self.micro_batch = state.step, micro_batch
        self.state = self.batch = self.other_batch = torch.zeros(2, dtype=torch.int64)
        self.share: Share | None = None
        self.leaves: Mapping[str, Tensor] = {}
        self.summed: list[str] = []
        """The parameters whose exchange is checked."""
        self.own: Seen | None = None
        self.other: Seen | None = None
        self.again: Seen | None = None
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.hooks = contextlib.ExitStack()


@dataclass(frozen=True)
class _Row:
    """What a rank sends to the others at a check."""

    shard: int
    state: tuple[int, int]
    reduced: tuple[int, int]
    differs_from_itself: bool
    own: tuple[int, ...]
    """Digests of the batch, the losses and the gradients of this rank's share."""
    other: tuple[int, ...]
    """The same of the share of `other_rank`."""
    loss: float
    norm: float

    @classmethod
    def of(cls, numbers: Sequence[int]) -> _Row:
        shard, s, t, a, b, itself, *rest = numbers
        loss, norm = torch.tensor(rest[12:], dtype=torch.int64).view(torch.float64).tolist()
        return cls(shard, (s, t), (a, b), bool(itself), tuple(rest[:6]), tuple(rest[6:12]), loss, norm)


class Watch(BuiltInPart):
    """Checks the ranks every few steps and before each save, and ends the training if they differ.

    A check of step N runs before its update: the state after N - 1 steps still exists. Replicas are compared. Each rank
    computes the first micro-batch of another rank's share again, with that rank's seeds. The result must equal what
    that rank computed in the step itself, before gradients were exchanged.

    Args:
        rebuild: builds the run again from a checkpoint, or from its beginning; see `replay`. None: replicas that differ
        are judged only by majority.
    """

    sees_writes = True

    def __init__(self, run: Run, rebuild: Callable[[Any], Run] | None = None) -> None:
        self.run, self.rebuild, self.every = run, rebuild, run.config.watch.every
        state = run.state
        self.why_not = _why_no_recomputation(run)
        self.recomputes = not self.why_not
        self.replicas = Replicas(state)
        self.updates = Updates(run, is_on=self.recomputes and not self.replicas.are_there)
        unfreezing = tuple(state.unfreezing.steps) if state.unfreezing is not None else ()
        self.due = Due(self.every, state.step, run.stop, unfreezing)
        if self.recomputes and state.world.size > 1:
            run.batches.extra.plans = _extra_plans(run.plan, self.due, state.world.rank)
        self.noise: Noise | None = None
        """What rounding explains, if kernels are not deterministic. None: they are, so far."""
        self.has_repeated = self.has_saved = False
        self.sees_exchange = True
        self.pending: _Pending | None = None
        self.passed: list[int] = []
        """The steps of the checks that have passed in this process."""
        self.compared_at = -1
        self.tell: Callable[[str], None] = lambda text: None
        self.histories = (FigureHistory("loss"), FigureHistory("gradient's norm"))

    # ---- events

    def start(self, training: Training) -> None:
        self.tell = training.tell
        hooks = self.run.state.optimizer._optimizer_step_pre_hooks  # private; filled by `register_...`
        self.sees_exchange = all(map(is_of_engine, hooks.values()))
        if not self.sees_exchange and training.ranks > 1:
            training.tell("note: the watch does not check the mean of the gradients: the optimizer has hooks before it")
        if self.why_not:
            training.tell(f"note: the watch only compares replicas: {self.why_not}")
        if training.ranks == 1 and not self.recomputes:
            training.tell("note: the watch checks nothing on one rank without recomputation")

    def before_step(self, training: Training) -> None:
        """Begin a check, if one is due. A collective."""
        assert isinstance(training, Inside)
        inside = training
        if not self.due(inside.step):
            return
        self.updates.begin(inside)
        with inside.window.excluded():
            self._begin(inside)
        pending = self.pending
        if pending is not None and pending.share is not None:
            forward, detailed = inside.state.strategy.unwrapped, self.noise is not None
            pending.summed = in_turn(pending.leaves, inside.step // self.every) if inside.ranks > 1 else []
            sums, ranks = pending.leaves if detailed else pending.summed, inside.state.world.size
            seen = watched(forward, pending.leaves, sums=sums, each=detailed, ranks=ranks)
            pending.own = pending.hooks.enter_context(seen)

    def before_update(self, training: Training) -> None:
        """End the check.

        Raises:
            WatchError: on all ranks, with the verdict.
        """
        assert isinstance(training, Inside)
        self._judge(training, self.updates.at_rest(training))
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.hooks.close()
            with training.window.excluded():
                self._end(training, pending)

    def after_step(self, training: Training) -> None:
        """Look at the update of a check. A check without update is dropped, such as after an overflow in fp16.

        Raises:
            WatchError: on all ranks, with the verdict.
        """
        assert isinstance(training, Inside)
        if self.pending is not None:
            self.pending.hooks.close()
            self.pending = None
            training.tell(f"note: step {training.step}: the watch has checked nothing: the update was skipped")
        self._judge(training, self.updates.end(training))

    def before_save(self, training: Training) -> None:
        """Compare the replicas. If the check of this step has passed, the state counts as checked.

        Raises:
            WatchError: on all ranks, with the verdict.
        """
        assert isinstance(training, Inside)
        step = training.step
        if self.compared_at != step:
            self.compared_at = step
            self._compare_replicas(training, step, at=step)
        if step in self.passed[-1:]:
            self.run.checked_step = step
        self.has_saved = True

    def log_entry(self, training: Training) -> None:
        training.log("watch/checks", self.run.checks)

    def end(self, training: Training) -> None:
        checks, rounding = self.run.checks, "" if self.noise is None else " up to rounding"
        agreed = "all ranks agreed" if training.ranks > 1 else "all repetitions agreed"
        what = f"a micro-batch per rank was recomputed in {checks:,} of {training.step:,} steps"
        what = f"{agreed}{rounding}; {what if self.recomputes else 'only replicas were compared'}"
        training.tell(f"watch: {number_of(checks, 'check')}, {what}" if checks else "watch: no check has passed")

    # ---- a check

    def _begin(self, inside: Inside) -> None:
        state, world = inside.state, inside.state.world
        pending = _Pending(state, inside.micro_batches[0])
        state.strategy.begin_step()  # buffers of rank 0, as the step has them
        if self.recomputes:
            totals, counting = engine._count_units(state, inside.micro_batches, self.run.plan.samples(state.step))
            totals = totals if counting is None else counting()
            if not any(totals.values()):
                return
            pending.share = own = Share(world.rank, state.step, totals)
            pending.leaves = state.strategy.leaves()
            pending.buffers = [(buffer, buffer.clone()) for buffer in ModuleBuffers(state.strategy.unwrapped)]
            detailed = self.noise is not None
            pending.batch = fold_batch(pending.micro_batch.batch).to(world.device)
            same = dataclasses.replace(pending.micro_batch)
            given = self.run.batches.extra.given if world.size > 1 else [same]
            other = dataclasses.replace(own, rank=other_rank(state.step, self.every, world.rank, world.size))
            pending.other_batch = fold_batch(given[0].batch).to(world.device)
            pending.other = trial(state, given[0], other, pending.leaves, detailed=detailed)
            if world.size > 1 and (detailed or not self.has_repeated):
                pending.again = trial(state, same, own, pending.leaves, detailed=detailed)
        if self.replicas.are_there:
            pending.state = state_digest(state, state.step // self.every)
        self.pending = pending

    def _end(self, inside: Inside, pending: _Pending) -> None:
        step = pending.step
        rows = [_Row.of(numbers) for numbers in gathered(self.run.world, self._numbers(inside, pending))]
        shards = [row.shard for row in rows]
        self._check_replicas(inside, step, shards, [row.state for row in rows], at=step + 1)
        whole = self.recomputes or self.replicas.are_there  # else nothing is compared
        if pending.share is not None:
            whole = self._check_shares(inside, pending, rows)
            is_full = self.run.plan.samples(pending.step) == self.run.plan.global_batch  # fewer samples vary more
            for number, history in enumerate(self.histories):
                if is_full and (text := history.add([(row.loss, row.norm)[number] for row in rows])):
                    inside.tell(f"warning: step {step + 1}: {text}")
        if whole:
            self._check_exchange(inside, pending, rows)
            self.run.checked_step, self.run.checks = step, self.run.checks + 1
            self.passed.append(step + 1)
            if self.has_saved and inside.rank == 0 and self.run.folder != Path():
                evidence.note_checked(self.run)
            self.has_saved = False

    def _numbers(self, inside: Inside, pending: _Pending) -> list[int]:
        device = inside.state.world.device
        parts: list[Tensor] = [pending.state.to(device), self._reduced(inside).to(device)]
        own, other, again = pending.own, pending.other, pending.again
        itself, figures = False, [0.0, 0.0]
        if own is not None and other is not None:
            mine = [pending.batch.to(device), own.loss(device), own.gradient(device)]
            twice = again if again is not None else other if inside.state.world.size == 1 else None
            if twice is not None:
                itself = not torch.equal(torch.cat([twice.loss(device), twice.gradient(device)]), torch.cat(mine[1:]))
            parts += [*mine, pending.other_batch.to(device), other.loss(device), other.gradient(device)]
            figures = self._figures(inside, pending, own)
        numbers = torch.cat(parts).tolist()
        numbers += [0] * (16 - len(numbers))
        bits = torch.tensor(figures, dtype=torch.float64).view(torch.int64).tolist()
        return [self.replicas.shard, *numbers[:4], int(itself), *numbers[4:], *bits]

    def _figures(self, inside: Inside, pending: _Pending, own: Seen) -> list[float]:
        """The loss per unit of this rank's share, and the norm of its gradient per unit."""
        weights, totals = pending.micro_batch.weights, _share(pending).totals
        units = sum(weights.values()) if weights else float(pending.micro_batch.samples)
        if not units:
            return [0.0, 0.0]
        loss = sum(abs(float(value)) for value in own.losses.values()) / units
        precision, world = inside.state.precision, inside.state.world.size
        scale = precision.loss_scale / (world if precision.scaler.is_enabled() else 1)
        return [loss, own.norm() * sum(totals.values()) / (world * units * scale)]

    def _reduced(self, inside: Inside) -> Tensor:
        """The digest of the gradients as the optimizer gets them."""
        named = inside.state.strategy.unwrapped.model.named_parameters()
        grads = {name: sharded_tensor.local(p.grad) for name, p in named if p.grad is not None}
        return fold(grads) if grads and self.replicas.are_there else torch.zeros(2, dtype=torch.int64)

    # ---- if something differs

    def _judge(self, inside: Inside, verdict: Verdict | None) -> None:
        if verdict is not None:
            if self.updates.checked:
                self.run.checked_step = self.updates.checked[0]
            self._fire(inside.step, self._with_code(inside, verdict), None, {})

    def _compare_replicas(self, inside: Inside, step: int, *, at: int) -> None:
        """Compare the whole state after `step` steps."""
        if self.replicas.are_there:
            rows = gathered(self.run.world, [self.replicas.shard, *state_digest(inside.state).tolist()])
            pairs = [(row[1], row[2]) for row in rows]
            self._check_replicas(inside, step, [row[0] for row in rows], pairs, at=at)

    def _check_replicas(
        self, inside: Inside, step: int, shards: Sequence[int], pairs: Sequence[tuple[int, int]], *, at: int
    ) -> None:
        if differing_replicas(shards, pairs):
            verdict = self._with_code(inside, self.replicas.verdict(self.run, step, self.rebuild))
            self._fire(at, verdict, None, {"state": self.replicas.digests})

    def _with_code(self, inside: Inside, verdict: Verdict) -> Verdict:
        """The verdict on weights that differ, if Parts of the user may have written them. A collective."""
        return blamed_on_parts(verdict, of_all(self.run.world, dict(inside.writes)), inside.parts)

    def _check_shares(self, inside: Inside, pending: _Pending, rows: Sequence[_Row]) -> bool:
        """Compare the shares. Returns whether that was possible, so that the check is complete."""
        world, share = inside.state.world, _share(pending)
        is_first, self.has_repeated = not self.has_repeated, True
        itself = [rank for rank, row in enumerate(rows) if row.differs_from_itself]
        pairs = [(other_rank(share.step, self.every, rank, world.size), rank) for rank in range(world.size)]
        if self.noise is not None:
            return self._check_with_noise(inside, pending, pairs)
        wrong = [pair for pair in pairs if rows[pair[0]].own != rows[pair[1]].other]
        strict = self.run.config.compute.deterministic or (world.device.type == "cpu" and 2 * len(itself) < world.size)
        if itself and is_first and not strict:
            self._let_round(inside, pending)
            return False
        if not (wrong := wrong or [(rank, rank) for rank in itself]):
            return True
        owner, recomputer = wrong[0]
        one, two = rows[owner].own, rows[recomputer].other
        if owner == recomputer and world.size > 1:  # it differs from itself: its result from before the step
            twice, device = pending.again, world.device
            again = [*twice.loss(device).tolist(), *twice.gradient(device).tolist()] if twice else []
            two = (*one[:2], *of_all(self.run.world, again)[owner])
        found, of_owner = [bare(of[2:], of[:2]) for of in (one, two)], dataclasses.replace(share, rank=owner)
        return self._resolve(inside, pending, Dispute(of_owner, recomputer, *found))

    def _resolve(self, inside: Inside, pending: _Pending, dispute: Dispute) -> bool:
        self._judge(inside, self.updates.now(inside))  # a wrong weight comes before a wrong computation with it
        self._compare_replicas(inside, pending.step, at=pending.step + 1)
        with torch.no_grad():
            for buffer, value in pending.buffers:  # as before the step
                if buffer.shape == value.shape:
                    buffer.data.copy_(value)
        experiments = MicroBatchExperiments(self.run, pending.leaves, pending.micro_batch, self.noise)
        verdict = experiments.verdict(dispute)
        if verdict is not None:
            facts = {"dispute": dispute, "repeats": experiments.repeats}
            self._fire(pending.step + 1, self._with_code(inside, verdict), experiments.micro_batch, facts)
        if self.noise is None:
            self._let_round(inside, pending)
        return False

    def _let_round(self, inside: Inside, pending: _Pending) -> None:
        """From now on, compare results within what rounding explains."""
        self.noise = Noise()
        experiments = MicroBatchExperiments(self.run, pending.leaves, pending.micro_batch, self.noise)
        share = dataclasses.replace(_share(pending), rank=0)
        name = experiments.unstable_operation(share)
        inside.tell(
            f"warning: step {pending.step + 1}: a micro-batch has a different loss or gradient when recomputed"
            f"{f', first in {name}' if name else ''}: the model or its kernels are not deterministic. From here on, "
            "the watch compares up to rounding; compute.deterministic=true compares bits"
        )

    def _check_with_noise(self, inside: Inside, pending: _Pending, pairs: Sequence[tuple[int, int]]) -> bool:
        noise = self.noise
        assert noise is not None
        assert pending.own is not None
        assert pending.other is not None
        batch, other_batch = pending.batch.tolist(), pending.other_batch.tolist()
        own = dataclasses.replace(pending.own.detailed(), batch=(batch[0], batch[1]))
        other = dataclasses.replace(pending.other.detailed(), batch=(other_batch[0], other_batch[1]))
        again = pending.again.detailed() if pending.again is not None else other
        world = self.run.world
        found: list[tuple[Detail, Detail, Detail]] = of_all(world, (own, other, again))
        is_known = bool(noise.relative)
        for mine, _, twice in found:
            noise.add(mine, twice)
        if noise.of_loss > ROUNDING and not is_known:
            what = f"a loss computed again differs by {noise.of_loss:.0%}: it draws unseeded numbers"
            inside.tell(f"warning: step {pending.step + 1}: {what}, or its terms cancel. No check of this run counts")
        for owner, recomputer in pairs:
            one, two = found[owner][0], found[recomputer][1]
            if one.batch != two.batch or not noise.same(one, two):
                dispute = Dispute(dataclasses.replace(_share(pending), rank=owner), recomputer, one, two)
                return self._resolve(inside, pending, dispute)
        return is_known and noise.of_loss <= ROUNDING

    def _check_exchange(self, inside: Inside, pending: _Pending, rows: Sequence[_Row]) -> None:
        """Compare the gradients after the exchange: replicas with each other, and all with the ranks' inputs."""
        state, own, shards = inside.state, pending.own, [row.shard for row in rows]
        before = "gradients were correct before the exchange, because another rank computed them again"
        if different := differing_replicas(shards, [row.reduced for row in rows]):
            if len(different) == shards.count(shards[0]) == len(shards):  # no majority
                different = self._not_the_mean(inside, pending) or different
            self._link(inside, pending, different, f"{before}, and differ afterwards on {named(different)}", "")
        if own is None or not pending.summed or not self.sees_exchange:
            return
        count = len(set(shards))
        reduced_in = self.run.config.parallel.reduce_dtype if count > 1 else None
        replicas, micro_batches = state.world.size // count, self.run.plan.count(pending.step)
        mine = pending.summed[shards[: inside.rank].count(self.replicas.shard) :: replicas]
        found = exchange.check(state, own, pending.summed, mine, micro_batches, reduced_in)
        if not found.name:
            return
        given: list[Tensor] = []
        leaf: Any = pending.leaves[found.name]
        handle = leaf.register_hook(lambda gradient: given.append(gradient.detach().clone()))
        trial(state, dataclasses.replace(pending.micro_batch), _share(pending), pending.leaves)
        handle.remove()
        gradient = given[0] if given else None
        is_one = self.run.plan.count(pending.step) == 1  # with accumulation, a trial is not the rank's whole input
        wrong = exchange.wrong_shards(state, found, gradient, count, shards[state.world.rank]) if is_one else []
        text = f"{before}. Afterwards the gradient of {found.name} is not the mean of the ranks' gradients"
        self._link(inside, pending, wrong, f"{text}{f', on {named(wrong)}' if wrong else ''}", found.name)

    def _not_the_mean(self, inside: Inside, pending: _Pending) -> list[int]:
        """Of replicas whose reduced gradients differ, those that do not have the mean of all ranks, as far as known."""
        state, own, names = inside.state, pending.own, pending.summed
        micro_batches = self.run.plan.count(pending.step)
        if own is not None and micro_batches == 1:
            micro_batch, names = dataclasses.replace(pending.micro_batch), sorted(pending.leaves)
            own = trial(state, micro_batch, _share(pending), pending.leaves, detailed=True)
        if own is None or not self.sees_exchange:
            return []
        return [
            rank
            for rank in range(inside.ranks)
            if exchange.check(state, own, names, names if rank == inside.rank else [], micro_batches, None).name
        ]

    def _link(self, inside: Inside, pending: _Pending, ranks: Sequence[int], text: str, name: str) -> None:
        self._judge(inside, self.updates.now(inside))  # a gradient that changed afterwards is not the link's fault
        sure = 0 < len(ranks) < self.run.world.size
        verdict = Verdict("link", tuple(ranks), text, name, guilty=tuple(ranks) if sure else ())
        self._fire(pending.step + 1, verdict, pending.micro_batch, {})

    def _fire(self, step: int, verdict: Verdict, micro_batch: MicroBatch | None, facts: Mapping[str, Any]) -> None:
        where = evidence.write(self.run, step, micro_batch, facts, verdict)
        remedies = {
            "device": "take this machine out, and run its vendor's diagnostics",
            "memory": "take this machine out, and run its vendor's diagnostics",
            "link": "check the error counters of this link, and take the machine out if it happens again",
            "code": "make Task, model and Parts behave the same on all ranks; lockstep verify finds more",
            "not deterministic": "compute.deterministic=true names the kernels; lockstep verify finds more",
            "unclear": "if Parts are named, start without them; otherwise start three ranks, or replace one of the "
            "machines; lockstep doctor check-device tests each",
            "data": "make all ranks read the same bytes, and draw only from generators that Lockstep seeds",
        }
        error = WatchError(
            f"{verdict.kind}: {verdict.text}. {evidence.so_far(self.run, self.passed, step)}. Nothing is saved{where}",
            where=f"step {step}, watch.every={self.every}",
            remedy=remedies[verdict.kind],
        )
        error.guilty = verdict.guilty
        self.tell(f"the watch ends the run at step {step}: {verdict.kind}: {verdict.text}{where}")
        raise error


def _share(pending: _Pending) -> Share:
    assert pending.share is not None
    return pending.share


def _extra_plans(plan: StepPlan, due: Due, rank: int) -> Callable[[int], Sequence[MicroBatchPlan]]:
    # A function that does not hold the run: the run holds it, and a cycle would be freed late.
    def plans(step: int) -> Sequence[MicroBatchPlan]:
        return plan.rank_micro_batches(step, other_rank(step, due.every, rank, plan.world))[:1] if due(step) else ()

    return plans


def _why_no_recomputation(run: Run) -> str:
    """Why shares cannot be computed again; empty if they can, or if it is not wanted."""
    if not run.config.watch.recompute:
        return "watch.recompute=false"
    if run.task.players:
        return "optimizers alternate, so a loss depends on earlier updates in the same step"
    if needs_global_batch(run.task):
        return "the loss needs the samples of all ranks at once"
    if run.config.compute.uses_cuda_graphs:
        return "CUDA graphs write gradients into memory that their next run overwrites"
    return ""
