"""Trainings and plans on a mesh: the error of bf16 against float64, memory of a tensor group, plans of a large Llama.

    python benchmarks/mesh.py bf16     # trainings in bf16 and fp32, compared with the same training in float64
    python benchmarks/mesh.py kept     # bytes that the forward pass of a Llama keeps, on each rank of a tensor group
    python benchmarks/mesh.py llama    # activations of one text, as `lockstep plan` counts them, at tensor=1 and 8
    lockstep plan benchmarks/mesh.py:Chunks --gpus 8 --gpu H100 precision=bf16 batch.global=1 parallel.tensor=8

The last command reads this file as a task: a Llama of 8 billion parameters on texts of 8,192 tokens.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import spread
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.core.config.sections import RunConfig
from lockstep.core.task import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# ---- bf16

STEPS, HIDDEN, SEEDS = 20, 64, tuple(range(6))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ddp, 2 ranks": (2, {"strategy": "ddp"}),
    "1x1x2": (2, {"tensor": 2}),
    "1x2x2": (4, {"strategy": "fsdp", "tensor": 2}),
}


def trained(parallel: dict[str, Any], world: int, seed: int, precision: str, by_tokens: bool) -> tuple[Any, Any]:
    """Weights in float64, and the loss of the last step. AdamW would amplify rounding in small gradients."""
    from tests import runs
    from tests.mesh.mesh_cases import BY_TOKENS, PLAN, Model

    dtype = torch.float64 if precision == "float64" else torch.float32

    class Regression(Task):
        def model(self):
            torch.manual_seed(seed)
            return Model(0.0, HIDDEN).to(dtype)

        def tensor_plan(self):
            return BY_TOKENS if by_tokens else PLAN

        def train_data(self):
            inputs = torch.randn(256, 10, generator=torch.Generator().manual_seed(seed))
            # The same numbers in each format.
            return TensorDataset(inputs.to(dtype), inputs.unflatten(1, (5, 2)).sum(-1).to(dtype))

        def loss(self, model, batch):
            return (model(batch[0]).to(batch[1].dtype) - batch[1]).square().sum()

    sections = {"batch": {"global": 24, "micro": 24 // (world // parallel.get("tensor", 1))}, "parallel": parallel}
    sections |= {"train": {"steps": STEPS}, "precision": "fp32" if precision == "float64" else precision}
    sections |= {"log": {"every_steps": 1}, "optim": {"name": "SGD", "lr": 0.02, "weight_decay": 0.0, "clip_norm": 1.0}}
    weights, results = runs.fit(Regression(), runs.config(**sections, seed=seed))
    return {name: tensor.double() for name, tensor in weights.items() if name != "calls"}, results["train/loss"]


def bf16() -> None:
    """The distance of trainings in bf16 on a mesh, and on one process, from the same training in float64."""
    import mesh as bench  # ranks import it by name

    from tests.ranks import run_ranks

    def far(found, right):
        squares = sum(float((found[0][name] - right[0][name]).square().sum()) for name in right[0])
        return (squares / sum(float(one.square().sum()) for one in right[0].values())) ** 0.5

    right = {seed: run_ranks(1, bench.trained, {}, 1, seed, "float64", False)[0] for seed in SEEDS}
    print(f"Distance from float64 after {STEPS} steps: median (minimum to maximum) of {len(SEEDS)} seeds\n")
    print("| ranks | precision | weights | loss |\n|---|---|---:|---:|")
    for precision in ("bf16", "fp32"):
        for name, (world, parallel) in LAYOUTS.items():
            for by_tokens in (False, True)[: parallel.get("tensor", 1)]:
                weights, losses = [], []
                for seed in SEEDS:
                    found = run_ranks(world, bench.trained, parallel, world, seed, precision, by_tokens)[0]
                    weights.append(far(found, right[seed]))
                    losses.append(abs(found[1] / right[seed][1] - 1))
                shown = f"{name}, sequence_parallel" if by_tokens else name
                print(
                    f"| {shown} | {precision} | {spread(weights, '.1e')} | {spread(losses, '.1e')} |",
                    flush=True,
                )


# ---- kept

WIDTH, WORDS, LENGTH, ROWS = 128, 4096, 256, 4
LLAMA = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 352, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": WORDS}
LOSSES: dict[str, dict[str, Any]] = {
    "all logits": {"loss_chunk": None},
    "chunks of 512": {"loss_chunk": 512},
    "chunks of 512, cut_tokens": {"loss_chunk": 512, "cut_tokens": True},
}


def kept(texts: str, options: dict[str, Any], tensor: int) -> tuple[int, int]:
    """Bytes that the third pass keeps, without the parameters, and the largest number of words of a tensor in it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.core.parallel.sharded_tensor import local
    from lockstep_recipes.tasks.lm.options import LmOptions
    from lockstep_recipes.tasks.lm.task import LanguageModel
    from tests import runs

    found: list[tuple[int, int]] = []
    plain = LanguageModel.loss

    class Widest(TorchDispatchMode):
        width = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.ndim > 1 and made.shape[-2] > 1:
                self.width = max(self.width, made.shape[-1])
            return made

    def loss(self, model, batch):
        sizes: dict[int, int] = {}
        held = []

        def pack(tensor):
            own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}  # FSDP gathers block by block
            storage = local(tensor).untyped_storage()
            held.append(storage)  # no other tensor gets its memory
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Widest() as widest:
            result = plain(self, model, batch)
        found.append((sum(sizes.values()), widest.width))
        return result

    LanguageModel.loss = loss
    try:
        given = {"config": LLAMA, "vocab_size": 300, "length": LENGTH, "eval_fraction": 0.0, **options}
        settings = runs.config(batch={"global": ROWS}, train={"steps": 3}, parallel={"tensor": tensor})
        runs.fit(LanguageModel(LmOptions.model_validate(given), texts), settings)
    finally:
        LanguageModel.loss = plain
    return found[-1]


def kept_main() -> None:
    """Bytes that a forward pass of a Llama keeps for the backward pass, on each rank of a tensor group."""
    import mesh as bench  # ranks import it by name

    from tests import lm_cases
    from tests.ranks import run_ranks

    print("| loss | tensor | kept, MB | most columns of a matrix |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        texts = lm_cases.corpus(Path(folder), count=400)
        for name, options in LOSSES.items():
            for tensor in (1, 2):
                bytes_kept, widest = run_ranks(tensor, bench.kept, texts, options, tensor)[0]
                print(f"| {name} | {tensor} | {bytes_kept / 1e6:.2f} | {widest} |", flush=True)


# ---- llama

TOKENS, CHUNK = 8192, 1024
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": TOKENS}


class Logits(Task):
    """All logits at once; the last layer is sharded, and its outputs are gathered."""

    def model(self) -> nn.Module:
        import transformers

        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(8, TOKENS, dtype=torch.int64))

    def loss(self, model, batch):
        logits = model(input_ids=batch[0], use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum") / TOKENS


class Chunks(Logits):
    """Logits of 1,024 tokens at a time, as in the recipe `lm`; the last layer and the embedding are whole."""

    def tensor_plan(self):
        import transformers

        return {f"model.{key}": style for key, style in transformers.LlamaConfig.base_model_tp_plan.items()}

    def loss(self, model, batch):
        hidden = model.model(input_ids=batch[0], use_cache=False).last_hidden_state

        def of_chunk(hidden, words):
            logits = nn.functional.linear(hidden, model.lm_head.weight)
            return cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")

        parts = zip(hidden[:, :-1].split(CHUNK, 1), batch[0][:, 1:].split(CHUNK, 1), strict=True)
        return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in parts) / TOKENS


class Parts(Chunks):
    """The same; between sharded layers, each rank has its part of the tokens."""

    def tensor_plan(self):
        blocks = {"model.layers.*": "sequence_parallel", "model.layers.*.self_attn": "sequence_gather"}
        return super().tensor_plan() | blocks


def llama() -> None:
    """What tensor parallelism does not shard."""
    from lockstep_lab.plan.facts import facts_of

    print("GB of one text in bf16, at the peak of the passes, and kept for the backward pass\n")
    print("| loss | recomputed | tensor | largest | kept | of kept, whole on each GPU |\n|---|---|---:|---:|---:|---:|")
    for task in (Logits, Chunks, Parts):
        for again in (False, True):
            kept: dict[int, float] = {}
            for tensor in (1, 8):
                config = RunConfig.model_validate({"batch": {"global": 1}, "parallel": {"tensor": tensor}})
                facts = facts_of(task(), config, precisions=("bf16",), recompute=(again,))
                passes = facts.passes["bf16", again, None]
                kept[tensor] = (passes.kept.at(1) - passes.kept_casts.at(1)) / 1e9
                largest = max(segment.activations.at(1) for segment in passes.segments) / 1e9
                # kept = whole + cut / tensor
                whole = "" if tensor == 1 else f"{(8 * kept[8] - kept[1]) / 7:.2f}"
                cells = (
                    task.__name__,
                    "yes" if again else "no",
                    tensor,
                    f"{largest:.2f}",
                    f"{kept[tensor]:.2f}",
                    whole,
                )
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    modes = {"bf16": bf16, "kept": kept_main, "llama": llama}
    if not sys.argv[1:] or sys.argv[1] not in modes:
        sys.exit(__doc__)
    modes[sys.argv[1]]()
