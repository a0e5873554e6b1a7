"""What tests of a mesh run on ranks: importable tasks, and functions that return plain values."""

import contextlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lockstep import Metrics, Trainer
from lockstep.core.parallel.sharded_tensor import local
from tests import lm_cases, runs
from tests.own_tasks import Masked

PLAN = {
    "blocks.*.[qkv]": "colwise",
    "blocks.*.of_head": "replicated_with_grad_allreduce",
    "blocks.*.mix": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}

BY_TOKENS = PLAN | {"blocks.*": "sequence_parallel"}
"""Ranks have parts of the five tokens between cut layers, of which the last is filled up."""


class Block(nn.Module):
    """Attention of 4 heads between five tokens, a norm within each head, and a feed-forward layer; all with biases.

    Of its 10 and 12 rows, 2 and 4 ranks hold unequal parts where they also shard.
    """

    between = staticmethod(torch.tanh)
    """What stands between the cut layers `up` and `down`."""

    def __init__(self, dropout=0.0, inner=20):
        super().__init__()
        self.norm, self.of_head, self.drop = nn.LayerNorm(6), nn.LayerNorm(3), nn.Dropout(dropout)
        self.q, self.k, self.v = (nn.Linear(6, 12) for _ in range(3))
        self.mix, self.up, self.down = nn.Linear(12, 6), nn.Linear(6, inner), nn.Linear(inner, 6)

    def forward(self, hidden):
        normed = self.norm(hidden)
        query, key, value = (part(normed).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(self.of_head(query), self.of_head(key), value)
        hidden = hidden + self.drop(self.mix(mixed.transpose(1, 2).flatten(2)))
        return hidden + self.down(self.between(self.up(hidden)))


class Model(nn.Module):
    def __init__(self, dropout, inner, block=Block):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(block(dropout, inner) for _ in range(2))
        self.register_buffer("factors", torch.linspace(0.5, 1.5, 5), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        hidden = self.inner(inputs.unflatten(1, (5, 2)))
        for block in self.blocks:
            hidden = block(hidden)
        if self.training:
            self.calls += 1
        return self.head(hidden).squeeze(-1) * self.factors


class Cut(Masked):
    """`Masked`, whose valid labels are spread unevenly, with a model that a mesh cuts."""

    def __init__(self, length=240, eval_length=0, dropout=0.0, plan=None, inner=20, frozen=()):
        super().__init__(length, torch.float64, eval_length)
        self.dropout, self.plan, self.inner, self.frozen = dropout, plan, inner, frozen

    def model(self):
        self.built = Model(self.dropout, self.inner).to(self.dtype)
        for name, parameter in self.built.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(self.frozen)))
        return self.built

    def tensor_plan(self):
        return PLAN if self.plan is None else self.plan

    def predict(self, model, batch):
        return model(batch[0])


class ByTokens(Cut):
    def tensor_plan(self):
        return BY_TOKENS


class Measured(Cut):
    """It has metrics, of the training too."""

    def loss(self, model, batch):
        inputs, targets, mask = batch
        output = model(inputs)
        return ((output - targets).square() * mask).sum(), output.detach()

    def metrics(self):
        from torchmetrics import MeanSquaredError

        return Metrics({"error": MeanSquaredError().set_dtype(torch.float64)}, self.update)

    def update(self, metrics, output, batch):
        metrics.update(output.contiguous(), batch[1].contiguous())


def fit(sections, options=None, run_dir=None, kind="Cut"):
    """`runs.fit` of a class of this file, by the sections of a config."""
    return runs.fit(globals()[kind](**(options or {})), runs.config(**sections), run_dir)


@contextlib.contextmanager
def norms_in_float64(options):
    """Inside, the norms of Gemma compute in the model's format.

    As transformers has them, they compute in float32, and so add up the gradients of their weights over the tokens of a
    micro-batch: other micro-batches give sums that are 1e-8 apart, on one process as on a mesh.
    """
    if options.get("config", {}).get("model_type") != "gemma":
        yield
        return
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    plain = GemmaRMSNorm.forward
    GemmaRMSNorm.forward = lambda self, hidden: self._norm(hidden) * (1.0 + self.weight)
    try:
        yield
    finally:
        GemmaRMSNorm.forward = plain


def language_model(options, settings):
    """A language model in float64, all of it."""
    with norms_in_float64(options):
        return lm_cases.train(options, settings)


def parts_after_training(sections, options):
    """What this rank holds of each parameter, a number that its generator drew, and the samples that it trained on."""
    drawn, indices = [], []

    class Draws(Cut):
        def loss(self, model, batch):
            drawn.append(float(torch.get_rng_state().double().mean()))
            indices.extend(batch[0][:, 0].tolist())
            return super().loss(model, batch)

    held = {}
    whole = runs.whole_weights
    runs.whole_weights = lambda model: held.update(
        {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}
    )
    try:
        runs.fit(Draws(**options), runs.config(**sections, train={"steps": 3}))
    finally:
        runs.whole_weights = whole
    return {"parts": held, "drawn": drawn, "indices": indices}


def export_and_evaluate(run_dir, sections, options, out):
    """The loss and the samples of an evaluation, and the predictions on rank 0; writes an export."""
    trainer = Trainer(runs.config(**sections), run_dir=Path(run_dir), quiet=True)
    trainer.export(out, Cut(**options), program=False)
    outputs = trainer.predict(Cut(**options))
    results = trainer.evaluate(Cut(**options))
    return results["loss"], results["samples"], torch.stack(outputs) if outputs else None
