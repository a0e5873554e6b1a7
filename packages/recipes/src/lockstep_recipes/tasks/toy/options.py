"""Options for the toy task."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from lockstep.configs.task_options import TaskOptions


class ToyOptions(TaskOptions):
    """A regression on synthetic data."""

    task: ClassVar[str] = "lockstep_recipes.tasks.toy.task:Toy"

    samples: Annotated[int, Field(ge=0)] = 1000
    """Number of training samples."""
    eval_samples: Annotated[int, Field(ge=0)] = 200
    """Number of evaluation samples."""
    hidden: PositiveInt = 10
    """Width of the hidden layers."""
    layers: PositiveInt = 1
    """Number of hidden layers."""
    double: bool = False
    """Compute in float64, for tests in which rounding must not hide an error."""
