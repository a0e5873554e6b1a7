"""The update of rows that only one rank holds: it is repeated outside training, and no row may change but by it.

The optimizer's result for a parameter is compared with what the same class computes from copies of the parameter, its
gradient and its state. Parameters take turns from check to check, and are copied one at a time. All ranks update the
same rows of rank 0. During a checked step, rows must not change before the update, and gradients must not change after
their exchange. The rows whose update was repeated must not change until the next update.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _default_to_fused_or_foreach  # private; a test trains with each class

from lockstep.core import optimizer_class
from lockstep.core.build import Run
from lockstep.core.built_in import Inside
from lockstep.core.parallel.sharded_tensor import local
from lockstep.parts.digest import fold, piece_length, quick_sums
from lockstep.watch.examine import judged_device
from lockstep.watch.gradients import bare
from lockstep.watch.resting import Key, Resting
from lockstep.watch.state import TURNS, gathered, in_turn, of_all
from lockstep.watch.verdict import Verdict, named, same_bits, who

_SAMPLE = 1 << 16
"""Elements of rank 0 that all ranks update."""
Values = dict[str, Any]
"""A parameter, its gradient, and the optimizer's state for it, by name."""
WEIGHT, GRADIENT = "weight", "gradient"
Place = tuple[str, int, int, Any]
"""A trained parameter: its name, the number of its optimizer, of its group there, and the parameter."""
Finding = tuple[str, str, str]
"""The name of a parameter, what is wrong of it, and how."""
Sample = tuple[str, int, int, Values, set[str]]
"""Rows of rank 0: name, member, group, values, and what stays in host memory."""


def made(optimizer: torch.optim.Optimizer, group: int, values: Values) -> dict[str, Tensor]:
    """What an update makes of `values`, which it changes in place. The optimizer itself is unchanged.

    Args:
        optimizer: of `torch.optim`. The update has its class and options. Hooks are not called.
        group: number of the group whose options apply.
    """
    options, parameter = optimizer.param_groups[group], nn.Parameter(values[WEIGHT])
    parameter.grad = values[GRADIENT]
    others = [one for one in options["params"] if one.grad is not None]
    more = {}
    if options.get("foreach") is None and not _default_to_fused_or_foreach(others, False)[1]:
        more = {"foreach": False}  # as for all parameters of the group, which may be sharded
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__ = vars(optimizer) | {"param_groups": [{**options, **more, "params": [parameter]}]}
    shadow.state = defaultdict(dict, {parameter: {k: v for k, v in values.items() if k not in (WEIGHT, GRADIENT)}})
    step: Any = type(optimizer).step
    step.__wrapped__(shadow)  # without the hooks that torch wraps around it
    return _tensors({WEIGHT: parameter.detach(), **shadow.state[parameter]})


class Updates:
    """Repeats the update of a check, and watches its rows until the next update. All ranks make the same calls."""

    def __init__(self, run: Run, *, is_on: bool) -> None:
        self.run, self.world = run, run.world
        self.members = optimizer_class.members(run.state.optimizer)
        names = {id(parameter): name for name, parameter in run.model.named_parameters()}
        self.places: list[Place] = [
            (names.get(id(parameter), f"an unnamed parameter ({number}.{place})"), member, number, parameter)
            for member, optimizer in enumerate(self.members)
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
        self.why_not = "" if is_on else "it is switched off"
        self.checked: deque[int | None] = deque(maxlen=TURNS)
        """`Run.checked_step` before the last checks, which cover all updates together."""
        self.checks = 0
        """The number of checks that examined an update. Others had none, because it was skipped."""
        self.handles: list[Any] = []
        """Hooks during a check."""
        self.looked: list[Place] = []
        """The parameters whose update the last check repeats."""
        self.expected: list[Tensor] | None = None
        """What the update must make of it: digests. None: there was no update."""
        self.sample: Sample | None = None
        self.answer: list[int] = []
        """The digest of this rank's result for the sample."""
        self.resting = Resting()
        self.rests = self.has_rested = False
        """Whether rows are kept since an update; and whether such an interval was examined before."""

    def begin(self, inside: Inside) -> None:
        """Examine the step that begins, before the check computes anything."""
        self.expected = None
        optimizer, checked = self.run.state.optimizer, self.run.checked_step
        if not self.why_not and (why := _why_not(optimizer)):
            self.why_not = why
            inside.tell(f"note: the watch does not check updates: {why}")
        if self.why_not:
            return
        with inside.window.excluded():
            self.resting.look(rows := self._rows(self.places))
            self.resting.keep(rows)
        trained = [(name, parameter) for name, *_, parameter in self.places if parameter.requires_grad]
        self.handles = [
            optimizer.register_step_pre_hook(partial(self._make_again, inside, checked)),
            optimizer.register_step_post_hook(self._updated),
            *(one.register_post_accumulate_grad_hook(partial(self._reduced, name)) for name, one in trained),
        ]
        inside.state.changing_gradients = self._changing_gradients

    def _reduced(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.resting.keep({(name, GRADIENT): parameter.grad})

    @contextlib.contextmanager
    def _changing_gradients(self) -> Generator[None, None, None]:
        self.resting.look(self._gradients())
        yield
        self.resting.keep(self._gradients())

    def _updated(self, *_: object) -> None:
        self.resting.look(self._gradients())

    def _gradients(self) -> dict[Key, Tensor]:
        return {(name, GRADIENT): of.grad for name, *_, of in self.places if of.grad is not None}

    def _rows(self, places: Sequence[Place]) -> dict[Key, Tensor]:
        """Parameters and their state."""
        found: dict[Key, Tensor] = {}
        for name, member, _, parameter in places:
            values = {**self.members[member].state.get(parameter, {}), WEIGHT: parameter}
            found |= {(name, key): value for key, value in _tensors(values).items()}
        return found

    def _make_again(self, inside: Inside, checked: int | None, *_: object) -> None:
        self.checked.append(checked)
        check, self.checks = self.checks, self.checks + 1
        with inside.window.excluded(), torch.no_grad():
            self.resting.look(self._rows(self.places) | self._gradients())
            names = in_turn({one[0]: one[-1] for one in self.places}, check)
            looked = [one for one in self.places if one[0] in names and one[-1].grad is not None]
            self.looked = [one for one in looked if local(one[-1]).numel()]
            self.expected = [self._made_again(one) for one in self.looked]
            if self.world.size > 1:
                self.sample = self.world.broadcast(self._taken(check // TURNS) if self.world.rank == 0 else None)
                self.answer = self._answered()

    def _made_again(self, one: Place) -> Tensor:
        """The digest of what its update makes of copies of pieces, which are released."""
        values = self._values(one)
        size, is_whole = values[WEIGHT].numel(), not all(each.is_contiguous() for each in _tensors(values).values())
        length = size if is_whole else piece_length(values[WEIGHT].device)
        found: dict[str, list[Tensor]] = {}
        for first in range(0, size, length):
            copies = _cut(values, first, length)
            for key, value in made(self.members[one[1]], one[2], copies).items():
                if first == 0 or value.shape == copies[WEIGHT].shape:
                    found.setdefault(key, []).append(quick_sums(value))
        return fold({key: torch.cat(of) for key, of in found.items()})

    @torch.no_grad()  # so that `to_local` is a look-up
    def _values(self, one: Place) -> Values:
        """The rows of this rank and their state, in place."""
        _, member, _, parameter = one
        found = {GRADIENT: parameter.grad, **self.members[member].state.get(parameter, {})}
        kept = {key: local(value) if isinstance(value, Tensor) else value for key, value in found.items()}
        return kept | {WEIGHT: local(parameter).detach()}

    def _taken(self, number: int) -> Sample | None:
        """Rows of this rank, different ones at each check."""
        if not self.looked:
            return None
        turn, place = divmod(number, len(self.looked))
        values = self._values(self.looked[place])
        first = turn * _SAMPLE % values[WEIGHT].numel()
        on_host = {key for key, value in _tensors(values).items() if value.device.type == "cpu"}
        return *self.looked[place][:3], _cut(values, first, _SAMPLE), on_host

    def _answered(self) -> list[int]:
        """The digest of this rank's result for the sample."""
        if self.sample is None:
            return [0, 0]
        _, member, group, values, on_host = self.sample
        copies = {key: _copy(value, "cpu" if key in on_host else self.world.device) for key, value in values.items()}
        return fold(made(self.members[member], group, copies)).tolist()

    def end(self, inside: Inside) -> Verdict | None:
        """After a step: the verdict on it, if it was examined. None: it is correct."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.remove()
        inside.state.changing_gradients = contextlib.nullcontext
        if not handles or self.why_not:
            return None
        wrong = self._changed()
        self.resting.kept.clear()
        if self.expected is None:
            return None
        is_first, self.has_rested, self.rests = bool(wrong) and not self.has_rested, self.has_rested or self.rests, True
        with inside.window.excluded():
            self.resting.keep(self._rows(self.looked))
            pairs = zip([self._kept(one) for one in self.looked], self.expected, strict=True)
            flags = [(kept != other).any().to(self.world.device) for kept, other in pairs]
            found = zip(self.looked, torch.stack(flags).tolist() if flags else [], strict=True)
        wrong += [(one[0], "rows", "differ from a repetition of their update") for one, is_so in found if is_so]
        rows = gathered(self.world, [int(bool(wrong)), *self.answer])
        verdict = self._judged(inside, [row[0] for row in rows], wrong, is_first)
        return verdict or self._judged_by_sample([row[1:] for row in rows])

    def at_rest(self, inside: Inside) -> Verdict | None:
        """Before an update: the verdict on rows that have changed since the last one. None: none have.

        A check examines them later, unless it must know now.
        """
        if not self.rests or self.handles:
            return None
        verdict, self.rests = self.now(inside), False
        self.resting.kept.clear()
        return verdict

    def now(self, inside: Inside) -> Verdict | None:
        """The verdict on what has changed in memory so far. None: nothing has, or nothing is examined."""
        if not self.rests and not self.handles:
            return None
        is_first, self.has_rested = not self.has_rested, self.has_rested or self.rests
        with inside.window.excluded():
            self.resting.look(self._rows(self.places) | self._gradients())
            wrong = self._changed()
        found = gathered(self.world, [int(bool(wrong))])
        return self._judged(inside, [row[0] for row in found], wrong, is_first)

    def _kept(self, one: Place) -> Tensor:
        """The digest of what is kept of a parameter."""
        return fold({key: self.resting.kept[name, key][2] for name, key in sorted(self._rows([one]))})

    def _changed(self) -> list[Finding]:
        found = sorted(self.resting.changed(self.world.device), key=lambda key: key[1] != GRADIENT)
        what = {True: ("gradients", "since the backward pass"), False: ("rows", "since the last update")}
        return [(name, what[key == GRADIENT][0], f"have changed {what[key == GRADIENT][1]}") for name, key in found]

    def _judged(
        self, inside: Inside, found: Sequence[int], wrong: Sequence[Finding], is_first: bool = False
    ) -> Verdict | None:
        """The verdict if ranks have wrong rows.

        Args:
            found: by rank, whether it has some.
            wrong: those of this rank.
            is_first: it was never correct before. On a single rank, code is to blame then.
        """
        ranks = tuple(rank for rank, has_some in enumerate(found) if has_some)
        if not ranks:
            return None
        of_ranks: list[list[Finding]] = of_all(self.world, list(wrong))
        held = [one[0] for one in self.places if local(one[-1]).numel()]
        count = most_holders([[name for name, *_ in of] for of in of_ranks], of_all(self.world, held))
        name, subject, what = of_ranks[ranks[0]][0]
        if all(kind == "gradients" for of in of_ranks for _, kind, _ in of):
            self.checked.clear()  # earlier checks compared all gradients of their steps, and count
        if count > 1 or (len(ranks) == self.world.size and (self.world.size > 1 or is_first)):
            self.why_not = f"on each rank, {subject} {what}: code outside the optimizer changes them"
            self.resting, self.rests = Resting(), False
            inside.tell(f"warning: step {inside.step}: the watch no longer checks updates: {self.why_not}")
            return None
        of = "; ".join(f"{of_ranks[rank][0][1]} of {of_ranks[rank][0][0]} on rank {rank}" for rank in ranks)
        more = ", unless code writes weights outside the optimizer, through .data" if count else ""
        text = f"{of} {what}: the memory or the device of {named(ranks)}{more}"
        return Verdict("memory", ranks, text, name, guilty=ranks)

    def _judged_by_sample(self, answers: Sequence[Sequence[int]]) -> Verdict | None:
        """The verdict if ranks compute different rows from the same inputs."""
        if self.sample is None or all(one == answers[0] for one in answers):
            return None
        repeats = of_all(self.world, (bare(self._answered()), bare(self._answered())))
        found = who([(rank, bare(one)) for rank, one in enumerate(answers)], repeats, same_bits)
        return judged_device(self.world, found, f"the update of {self.sample[0]}")


def most_holders(wrong: Sequence[Sequence[str]], held: Sequence[Sequence[str]]) -> int:
    """How many ranks hold a parameter, if it is wrong on all ranks that hold rows of it.

    If that is more than one, code is to blame, and not a device. 0: it is correct on other ranks.

    Args:
        wrong: by rank, the names of the parameters with wrong rows.
        held: by rank, the names of the parameters whose rows it holds.
    """
    names = {name for of in wrong for name in of}
    holders = {name: [rank for rank, of in enumerate(held) if name in of] for name in names}
    if any(name not in wrong[rank] for name, ranks in holders.items() for rank in ranks):
        return 0
    return max(map(len, holders.values()), default=0)


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why updates are not repeated; empty if they are."""
    members, kinds = optimizer_class.members(optimizer), optimizer_class.classes(optimizer)
    if not optimizer_class.is_of_torch(optimizer):
        return f"{kinds} is not a class of torch.optim"
    if any(type(member).__name__ in optimizer_class.NEED_WHOLE_MATRICES for member in members):
        return f"{kinds} does not update elements independently"
    if any(not _steps_as_its_class(member) for member in members):
        return "code has replaced the optimizer's step"
    hooks = [hook for one in {optimizer, *members} for hook in one._optimizer_step_post_hooks.values()]
    return "" if all(map(is_of_engine, hooks)) else "the optimizer has hooks after its step"


def is_of_engine(hook: Any) -> bool:
    """Whether a hook is code of Lockstep. A `functools.partial` is judged by its function."""
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("lockstep.")


def _steps_as_its_class(member: Any) -> bool:
    step = member.step
    if getattr(step, "_wrapped_by_lr_sched", False):  # a torch scheduler counts the calls
        step = step.__wrapped__
    return getattr(step, "__func__", step) is type(member).step


def _cut(values: Values, first: int, length: int) -> Values:
    """A copy of this many elements from the first on. All of it if it is smaller, or shared by the parameter."""
    shape = values[WEIGHT].shape
    is_part = shape.numel() > length
    return {
        key: _copy(value.reshape(-1)[first : first + length])
        if is_part and isinstance(value, Tensor) and value.shape == shape
        else _copy(value)
        for key, value in values.items()
    }


def _copy(value: Any, device: torch.device | str | None = None) -> Any:
    return value.detach().to(device or value.device, copy=True) if isinstance(value, Tensor) else value


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: one for key, one in sorted(values.items()) if isinstance(one, Tensor)}
