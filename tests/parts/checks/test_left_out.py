from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lockstep
from lockstep.core.errors import TrainingError
from lockstep.parts.checks.left_out import LeftOut


def test_the_remedy_names_all_parameters_that_changed():
    """A list of the first five, pasted into `keep`, led to the same error about the sixth."""
    model = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))})
    model["teacher"].requires_grad_(False)
    world = SimpleNamespace(all_max=int, gather=lambda value: [value], broadcast=lambda value: value)
    run = SimpleNamespace(model=lockstep.trained_only(model), world=world, state=SimpleNamespace(step=3))
    check = LeftOut(run)
    check.check()
    with torch.no_grad():
        for parameter in model["teacher"].parameters():
            parameter.add_(1)
    with pytest.raises(TrainingError) as caught:
        check.check()
    for name, _ in model["teacher"].named_parameters():
        assert f"'teacher.{name}'" in str(caught.value)
