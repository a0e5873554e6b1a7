"""A model that is compiled as a whole under DDP: its graph is cut where buckets of gradients are full."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task
from tests import runs
from tests.ranks import run_ranks

WIDTH = 600
"""The weights of a layer are more than a MiB, the size of a bucket."""


class Layers(Task):
    def model(self):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def train_data(self):
        return TensorDataset(torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0)))

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        return model(batch[0]).square().mean(1).sum()


def graphs_with_gradients(folder, bucket_mb):
    """The number of graphs that were compiled for training, and the weights."""
    found = []

    def counting(graph, inputs):
        found.append(torch.is_grad_enabled())
        return graph.forward

    name = f"counting for {folder}"  # a name is given once
    torch._dynamo.register_backend(counting, name=name)
    torch._dynamo.reset()
    changes = {"compute": {"compile": "model", "compile_backend": name}, "batch": {"global": 24}}
    settings = runs.config(
        parallel={"bucket_mb": bucket_mb}, train={"steps": 4, "eval_every_steps": 2}, log={"every_steps": 1}, **changes
    )
    weights, _ = runs.fit(Layers(), settings, folder)
    torch._dynamo.reset()
    return sum(found), {name: tensor.tolist() for name, tensor in list(weights.items())[:1]}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_the_compiled_model_has_a_graph_for_each_bucket_so_that_reductions_run_beside_the_backward_pass(tmp_path):
    """Checks before the first step also run the model. A graph that was compiled outside of DDP would not be cut."""
    cut = run_ranks(2, graphs_with_gradients, tmp_path / "cut", 1)
    assert [count for count, _ in cut] == [4, 4]
    whole = run_ranks(2, graphs_with_gradients, tmp_path / "whole", 100)
    assert [count for count, _ in whole] == [2, 2], "the first bucket of DDP has a MiB"
    assert cut[0][1] == cut[1][1]
