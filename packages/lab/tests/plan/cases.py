"""Facts that are written down, and small tasks whose facts are traced."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

from lockstep import Task
from lockstep.core.config.sections import RunConfig
from lockstep_lab.plan.inputs import Affine, Machines, ModelFacts, OptimizerFacts, ParameterFacts, PassFacts, Segment


def config(samples=8, **sections):
    return RunConfig.model_validate({"name": "case", "batch": {"global": samples}, **sections})


def adam_parameter(name, shape, block=None, **other):
    return ParameterFacts(name, shape, element_bytes=4, trainable=True, block=block, state_element_bytes=8.0, **other)


def segment(phase, block, before, activations, gradients=0.0):
    bytes_of = {"gradients": Affine(gradients), "gradients_of_block": Affine(gradients / 2)}
    return Segment(phase, block, before, activations=Affine(0.0, activations), **bytes_of)


def written_facts(parameters=None, *, blocks=2, activations=1e6, global_batch=64, **other):
    """Facts of a model of `blocks` blocks of 800 parameters, and a root of 80."""
    if parameters is None:
        parameters = [adam_parameter(f"block{n}", (40, 20), n) for n in range(blocks)]
        parameters.append(adam_parameter("root", (40, 2)))
    passes = {}
    for precision, factor in (("fp32", 1.0), ("bf16", 0.5)):
        for recompute in (False, True):
            size = activations * factor * (0.25 if recompute else 1.0)
            segments = (segment("forward", blocks - 1, blocks - 2, size), segment("backward", 0, 1, size / 2, 400.0))
            passes[precision, recompute, None] = PassFacts(segments, batch=Affine(0.0, 10.0), kept=Affine(0.0, size))
    values = {
        "name": "written",
        "parameters": tuple(parameters),
        "blocks": tuple(f"block{n}" for n in range(blocks)),
        "buffers_bytes": 0,
        "optimizer": OptimizerFacts("AdamW", 0.0, 0.0),
        "passes": passes,
        "flops_per_sample": 6e9,
        "forward_flops_per_sample": 2e9,
        "recomputed_flops_per_sample": 1.5e9,
        "samples": 1000,
        "global_batch": global_batch,
        "epochs": 3,
    }
    return ModelFacts(**{**values, **other})


def world(gpus=8, memory=80e9, **other):
    options = {"gpus_per_node": min(gpus, 8), "memory_bytes": None if memory is None else int(memory)}
    return Machines(gpus=gpus, **{**options, **other})


class Mlp(Task):
    """A network whose bytes can be counted by hand: 8 -> 16 -> 16 -> 1."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def train_data(self):
        return TensorDataset(torch.randn(40, 8), torch.randn(40, 1))

    def loss(self, model, batch):
        return mse_loss(model(batch[0]), batch[1], reduction="sum")


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x)))))


class Blocks(Task):
    """Tokens through an embedding, blocks and a head."""

    width, depth, length = 32, 3, 24

    def model(self):
        layers = nn.ModuleList([Layer(self.width) for _ in range(self.depth)])
        return nn.ModuleDict(
            {"embed": nn.Embedding(50, self.width), "layers": layers, "head": nn.Linear(self.width, 50)}
        )

    def train_data(self):
        return TensorDataset(torch.randint(0, 50, (40, self.length)))

    def loss(self, model, batch):
        x = model["embed"](batch[0])
        for layer in model["layers"]:
            x = layer(x)
        return cross_entropy(model["head"](x).flatten(0, 1), batch[0].flatten(), reduction="sum")


class Reads(Mlp):
    """Its model reads a value, which tensors without values do not have."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), Reader(), nn.Linear(16, 1))


class Reader(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.detach().sum()) > 0 else x * 3
