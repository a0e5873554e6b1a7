"""Plays, letter by letter: the recipe `lm` beside nanoGPT's own program, at nanoGPT's setting for CPUs.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/lm_letters.py --nanogpt nanoGPT [--steps 2000] [--data ../shared/data/lm/shakespeare/input.txt]

Both have 4 layers, 4 heads, width 128, no dropout, 12 rows of 64 letters a step, one thread, and its last tenth of the
text held back. nanoGPT's program runs unchanged, with the command of its page. Both models are then judged by the same
number: the loss over all letters of the held-back text, in rows of 64 that do not overlap. nanoGPT's own figure is a
mean over random rows.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
ROW = 64


def prepared(clone: Path, text: str) -> tuple[np.ndarray, dict[str, int]]:
    """Write the files that nanoGPT's prepare.py writes; it would download the text. Returns the held-back letters."""
    folder = clone / "data" / "shakespeare_char"
    letters = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(letters)}
    ids = np.array([numbers[letter] for letter in text], dtype=np.uint16)
    cut = int(len(text) * 0.9)
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "stoi": numbers, "itos": dict(enumerate(letters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return ids[cut:].astype(np.int64), numbers


def timed(command: list[str], folder: Path) -> float:
    """Run a command with one thread. Returns its seconds."""
    begun = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return time.monotonic() - begun


@torch.no_grad()
def nanogpt_loss(clone: Path, held: np.ndarray) -> float:
    """Nats by letter of the model that nanoGPT's program saved."""
    sys.path.insert(0, str(clone))
    from model import GPT, GPTConfig  # of nanoGPT

    saved = torch.load(clone / "out-shakespeare-char" / "ckpt.pt", map_location="cpu", weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    total = count = 0
    for first in range(0, len(held) - 1, ROW):
        ids, targets = held[first : first + ROW], held[first + 1 : first + ROW + 1]
        logits, _ = model(torch.tensor(ids[None, : len(targets)]), torch.tensor(targets[None]))
        total += float(functional.cross_entropy(logits[0], torch.tensor(targets), reduction="sum"))
        count += len(targets)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/lm/shakespeare/input.txt")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/letters"))
    options = parser.parse_args()
    clone, run_dir = options.nanogpt.resolve(), options.run_dir.resolve()
    held, _ = prepared(clone, options.data.read_text())
    command = f"""train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
        --log_interval=100 --block_size={ROW} --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
        --max_iters={options.steps} --lr_decay_iters={options.steps} --dropout=0.0"""
    seconds = timed([sys.executable, *command.split()], clone)
    print(f"nanoGPT   {nanogpt_loss(clone, held):.4f} nats by letter, {seconds:.0f} s", flush=True)
    command = f"""-m lockstep train lm data.train={options.data.resolve()} task.tokenizer=characters task.length={ROW}
        batch.global=12 train.epochs=null train.min_steps=null train.steps={options.steps} train.eval_every_epochs=null
        train.eval_every_steps={options.steps} --nproc {options.nproc} --run-dir {run_dir}"""
    seconds = timed([sys.executable, *command.split()], ROOT)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    loss = [line["eval/loss"] for line in lines if "eval/loss" in line][-1]
    print(f"Lockstep  {loss:.4f} nats by letter, {seconds:.0f} s on {options.nproc} ranks", flush=True)


if __name__ == "__main__":
    main()
