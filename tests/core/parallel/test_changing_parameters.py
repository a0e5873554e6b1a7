"""Models whose forward passes change parameters: right with every strategy, or refused before the first update."""

import torch
from torch import nn

from lockstep import LockstepError
from tests import own_tasks, runs
from tests.ranks import run_ranks


class Branches(nn.Module):
    """A trained branch, and a frozen branch that follows it in each forward pass, as in BYOL, MoCo and DINO."""

    def __init__(self, through_data=False):
        super().__init__()
        self.through_data = through_data
        self.online, self.target = nn.Linear(10, 5).double(), nn.Linear(10, 5).double().requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            (target.data if self.through_data else target).lerp_(online.data, 0.1)

    def forward(self, inputs):
        if self.training:
            self.follow()
        return self.online(inputs) + 0.1 * self.target(inputs)


class ThroughData(Branches):
    def __init__(self):
        super().__init__(through_data=True)


class InBlocks(nn.Module):
    """The branches are in blocks, which are sharded apart."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, inputs):
        return sum(block(inputs) for block in self.blocks)


class FromACopy(Branches):
    """The branch that follows begins as a copy: its first writes change no value."""

    def __init__(self, through_data=False):
        super().__init__(through_data)
        self.target.load_state_dict(self.online.state_dict())


class FromACopyThroughData(FromACopy):
    def __init__(self):
        super().__init__(through_data=True)


class Replaced(FromACopy):
    """Other memory takes the place of the target's."""

    def follow(self):
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.data = target.data * 0.9 + online.data * 0.1


class Clamped(nn.Module):
    """A trained weight of a block, which the pass of the whole model keeps within a range."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(10, 5).double() for _ in range(2))

    def forward(self, inputs):
        with torch.no_grad():
            self.blocks[0].weight.clamp_(-0.2, 0.2)
        return sum(block(inputs) for block in self.blocks)


class ClampedInside(Clamped):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ClampedBlock() for _ in range(2))

    def forward(self, inputs):
        return sum(block(inputs) for block in self.blocks)


class ClampedBlock(nn.Module):
    """Its weight is kept within a range that it does not leave in its first steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5).double()

    def forward(self, inputs):
        with torch.no_grad():
            self.linear.weight.clamp_(-1, 1)
        return self.linear(inputs)


class Late(Branches):
    """The branch follows from the third pass on."""

    passes = 0

    def follow(self):
        self.passes += 1
        if self.passes > 2:
            super().follow()


class Words(nn.Module):
    """An embedding that shortens the rows that it looks up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 5, max_norm=0.5).double()

    def forward(self, inputs):
        return self.table((inputs[:, 0].abs() * 1000).long() % 50)


class OwnCodes(nn.Module):
    """A code book that is a parameter, and that each rank moves by its own samples."""

    def __init__(self):
        super().__init__()
        self.linear, self.codes = nn.Linear(10, 5).double(), nn.Parameter(torch.zeros(10).double(), requires_grad=False)

    def forward(self, inputs):
        if self.training:
            self.codes.data.lerp_(inputs.mean(dim=0), 0.1)
        return self.linear(inputs + self.codes)


class Task(own_tasks.Plain):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def model(self):
        return globals()[self.kind]()


def trained(kind, strategy, micro, folder):
    """The weights after some steps, or the refusal."""
    settings = runs.config(
        train={"steps": 4}, batch={"global": 6, "micro": micro}, parallel={"strategy": strategy}, optim={"lr": 0.01}
    )
    try:
        return runs.fit(Task(kind), settings, folder)[0]
    except LockstepError as error:
        return str(error)


def test_a_branch_that_follows_is_the_same_with_ddp_as_in_one_process(tmp_path):
    alone = trained("Branches", "single", 6, tmp_path / "one")
    for of_rank in run_ranks(2, trained, "Branches", "ddp", 3, tmp_path / "two"):
        assert runs.difference(of_rank, alone) < 1e-12


WRITERS = {
    "Branches": "target.weight, target.bias",
    "ThroughData": "target.weight, target.bias",
    "InBlocks": "blocks.0.target.weight",
    "FromACopy": "target.weight, target.bias",
    "FromACopyThroughData": "target.weight, target.bias",
    "Replaced": "target.weight, target.bias",
    "ClampedInside": "blocks.0.linear.weight, blocks.1.linear.weight",
    "Late": "target.weight, target.bias",
}


def test_fsdp_refuses_a_forward_pass_that_writes_into_gathered_parameters_also_values_that_they_have(tmp_path):
    for kind, names in WRITERS.items():
        texts = run_ranks(2, trained, kind, "fsdp", 3, tmp_path / kind)
        assert any("a forward pass writes into parameters, and fsdp loses what" in text for text in texts), kind
        assert any(names in text for text in texts), kind
        assert not list((tmp_path / kind / "checkpoints").glob("step-*")), kind


def test_fsdp_keeps_what_a_forward_pass_writes_into_a_block_that_is_not_gathered(tmp_path):
    alone = trained("Clamped", "single", 6, tmp_path / "one")
    for of_rank in run_ranks(2, trained, "Clamped", "fsdp", 3, tmp_path / "two"):
        assert runs.difference(of_rank, alone) < 1e-12


def test_an_embedding_with_max_norm_is_refused_on_several_ranks_before_the_first_step(tmp_path):
    for strategy in ("ddp", "fsdp"):
        for text in run_ranks(2, trained, "Words", strategy, 3, tmp_path / strategy):
            assert "with max_norm, each rank shortens the rows that its own samples look up" in text
            assert "table" in text
    assert isinstance(trained("Words", "single", 6, tmp_path / "one"), dict)


def test_replicas_whose_parameters_differ_end_the_run_after_its_first_step(tmp_path):
    for text in run_ranks(2, trained, "OwnCodes", "ddp", 3, tmp_path / "run"):
        assert "after step 1 the ranks do not hold the same parameters: ranks 0 and 1 differ in codes" in text
