"""Alternating updates: players of a task, each with its own parameters and loss, update one after the other.

A step of training consumes one global batch. Each player whose turn it is makes an update with it: a whole exact step,
`step.exact_step`, with its own parameters and loss. The losses of later players see the updates of earlier ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import keywords
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.loader import MicroBatch
from lockstep.core.data.order import derive_seed
from lockstep.core.errors import TrainingError, UsageError, listed
from lockstep.core.parallel.factory import make_strategy
from lockstep.core.parallel.strategy import Forward, Losses
from lockstep.core.parameter_names import matches, names_of_parameters
from lockstep.core.step import Call, StepResult, TrainState, driven, exact_step
from lockstep.core.task import Batch, Task, needs_global_batch


@keywords.of_class
@dataclass(frozen=True)
class Player:
    """Some parameters of the model, and the loss that they lower."""

    name: str
    """The loss is the task's method `<name>_loss(model, batch)`: the SUM over the units that `weight` counts. The log
    and evaluations call this loss `<name>`."""
    match: str | Sequence[str]
    """Patterns of names of parameters, with `*` and `?`. A tied parameter goes by all its names."""
    every: int = 1
    """It updates once in this many steps."""
    updates: int = 1
    """Updates in such a step, all with the same global batch."""

    def owns(self, names: Iterable[str]) -> bool:
        """True if a pattern matches one of the names of a parameter."""
        return matches(names, [self.match] if isinstance(self.match, str) else self.match)


@keywords.of_class
@dataclass(frozen=True)
class Follower:
    """A part of the model that follows another part as a moving average, such as a teacher that follows its student.

    After each step, each parameter becomes decay * itself + (1 - decay) * its leader. It has no gradient.
    """

    match: str
    """Prefix of the names of its parameters, such as `teacher.`."""
    of: str
    """Prefix of the names of the parameters that they follow, such as `student.`. The rest of the names is the same."""
    decay: float


class AlternatingTask(Task):
    """A task whose players update in turn: a generator and a discriminator, an actor and a critic.

    Instead of `loss`, write a method `<name>_loss(model, batch)` for each player, which returns the SUM of its loss
    over the units: a scalar tensor. `weight` returns None (the unit is the sample) or a dict by player. Evaluations
    have the losses of all players.
    """

    players: Sequence[Player] = ()
    """In the order in which they update. Each trainable parameter belongs to one of them."""
    followers: Sequence[Follower] = ()

    def loss(self, model: nn.Module, batch: Batch) -> Losses:
        return {player.name: self.loss_of(player.name, model, batch) for player in self.players}

    def loss_of(self, name: str, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a player."""
        found: Tensor = getattr(self, f"{name}_loss")(model, batch)
        return found


@dataclass
class Turns:
    """The players of a training on this rank."""

    states: list[tuple[Player, TrainState]]
    """Each player, with a state that has the player's own strategy. Everything else belongs to the whole training."""
    followers: list[tuple[list[Tensor], list[Tensor], float]]
    """Parameters, those that they follow, and the decay."""

    def step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch], samples: int, *, want_norm: bool = False
    ) -> StepResult:
        """Consume one global batch: the updates of all players whose turn it is. For the arguments, see `train_step`.

        Args:
            state: of the whole training.
        """
        whole = self.begin(state, samples)
        for place, (player, _) in enumerate(self.states):
            for number in range(player.updates if state.step % player.every == 0 else 0):
                turn = self.turn(state, micro_batches, whole, place=place, number=number, want_norm=want_norm)
                driven(turn, lambda micro_batch: None)
        self.end(state, whole)
        return whole

    def begin(self, state: TrainState, samples: int) -> StepResult:
        """Begin a step of `samples` samples. Returns its result, to which the turns of players add."""
        whole = StepResult(state.step, samples, totals={player.name: 0.0 for player, _ in self.states})
        state.step += 1
        return whole

    def turn(
        self,
        state: TrainState,
        micro_batches: Sequence[MicroBatch],
        whole: StepResult,
        *,
        place: int,
        number: int,
        want_norm: bool,
        counts_late: bool = False,
    ) -> Generator[MicroBatch | None, Call | None, None]:
        """One update of a player, which is driven as `exact_step` is.

        Args:
            place: of the player in `states`.
            number: of the update in this step, from 0.
            want_norm, counts_late: see `exact_step`.
        """
        player, own = self.states[place]
        own.step, own.skipped = whole.step, state.skipped
        own.seed = derive_seed(state.seed, place, number)
        state.strategy.begin_step()
        with self._turn(own):
            batches = _of_player(micro_batches, player.name)
            result = yield from exact_step(own, batches, whole.samples, want_norm=want_norm, counts_late=counts_late)
        _add(whole, result, player.name)

    def end(self, state: TrainState, whole: StepResult) -> None:
        """End a step: what follows the turns of all players."""
        state.skipped += not whole.applied
        if whole.applied:
            for followers, leaders, decay in self.followers:
                torch._foreach_lerp_(followers, leaders, 1 - decay)
            if state.averages is not None:
                state.averages.update(state.step - state.skipped)

    @contextlib.contextmanager
    def _turn(self, own: TrainState) -> Generator[None, None, None]:
        """Inside, only the parameters of one player are trainable."""
        others = [p for _, state in self.states if state is not own for p in state.strategy.trainable.values()]
        _set_trainable(others, False)
        try:
            yield
        finally:
            _set_trainable(others, True)


def turns_of(task: Any, state: TrainState, config: RunConfig) -> Turns:
    """The players of an `AlternatingTask`, each with its own strategy for its parameters.

    Raises:
        UsageError: a parameter belongs to no player or to two, a pattern matches nothing, a player has no loss; or the
            config has what players cannot have.
    """
    players: Sequence[Player] = task.players
    _check(task, players, config)
    model = state.strategy.unwrapped.model
    by_name = dict(model.named_parameters(remove_duplicate=False))
    followers = [_follow(by_name, follower) for follower in task.followers]
    if followers:
        state.strategy.wrap(state.strategy.unwrapped)  # they no longer train
    trainable = {name: names for name, names in names_of_parameters(model).items() if by_name[name].requires_grad}
    owned = _owned(players, trainable)
    every = [by_name[name] for names in owned.values() for name in names]
    states = []
    for player in players:
        strategy: Any = make_strategy(config.parallel, state.world)
        strategy.gives_buffers = False  # that of the whole model does, before each turn
        _set_trainable(every, False)
        _set_trainable([by_name[name] for name in owned[player.name]], True)
        forward = Forward(
            model,
            _loss_of(task, player.name),
            is_bypassed=state.strategy.unwrapped.is_bypassed,
            uses_graphs=config.compute.uses_cuda_graphs,
            holders=state.strategy.unwrapped.holders,
        )
        strategy.wrap(forward)
        own = {name: factor for name, factor in state.coefficients.items() if name == player.name}
        changes: dict[str, Any] = {"strategy": strategy, "averages": None, "metrics": None, "coefficients": own}
        states.append((player, dataclasses.replace(state, **changes)))
    _set_trainable(every, True)
    return Turns(states, followers)


def _loss_of(task: Any, name: str) -> Any:
    return lambda model, batch: {name: task.loss_of(name, model, batch)}


def _set_trainable(parameters: Sequence[Tensor], trains: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(trains)


def _of_player(micro_batches: Sequence[MicroBatch], name: str) -> list[MicroBatch]:
    """The micro-batches, with the units of one player."""
    if micro_batches[0].weights is None:
        return list(micro_batches)
    if any(name not in (one.weights or {}) for one in micro_batches):
        what = f"it has the units of {listed(list(micro_batches[0].weights), 5)}, and not of the player {name}"
        raise TrainingError(what, where="Task.weight", remedy="return None, or a dict with a number for each player")
    return [dataclasses.replace(one, weights={name: (one.weights or {})[name]}) for one in micro_batches]


def _add(whole: StepResult, result: StepResult, name: str) -> None:
    """Add the update of a player to the result of the step."""
    whole.bad = result.bad  # the same samples, read once
    if result.losses:
        whole.indices += result.indices
        whole.counted += result.counted
        whole.places += result.places
        whole.losses += result.losses
    whole.totals[name] += next(iter(result.totals.values()))
    whole.grad_norm = result.grad_norm if result.grad_norm is not None else whole.grad_norm
    whole.applied |= result.applied


def _owned(players: Sequence[Player], parameters: Mapping[str, Sequence[str]]) -> Mapping[str, list[str]]:
    """The names of the trainable parameters of each player.

    Args:
        parameters: all names of each trainable parameter, by its first.

    Raises:
        UsageError: a parameter has no player or two, or a player has no parameter.
    """
    owned: dict[str, list[str]] = {player.name: [] for player in players}
    for name, names in parameters.items():
        owners = [player.name for player in players if player.owns(names)]
        if len(owners) != 1 and len(names) > 1 and owners:
            what = f"{' and '.join(names)} are one parameter, which belongs to several players"
            raise UsageError(what, where="Task.players", remedy="give each player its own parameters")
        if len(owners) != 1:
            what = f"belongs to {' and '.join(owners)}" if owners else "belongs to no player"
            remedy = "let each trainable parameter match the patterns of one player, or freeze it in Task.model"
            raise UsageError(f"the parameter {name} {what}", where="Task.players", remedy=remedy)
        owned[owners[0]].append(name)
    for name, found in owned.items():
        if not found:
            remedy = f"correct `match`; the model has {listed(list(parameters), 5)}"
            raise UsageError(f"player {name} has no trainable parameter", where="Task.players", remedy=remedy)
    return owned


def _follow(by_name: Mapping[str, nn.Parameter], follower: Follower) -> tuple[list[Tensor], list[Tensor], float]:
    pairs = [
        (parameter, by_name.get(follower.of + name.removeprefix(follower.match)))
        for name, parameter in by_name.items()
        if name.startswith(follower.match)
    ]
    if not 0 <= follower.decay <= 1:
        raise UsageError(
            f"the decay {follower.decay} is not from 0 to 1", where="Task.followers", remedy="such as 0.99"
        )
    if not pairs or any(leader is None or leader.shape != parameter.shape for parameter, leader in pairs):
        remedy = "write the prefixes of two parts with the same parameters: Follower('teacher.', of='student.', ...)"
        what = f"the parameters {follower.match}* and {follower.of}* are not the same"
        raise UsageError(what, where="Task.followers", remedy=remedy)
    pairs = list({id(parameter): (parameter, leader) for parameter, leader in pairs}.values())  # tied ones once
    _set_trainable([parameter for parameter, _ in pairs], False)
    leaders = [leader.detach() for _, leader in pairs if leader is not None]
    return [one.detach() for one, _ in pairs], leaders, follower.decay


def _check(task: Task, players: Sequence[Player], config: RunConfig) -> None:
    """Check what can be known before the model is wrapped."""
    names = [player.name for player in players]
    remedy = "players = (Player('critic', 'critic.*', updates=5), Player('generator', 'generator.*'))"
    if not players or len(set(names)) < len(names):
        raise UsageError(f"there are the players {names}", where="Task.players", remedy=f"name each once: {remedy}")
    for player in players:
        if player.every < 1 or player.updates < 1:
            raise UsageError(f"{player}: a count is below 1", where="Task.players", remedy="write 1 or more")
        if not player.name.isidentifier():
            remedy = "use letters, digits and _: the loss is the method <name>_loss"
            raise UsageError(f"a player is called {player.name!r}", where="Task.players", remedy=remedy)
        if isinstance(task, AlternatingTask) and not callable(getattr(task, f"{player.name}_loss", None)):
            what = f"{type(task).__name__} has no method {player.name}_loss"
            raise UsageError(what, where="Task.players", remedy=f"write def {player.name}_loss(self, model, batch)")
    if not any(player.every == 1 for player in players):
        raise UsageError("no player updates at every step", where="Task.players", remedy=f"give one every=1: {remedy}")
    refused = {
        "parallel.strategy=fsdp": config.parallel.strategy == "fsdp",
        "train.unfreeze": bool(config.train.unfreeze),
        "Task.embed": needs_global_batch(task),
    }
    for where, is_set in refused.items():
        if is_set:
            raise UsageError("it cannot be used with players", where=where, remedy="leave it out, or Task.players")
