"""Checks that training does not change weights that checkpoints leave out, such as a teacher that follows a student."""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.core.build import Run
from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel.sharded_tensor import local
from lockstep.parts.replicas import digests_of

_SHOWN = 5


class LeftOut:
    """The parameters that the model's `state_dict` leaves out, with their values at creation.

    A resumed run gets them from `Task.model`. So they must not change.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before = digests_of(_left_out(run.model))
        self.is_empty = not run.world.all_max(len(self.before))  # a rank may hold no row of a parameter

    def check(self) -> None:
        """Compare with the current parameters. All ranks call it.

        Raises:
            TrainingError: on all ranks; names the parameters that have changed.
        """
        if self.is_empty:
            return
        now = digests_of(_left_out(self.run.model))
        mine = [name for name, digest in self.before.items() if now.get(name, digest) != digest]
        of_ranks = self.run.world.broadcast(self.run.world.gather(mine))
        changed = list(dict.fromkeys(name for names in of_ranks for name in names))
        if changed:
            patterns = ", ".join(map(repr, changed))  # all of them: exactly these are kept
            raise TrainingError(
                f"training has changed parameters that checkpoints leave out: {listed(changed, _SHOWN)}. A resumed "
                "run would get those of Task.model",
                where=f"step {self.run.state.step}",
                remedy=f"keep them in checkpoints: lockstep.trained_only(model, keep=[{patterns}]) takes patterns of "
                "names, too; your own state_dict must return them",
            )


def _left_out(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model whose state contains neither their name nor their memory."""
    state = model.state_dict()
    named = {name: parameter for name, parameter in model.named_parameters() if name not in state}
    memory = {local(value).untyped_storage().data_ptr() for value in state.values() if isinstance(value, Tensor)} - {0}
    return {name: one for name, one in named.items() if local(one).untyped_storage().data_ptr() not in memory}
