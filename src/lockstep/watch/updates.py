"""The update of rows that one rank holds alone: it is made a second time beside the training, and its rows must rest.

What the optimizer makes of a parameter is compared with what the same class makes of copies of the parameter, its
gradient and its state. Until the next update, the rows must not change. And all ranks update the same rows of rank 0.
Parameters take turns from check to check, and are copied one at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _default_to_fused_or_foreach  # private; a test trains with each class

from lockstep.core import optimizer_class
from lockstep.core.build import Run
from lockstep.core.built_in import Inside
from lockstep.core.errors import UsageError
from lockstep.core.parallel.sharded_tensor import local
from lockstep.launch.device_check.run import wrong_answers
from lockstep.parts.digest import fold
from lockstep.watch.examine import judged_device
from lockstep.watch.gradients import Detail
from lockstep.watch.state import gathered
from lockstep.watch.verdict import Verdict, named, same_bits, who

TURNS = 2
"""So many checks look at all parameters."""
_SAMPLE = 1 << 16
"""Elements of rank 0 that all ranks update."""
Values = dict[str, Any]
"""A parameter under `WEIGHT`, and what the optimizer keeps for it."""
WEIGHT, GRADIENT = "weight", "gradient"


@dataclass(frozen=True)
class _Held:
    """A parameter that is trained, and the rows of it on this rank."""

    name: str
    optimizer: torch.optim.Optimizer
    group: int
    """Number of its group."""
    parameter: Any

    def values(self) -> Values:
        """The rows and their state, in the memory in which they are."""
        with torch.no_grad():  # so that `to_local` is a look-up
            state = self.optimizer.state.get(self.parameter, {})
            found = {key: local(one) if isinstance(one, Tensor) else one for key, one in state.items()}
            return {WEIGHT: local(self.parameter).detach(), **found}


def made(
    optimizer: torch.optim.Optimizer, group: int, values: Mapping[str, Any], gradient: Tensor
) -> dict[str, Tensor]:
    """What an update makes of `values`, which it changes in place. The optimizer itself stays as it is.

    Args:
        optimizer: a class of `torch.optim`, whose class and options the update has. Hooks are not called.
        group: number of the group whose options count.
    """
    options, parameter = optimizer.param_groups[group], nn.Parameter(values[WEIGHT])
    parameter.grad = gradient
    others = [one for one in options["params"] if one.grad is not None]
    more = {}
    if options.get("foreach") is None and not _default_to_fused_or_foreach(others, False)[1]:
        more = {"foreach": False}  # as for all parameters of the group, of which one may be sharded
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__ = vars(optimizer) | {"param_groups": [{**options, **more, "params": [parameter]}]}
    shadow.state = defaultdict(dict, {parameter: {key: one for key, one in values.items() if key != WEIGHT}})
    step: Any = type(optimizer).step
    step.__wrapped__(shadow)  # without the hooks that torch wraps around it
    return _tensors({WEIGHT: parameter.detach(), **shadow.state[parameter]})


@dataclass(frozen=True)
class _Sample:
    """Rows of rank 0, which all ranks update."""

    name: str
    member: int
    group: int
    values: Values
    on_host: set[str]
    """What stays in the memory of the host on rank 0."""


class Updates:
    """Makes the update of a check again, and looks at its rows until the next update. All ranks call it alike."""

    def __init__(self, run: Run, every: int) -> None:
        self.run, self.every, self.world = run, every, run.world
        self.members = optimizer_class.members(run.state.optimizer)
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        held = [
            _Held(names[id(parameter)], member, number, parameter)
            for member in self.members
            for number, group in enumerate(member.param_groups)
            for parameter in group["params"]
        ]
        self.turns: list[list[_Held]] = [[] for _ in range(TURNS)]
        sizes = [0] * TURNS
        for one in sorted(held, key=lambda one: -one.parameter.numel()):
            turn = sizes.index(min(sizes))
            self.turns[turn].append(one)
            sizes[turn] += one.parameter.numel()
        self.why_not = ""
        self.handle: Any = None
        self.looked: list[_Held] = []
        """What the last check looks at."""
        self.expected: list[Tensor] | None = None
        """What the update must make of it: digests. None: there was no update."""
        self.sample: _Sample | None = None
        self.answer: Tensor | None = None
        """The digest of what this rank has made of the sample."""
        self.rest: list[list[int]] | None = None
        """Digests of the rows that must not change until the next update. None: nothing is looked at."""
        self.versions: list[list[int]] = []

    def begin(self, inside: Inside) -> None:
        """Look at the update of the step that begins, after all that changes its gradients."""
        why_not, self.expected, self.rest = self.why_not or _why_not(self.run), None, None
        if why_not:
            if not self.why_not:
                inside.tell(f"note: the watch does not look at updates: {why_not}")
            self.why_not = why_not
            return
        number, turn = divmod(inside.step // self.every, TURNS)
        optimizer = self.run.state.optimizer
        self.handle = optimizer.register_step_pre_hook(lambda *_: self._make_again(inside, self.turns[turn], number))

    def _make_again(self, inside: Inside, turn: Sequence[_Held], number: int) -> None:
        with inside.window.excluded(), torch.no_grad():
            self.looked = [one for one in turn if one.parameter.grad is not None and local(one.parameter).numel()]
            self.expected = []
            for one in self.looked:
                copies = {key: _copy(value) for key, value in one.values().items()}
                self.expected.append(fold(made(one.optimizer, one.group, copies, _copy(local(one.parameter.grad)))))
            if self.world.size > 1:
                self.sample = self.world.broadcast(self._taken(number) if self.world.rank == 0 else None)
                self.answer = self._answered()

    def _taken(self, number: int) -> _Sample | None:
        """Rows of this rank, others at each check."""
        if not self.looked:
            return None
        turn, place = divmod(number, len(self.looked))
        one = self.looked[place]
        rows = local(one.parameter)
        first = turn * _SAMPLE % rows.numel()
        values = {GRADIENT: local(one.parameter.grad), **one.values()}
        parts = {key: _part(value, rows.shape, first) for key, value in values.items()}
        on_host = {key for key, value in values.items() if isinstance(value, Tensor) and value.device.type == "cpu"}
        return _Sample(one.name, self.members.index(one.optimizer), one.group, parts, on_host)

    def _answered(self) -> Tensor:
        """The digest of what this rank makes of the sample."""
        if self.sample is None:
            return torch.zeros(2, dtype=torch.int64)
        host, sample = torch.device("cpu"), self.sample
        on = {key: host if key in sample.on_host else self.world.device for key in sample.values}
        values = {key: _copy(value, on[key]) for key, value in sample.values.items()}
        gradient = values.pop(GRADIENT)
        return fold(made(self.members[sample.member], sample.group, values, gradient))

    def end(self, inside: Inside) -> Verdict | None:
        """After a step: the verdict on its update, if it was looked at. None: it is right."""
        if self.handle is None:
            return None
        self.handle.remove()
        self.handle = None
        if self.expected is None:
            return None
        self.rest, self.versions = self._now()
        wrong = _first_difference(self.rest, _on_host(self.expected))
        answer = [] if self.answer is None else self.answer.tolist()
        rows = gathered(self.world, [wrong, *answer])
        verdict = self._judged(inside, [row[0] for row in rows], "are not what its update makes of them again")
        return verdict or self._judged_by_sample([row[1:] for row in rows])

    def at_rest(self, inside: Inside) -> Verdict | None:
        """Before an update: the verdict on rows that have changed since the last. None: none has."""
        before, self.rest = self.rest, None
        if before is None:
            return None
        now, versions = self._now()
        for one, known, new, old in zip(now, before, versions, self.versions, strict=True):
            one[:] = known if new != old else one  # torch counts what operations write, such as a clipped embedding
        wrong = _first_difference(now, before)
        found = [row[0] for row in gathered(self.world, [wrong])]
        return self._judged(inside, found, "have changed since the last update")

    def _now(self) -> tuple[list[list[int]], list[list[int]]]:
        """The digests of what is looked at, and how often operations of torch have written it."""
        values = [_tensors(one.values()) for one in self.looked]
        return _on_host([fold(of) for of in values]), [[one._version for one in of.values()] for of in values]

    def _judged(self, inside: Inside, wrong: Sequence[int], what: str) -> Verdict | None:
        """The verdict, where ranks have a row that is wrong: its number, or -1."""
        ranks = tuple(rank for rank, number in enumerate(wrong) if number >= 0)
        if not ranks:
            return None
        own = wrong[self.world.rank]
        names = self.world.broadcast(self.world.gather(self.looked[own].name if own >= 0 else ""))
        of = "; ".join(f"rows of {names[rank]} on rank {rank}" for rank in ranks)
        if 1 < len(ranks) == self.world.size:
            self.why_not, self.rest = (
                f"on all ranks, rows {what}, so that code outside of the optimizer changes them",
                None,
            )
            inside.tell(f"warning: step {inside.step}: the watch does not look at updates any more: {self.why_not}")
            return None
        wrongs = self.world.broadcast(self.world.gather(wrong_answers(self.world.device)))
        known = "; ".join(f"rank {rank} also gets {', '.join(wrongs[rank])} wrong" for rank in ranks if wrongs[rank])
        more = "" if self.world.size > 1 else ", unless code writes weights outside of the optimizer, through .data"
        text = f"{of} {what}: the memory or the device of {named(ranks)}{more}{f'. {known}' if known else ''}"
        return Verdict("device" if known else "memory", ranks, text, names[ranks[0]], guilty=ranks)

    def _judged_by_sample(self, answers: Sequence[Sequence[int]]) -> Verdict | None:
        """The verdict, where ranks make different rows of the same."""
        if self.sample is None or all(one == answers[0] for one in answers):
            return None
        own = [self._answered().tolist() for _ in range(2)]
        repeats = [(_detail(a), _detail(b)) for a, b in self.world.broadcast(self.world.gather(own))]
        found = who([(rank, _detail(one)) for rank, one in enumerate(answers)], repeats, same_bits)
        return judged_device(self.run.world, found, f"the update of {self.sample.name}")


def _why_not(run: Run) -> str:
    """Why updates are not made again; empty where they are."""
    optimizer, members = run.state.optimizer, optimizer_class.members(run.state.optimizer)
    classes = optimizer_class.classes(optimizer)
    if not optimizer_class.is_of_torch(optimizer):
        return f"{classes} is no class of torch.optim"
    try:
        for member in members:
            optimizer_class.check_shardable(member)
    except UsageError:
        return f"{classes} does not update each element by itself"
    hooks = [hook for one in {optimizer, *members} for hook in one._optimizer_step_post_hooks.values()]
    if not all(getattr(hook, "__module__", "").startswith("lockstep.") for hook in hooks):
        return "the optimizer has hooks after it"
    return ""


def _copy(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device or value.device, copy=True) if isinstance(value, Tensor) else value


def _part(value: Any, shape: torch.Size, first: int) -> Any:
    is_cut = isinstance(value, Tensor) and value.shape == shape
    return value.reshape(-1)[first : first + _SAMPLE].clone() if is_cut else _copy(value)


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: one for key, one in sorted(values.items()) if isinstance(one, Tensor)}


def _on_host(folded: Sequence[Tensor]) -> list[list[int]]:
    """Digests on the host, which waits once."""
    found: list[list[int]] = torch.stack(list(folded)).tolist() if folded else []
    return found


def _first_difference(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """The number of the first digest that differs, or -1."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), -1)


def _detail(numbers: Sequence[int]) -> Detail:
    return Detail({}, {}, {}, {}, folded=tuple(numbers))
