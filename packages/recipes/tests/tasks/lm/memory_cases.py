"""Language models on ranks, whose gathered parameters and whole gradients are counted while a step runs."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.blocks import find_blocks
from lockstep.core.parallel import torch_internals
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.sharded_tensor import gather
from lockstep.core.parallel.strategy import Forward
from lockstep.core.parallel.world import join_world
from tests.lm_cases import small_task


class Gathered(TorchDispatchMode):
    """The most bytes of gathered parameters, and of these and whole gradients, after any operation."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.parameters, self.with_gradients = strategy, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        whole = [gathered for module in self.strategy._modules for _, gathered in pairs_of(module)]
        parameters = sum(tensor.untyped_storage().size() for tensor in whole)
        gradients = sum(tensor.grad.nbytes for tensor in whole if tensor.grad is not None)
        self.parameters = max(self.parameters, parameters)
        self.with_gradients = max(self.with_gradients, parameters + gradients)
        return made


def pairs_of(module):
    return torch_internals.gathered_parameters(module)


def step_sharded(options, parallel, micro_batches=1):
    """A step of a language model in float64 on these ranks.

    Returns:
        the gradients, the peaks of `Gathered`, and the names of the modules that FSDP shards separately.
    """
    task = small_task(**options)
    data = task.train_data()
    with join_world("cpu") as world:
        strategy = FSDP(world, ParallelConfig.model_validate(parallel))
        torch.manual_seed(0)
        model, _ = strategy.build_model(lambda: task.model().double())
        patterns = strategy.options.shard_modules
        strategy.wrap(Forward(model, task.loss), list(find_blocks(model, patterns).values()))
        strategy._must_check_used = False  # it gathers units in the first step alone, one after the other
        counted = Gathered(strategy)
        with counted:
            for number in range(micro_batches):
                last = number == micro_batches - 1
                batch = task.collate([data[(number * world.size + world.rank) % len(data)]])
                with strategy.gradient_sync(last):
                    losses = strategy.forward(batch)
                    strategy.backward(losses, {"loss": torch.full_like(losses["loss"], world.size)}, last)
        names = {id(module): name for name, module in model.named_modules()}
        units = [names[id(unit)] for unit, _ in strategy._units]
        gradients = {name: gather(parameter.grad) for name, parameter in model.named_parameters()}
    return gradients, (counted.parameters, counted.with_gradients), units


def step_alone(options, rows):
    """The gradients of the same step in one process."""
    task = small_task(**options)
    data = task.train_data()
    torch.manual_seed(0)
    model = task.model().double()
    for number in range(rows):
        task.loss(model, task.collate([data[number % len(data)]])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
