"""The options of the task, checked before torch is imported."""

from typing import Any, ClassVar

from pydantic import PositiveInt

from lockstep import TaskOptions


class WavesOptions(TaskOptions):
    task: ClassVar[str] = "waves.task:Waves"
    cycles: PositiveInt = 2
    """How many waves the inputs span: task.cycles=3."""
    width: PositiveInt = 32

    def suggestions(self) -> dict[str, Any]:
        return {"optim": {"lr": 0.01}}
