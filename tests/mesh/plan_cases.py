"""Tasks whose plans are right or wrong, as files of users have them."""

from pathlib import Path

from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep import Trainer
from lockstep.watch import replay_report
from lockstep_lab.verify import cut_model
from lockstep_lab.verify.comparable_task import TaskChanges
from tests import runs
from tests.mesh.mesh_cases import PLAN, Block, Cut, Model
from tests.own_tasks import masked_data


class Dropping(Block):
    """Dropout within the cut part draws other masks on a mesh, which is no fault."""

    def between(self, inner):
        return functional.dropout(inner, 0.3, self.training)


class Normal(Block):
    """Each rank sees its part of the outputs alone."""

    @staticmethod
    def between(inner):
        return functional.normalize(inner, dim=-1)


class Other(Cut):
    block = Block

    def model(self):
        return Model(0.0, 20, self.block).to(self.dtype)


class Right(Other):
    """It can be learned: a target is the sum of its two inputs."""

    block = Dropping

    def train_data(self):
        return learnable(masked_data(self.length))

    def eval_data(self):
        return learnable(masked_data(50, seed=1))


def learnable(data):
    inputs, _, mask = data
    return TensorDataset(inputs, inputs.unflatten(1, (5, 2)).sum(-1), mask)


class Across(Other):
    """The plan cuts across a norm."""

    block = Normal


class Unsummed(Other):
    """The norms within heads get the gradient of their rank's heads alone."""

    def tensor_plan(self):
        return {name: style for name, style in PLAN.items() if "of_head" not in name}


class OneLayer(Other):
    """`up` gives its part, and `down` wants the whole."""

    def tensor_plan(self):
        return {"blocks.*.up": "colwise"}


class Misspelled(Other):
    def tensor_plan(self):
        return PLAN | {"block.*.up": "colwise"}


def settings(name, **sections):
    return runs.config(task={"kind": f"{Path(__file__)}:{name}"}, **sections)


def first_differences(names, parallel):
    """What the comparison of a model that is cut with the whole one says of each task."""
    found = {}
    for name in names:
        try:
            changes = TaskChanges(exact=True, float64=True)
            found[name] = cut_model.first_difference(settings(name, parallel=parallel), changes, 2.0**-52)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def replayed(folder, sections, step, wants):
    with Trainer(runs.config(**sections), run_dir=folder, quiet=True).replaying(step, Cut()) as (run, after):
        return replay_report.make(run, step, wants, after, tell=lambda text: None)
