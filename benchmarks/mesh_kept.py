"""Bytes that a forward pass of a Llama keeps for the backward pass, on each rank of a tensor group.

python benchmarks/mesh_kept.py    # from the root of a checkout
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTH, WORDS, LENGTH, ROWS = 128, 4096, 256, 4
LLAMA = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 352, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": WORDS}
WAYS: dict[str, dict[str, Any]] = {
    "all logits": {"loss_chunk": None},
    "chunks of 512": {"loss_chunk": 512},
    "chunks of 512, cut_tokens": {"loss_chunk": 512, "cut_tokens": True},
}


def kept(texts: str, options: dict[str, Any], tensor: int) -> tuple[int, int]:
    """Bytes that the third pass keeps, without the parameters, and the most words of a tensor in it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from lockstep.core.parallel.sharded_tensor import local
    from lockstep.tasks.lm.options import LmOptions
    from lockstep.tasks.lm.task import LanguageModel
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


def main() -> None:
    import mesh_kept as bench  # ranks import it by its name

    from tests import lm_cases
    from tests.ranks import run_ranks

    print("| loss | tensor | kept, MB | most columns of a matrix |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        texts = lm_cases.corpus(Path(folder), count=400)
        for name, options in bench.WAYS.items():
            for tensor in (1, 2):
                bytes_kept, widest = run_ranks(tensor, bench.kept, texts, options, tensor)[0]
                print(f"| {name} | {tensor} | {bytes_kept / 1e6:.2f} | {widest} |", flush=True)


if __name__ == "__main__":
    main()
