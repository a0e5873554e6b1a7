"""Memory and time of the loss of a language model: of all tokens at once, and in chunks (`task.loss_chunk`).

    python benchmarks/lm_loss.py [--vocabularies 32768 131072] [--tokens 2048] [--width 256] [--chunks 256 1024]
        [--rounds N]

A last layer in fp32 makes the logits, and the loss and the gradients of the layer and of its input are computed, with
one torch thread. Each way has a new process in each round, and the ways take turns. Memory is the peak of RSS above RSS
just before the passes, after a small pass: gradients, logits and what torch makes of them. Time is that of the second
pass, in seconds of the processor. The results are medians over the rounds. All ways must give the same loss and norms
of gradients, to 1e-4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from lockstep.tasks.lm import losses

PEAK = Path("/proc/self/clear_refs")


def megabytes(key):
    """VmRSS, or VmHWM: the most since `PEAK` was written to."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))


def passes(head, hidden, targets, chunk):
    """A forward and a backward pass. Returns the loss."""
    head.zero_grad(set_to_none=True)
    hidden.grad = None
    if chunk:
        loss = losses.total_in_chunks(head, hidden, targets, chunk)
    else:
        loss = losses.total(head(hidden), targets)
    (loss / len(targets)).backward()
    return loss.item()


def measured(vocabulary, tokens, width, chunk):
    """What one process finds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False)
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.randint(vocabulary, (tokens,))
    passes(nn.Linear(8, 8), torch.randn(8, 8, requires_grad=True), torch.zeros(8, dtype=torch.int64), chunk)
    PEAK.write_text("5")
    before = megabytes("VmRSS")
    passes(head, hidden, targets, chunk)
    begun = time.process_time()
    loss = passes(head, hidden, targets, chunk)
    seconds = time.process_time() - begun
    checks = [loss / tokens, float(hidden.grad.norm()), float(head.weight.grad.norm())]
    return {"peak": megabytes("VmHWM") - before, "seconds": seconds, "checks": checks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--tokens", type=int, default=2048, help="of a micro-batch")
    parser.add_argument("--width", type=int, default=256, help="of the last layer")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-process", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_process:
        print(json.dumps(measured(*json.loads(given.as_process))))
        return
    for vocabulary in given.vocabularies:
        found = {chunk: [] for chunk in (None, *given.chunks)}
        for _ in range(given.rounds):
            for chunk, of_rounds in found.items():
                options = json.dumps([vocabulary, given.tokens, given.width, chunk])
                command = [sys.executable, __file__, "--as-process", options]
                of_rounds.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        whole = found[None]
        for chunk, of_rounds in found.items():
            pairs = zip(of_rounds[0]["checks"], whole[0]["checks"], strict=True)
            assert all(abs(one - other) <= 1e-4 * abs(other) for one, other in pairs), chunk
            peak, seconds = (statistics.median(one[key] for one in of_rounds) for key in ("peak", "seconds"))
            ratio = statistics.median(
                one["seconds"] / other["seconds"] for one, other in zip(of_rounds, whole, strict=True)
            )
            name = f"chunks of {chunk}" if chunk else "at once"
            print(f"{vocabulary:7,} words, {name:14}  {peak:8.0f} MB  {seconds:6.2f} s  time x {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
