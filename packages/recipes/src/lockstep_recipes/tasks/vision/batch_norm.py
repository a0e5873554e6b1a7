"""Replace the BatchNorm layers of a model by layers that depend less on how a batch is split."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.vision.image_options import BatchNormChoice

_MOST_GROUPS = 32  # Wu and He 2018, Group Normalization, arXiv:1803.08494, table 3

_Normed = nn.modules.batchnorm._BatchNorm


def exchange_batch_norm(model: nn.Module, choice: BatchNormChoice) -> nn.Module:
    """`model` with its BatchNorm layers replaced. Parameters keep their names and values.

    Args:
        choice: `batch` changes nothing. `sync`: SyncBatchNorm, which a run replaces on devices where it cannot run.
            `frozen`: the layers always use their running statistics. `group`: GroupNorm with at most 32 groups.

    Raises:
        UsageError: `choice` is `group`, but GroupNorm cannot replace one of the layers.
    """
    if choice == "sync":
        convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model)
    if choice == "frozen":
        for module in model.modules():
            if isinstance(module, _Normed):
                module.__class__ = _frozen(type(module))  # type: ignore[assignment,arg-type]
                module.eval()
    if choice == "group":
        _exchange_for_groups(model)
    return model


@functools.cache
def _frozen(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of BatchNorm layers that stay in evaluation mode."""

    class Frozen(kind):  # type: ignore[misc,valid-type]
        def train(self, mode: bool = True) -> nn.Module:
            layer: nn.Module = super().train(False)
            return layer

    Frozen.__name__ = Frozen.__qualname__ = f"Frozen{kind.__name__}"
    return Frozen


def _exchange_for_groups(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if not isinstance(module, _Normed):
            continue
        if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or not name:
            what = f"{name or 'the model'} is a {type(module).__name__}, which does more than BatchNorm"
            remedy = "use a different model, or task.batch_norm=sync or frozen"
            raise UsageError(what, where="task.batch_norm=group", remedy=remedy)
        # In all layers, groups have a whole number of channels.
        groups = math.gcd(_MOST_GROUPS, module.num_features)
        group_norm = nn.GroupNorm(groups, module.num_features, eps=module.eps, affine=module.affine)
        if module.affine:
            group_norm.weight, group_norm.bias = module.weight, module.bias
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, group_norm)
