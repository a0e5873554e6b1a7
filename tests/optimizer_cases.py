"""Optimizers and schedules that users might bring, and tasks that bring them."""

import torch

from tests import own_tasks


class Sign(torch.optim.Optimizer):
    """Signs of an average of the gradients, in the manner of Lion. It counts its updates in its groups."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.sign(), alpha=-group["lr"] / (1 + 0.1 * group["updates"]))


class Slowing(Sign):
    """Its first group counts from another number."""

    def step(self, closure=None):
        self.param_groups[0].setdefault("updates", 50)
        super().step()


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics: an update draws random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * group["lr"])


class ByMatrix(torch.optim.Optimizer):
    """Gradients divided by the norm of their matrix, as LARS does: a shard has another norm."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


class WithClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class WithModes(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


class WithList(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1.0]


class WithGlobal(torch.optim.SGD):
    """Counts its updates under a key that is no parameter."""

    def step(self, closure=None):
        self.state["global"]["count"] = self.state["global"].get("count", 0) + 1
        return super().step(closure)


class WithFirstGlobal(WithGlobal):
    """The same, from its beginning, and with an argument that is not among its options."""

    def __init__(self, params, lr, *, name="first"):
        super().__init__(params, lr)
        self.state["global"]["count"] = 0


class WithSetting(torch.optim.SGD):
    """Changes a setting of its groups into a value that no checkpoint holds."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["history"] = (*group.get("history", ()), 1.0)


class OwnOptimizer(own_tasks.Masked):
    """A task that makes its optimizer: two classes of groups in a class of the task's own."""

    def __init__(self, kind="Sign", **options):
        super().__init__(**options)
        self.kind = kind

    def optimizer(self, groups):
        if self.kind == "leaves out":
            return torch.optim.SGD([{**groups[0], "params": groups[0]["params"][1:]}], lr=0.1)
        if self.kind == "nothing":
            return "AdamW"
        if self.kind == "Slowing":  # two parts of a group, which have its name
            parameters = groups[0]["params"]
            groups = [{**groups[0], "params": part} for part in (parameters[:1], parameters[1:])]
        return globals()[self.kind](groups, lr=0.01)


class OwnSchedule(own_tasks.Masked):
    def schedule(self, update):
        return halves(update)


def halves(update):
    """A schedule: the rate halves every 5 updates."""
    return 0.5 ** (update // 5)


def wrong(update):
    return float("nan") if update else 1.0


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, whose state it does not share."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.AdamW(self.param_groups, lr=lr)

    def step(self, closure=None):
        self.inner.step()


class Unmade(torch.optim.Optimizer):
    """Its constructor does not call that of its base."""

    def __init__(self, params, lr=1e-3):
        self.param_groups, self.state, self.defaults = list(params), {}, {"lr": lr}

    def step(self, closure=None):
        pass


class Asserting(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it needs a closure"


class Flat(torch.optim.SGD):
    """Forms groups of its own, and leaves out what it does not know of those that it gets."""

    def __init__(self, params, lr=1e-3):
        super().__init__([{"params": [p for group in params for p in group["params"]]}], lr=lr)
