"""Hardware that lies: flips a bit of what one rank computes, wherever the device computes it, by torch's global hooks.

The hooks belong to the process and not to a model: what is made again, beside the training too, meets the same device.
"""

import contextlib
import os
import random

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from lockstep.core.parallel import heartbeat
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.strategy import Forward

KINDS = ("activation", "gradient", "weight", "optimizer", "reduced", "drift")
_INTEGERS = {4: torch.int32, 8: torch.int64}
_HIGH = {4: 22, 8: 51}  # the highest bit of the mantissa of float32 and float64


def flip(tensor, bit=None):
    """Flip a bit of the first element of a tensor in place."""
    flat = local(tensor.detach()).flatten() if not tensor.is_contiguous() else local(tensor.detach()).view(-1)
    if flat.numel():
        size = flat.element_size()
        flat[:1].view(_INTEGERS[size]).bitwise_xor_(1 << (_HIGH[size] if bit is None else bit))


class _Fault:
    def __init__(self, kind, share, after, *, times, bit, seed, struck):
        self.struck = struck
        self.kind, self.share, self.after, self.times, self.bit = kind, share, after, times, bit
        self.random, self.passes, self.strikes, self.hooked = random.Random(seed), 0, False, set()
        self.count = 0
        """How often it has struck."""

    def draws(self):
        return self.passes > self.after and self.count < self.times and self.random.random() < self.share

    def strike(self):
        self.count += 1
        self.struck.append(heartbeat.own().step)

    def before_module(self, module, _):
        if isinstance(module, Forward):
            self.passes += module.training and torch.is_grad_enabled()
            self.strikes = self.draws() and module.training and torch.is_grad_enabled()
        is_first = self.kind == "gradient" and isinstance(module, nn.Linear) and not self.hooked
        if is_first and module.weight.requires_grad:
            self.hooked.add(id(module.weight))
            module.weight.register_hook(self.of_gradient)

    def of_gradient(self, gradient):
        if not self.strikes:
            return None
        self.strike()
        gradient = gradient.clone()
        flip(gradient, self.bit)
        return gradient

    def after_module(self, module, _, output):
        if self.kind != "activation" or not self.strikes or not isinstance(module, nn.Linear):
            return None
        self.strikes = False
        self.strike()
        other = output.detach().clone()
        flip(other, self.bit)
        return output + (other - output.detach())

    def before_update(self, optimizer, *_):
        if self.kind == "reduced" and self.draws():
            self.strike()
            flip(_first(optimizer).grad, self.bit)

    def after_update(self, optimizer, *_):
        if self.kind not in ("weight", "optimizer", "drift") or not self.draws():
            return
        self.strike()
        with torch.no_grad():
            if self.kind == "drift":
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        local(parameter.data).mul_(1 + 1e-7)
            elif self.kind == "weight":
                flip(_first(optimizer).data, self.bit)
            else:
                flip(next(v for v in optimizer.state[_first(optimizer)].values() if v.ndim), self.bit)


def _first(optimizer):
    """The first parameter of which this rank holds something."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next(p for p in parameters if p.grad is not None and local(p.grad).numel())


@contextlib.contextmanager
def faulty(kind, *, rank=1, share=1.0, after=0, times=10**9, bit=None, seed=0, struck=None):
    """Inside, the device of one rank lies.

    Args:
        share: of the passes or updates in which the fault strikes.
        after: passes with gradient before which it does not strike.
        times: it strikes at most so often.
        bit: that is flipped. None: the highest of the mantissa.
        struck: gets the number of steps that were done whenever the fault strikes.
    """
    fault = _Fault(kind, share, after, times=times, bit=bit, seed=seed, struck=[] if struck is None else struck)
    if os.environ.get("RANK", "0") != str(rank):
        yield fault
        return
    handles = [
        modules.register_module_forward_pre_hook(fault.before_module),
        modules.register_module_forward_hook(fault.after_module),
        optimizers.register_optimizer_step_pre_hook(fault.before_update),
        optimizers.register_optimizer_step_post_hook(fault.after_update),
    ]
    try:
        yield fault
    finally:
        for handle in handles:
            handle.remove()
