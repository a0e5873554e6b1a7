"""A Llama of 8 billion parameters on texts of 8,192 tokens, for `lockstep plan`: what tensor parallelism leaves whole.

lockstep plan benchmarks/mesh_llama.py:Chunks --gpus 8 --gpu H100 --precision bf16 batch.global=1 parallel.tensor=8
python benchmarks/mesh_llama.py    # kept activations of one text, at tensor=1 and 8, and what they are made of
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.core.config.sections import RunConfig
from lockstep.core.task import Task

TOKENS, CHUNK = 8192, 1024
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": TOKENS}


class Logits(Task):
    """All logits at once; the last layer is cut, and its outputs are gathered."""

    def model(self) -> nn.Module:
        import transformers

        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(8, TOKENS, dtype=torch.int64))

    def loss(self, model, batch):
        logits = model(input_ids=batch[0], use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum") / TOKENS


class Chunks(Logits):
    """Logits of 1,024 tokens at a time, as the recipe `lm` has them; the last layer and the embedding are whole."""

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
    """The same; between cut layers, each rank has its part of the tokens."""

    def tensor_plan(self):
        blocks = {"model.layers.*": "sequence_parallel", "model.layers.*.self_attn": "sequence_gather"}
        return super().tensor_plan() | blocks


def main() -> None:
    from lockstep.plan.facts import facts_of

    print("GB of one text in bf16, at the largest moment of the passes, and kept for the backward pass\n")
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
    main()
