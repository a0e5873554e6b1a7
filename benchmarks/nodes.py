"""Several nodes as network namespaces with their own addresses, gloo between them: exactness, and time to recover.

    python benchmarks/nodes.py [--rounds 3] [--parts exact,slow,killed,lost,cut,joined]

Requires Linux and root. One rank per node, one thread per rank. `exact`: digits, one epoch, on 2 and on 3 nodes; the
weights must be bitwise equal to those of as many ranks on one node. `slow`: the same on 2 nodes, over a link with 200
ms of delay in each direction and 1 % loss. The other parts measure seconds from an event to the first new step, in a
training on nodes that may come and go (`--nnodes 1:3`): a rank is `killed`; a node is `lost` (its launcher and ranks
are killed); its link is `cut`; a node has `joined` (from when its command is started).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import spread
from torch import nn
from torch.utils.data import TensorDataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from lockstep import Task  # noqa: E402
from lockstep.core.checkpoint import files, store  # noqa: E402
from tests import processes  # noqa: E402
from tests.namespaces import Namespaces, Training, kill, tree, why_not  # noqa: E402

DIGITS = ["digits", "train.epochs=1", "train.eval_every_epochs=0", "checkpoint.every_steps=5", "log.every_steps=5"]
SLOW = [f"{Path(__file__).resolve()}:Slow", "task.step_s=0.05", "train.steps=1000000", "checkpoint.every_steps=20"]
LOG = ["log.writers=[text_log,json_lines]", "device=cpu"]


class Slow(Task):
    """A small model with steps of a given duration."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s

    def train_data(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(400, 10, generator=generator)
        return TensorDataset(inputs, inputs[:, :5].tanh())

    def model(self):
        return nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 5))

    def loss(self, model, batch):
        if model.training:
            time.sleep(self.step_s)
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


def weights(run):
    newest = store.listed(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in one[1] | other[1])


def one_node(folder, ranks):
    run = folder / f"one-{ranks}"
    command = processes.command("train", *DIGITS, *LOG, "--nproc", ranks, "--run-dir", run)
    subprocess.run(command, check=True, capture_output=True, env=processes.environment())
    return weights(run)


def exact(folder, counts=(2, 3), **link):
    for count in counts:
        with Namespaces(count, **link) as cluster:
            training = Training(cluster, folder / f"nodes-{count}-{len(link)}", str(count), *DIGITS, *LOG)
            begun = time.monotonic()
            for node in reversed(range(count)):  # the node with the store comes last
                training.start(node)
            codes = training.wait()
            assert not any(codes.values()), training.output()
            seconds = time.monotonic() - begun
            relay = cluster.relay
        verdict = "bit-identical" if same(weights(training.run), one_node(folder, count)) else "DIFFERENT"
        lost = f", {relay.dropped} of {relay.passed + relay.dropped} packets lost" if relay else ""
        print(f"digits on {count} nodes against {count} ranks on one: {verdict} ({seconds:.0f} s{lost})", flush=True)


def recover(folder, number, parts):
    """One training in which all events happen."""
    found = {}

    def measure(name, happen):
        found[name] = training.event(happen)
        print(f"  {name}: {found[name]:.1f} s, resumed at step {training.starts()[-1][1]}", flush=True)

    with Namespaces(3) as cluster:
        training = Training(cluster, folder / f"recover-{number}", "1:3", *SLOW, *LOG, "log.every_steps=1")
        training.start(0)
        training.start(1)
        processes.wait_for(lambda: "2 nodes: " in training.output() and training.starts(), timeout=180)
        training.wait_for_step(training.step() + 30)
        if "killed" in parts:
            victim = tree(training.nodes[1].pid)[-1]
            measure("killed", lambda: kill([victim]))
        if {"joined", "lost"} & set(parts):
            measure("joined", lambda: training.start(2))
            measure("lost", lambda: kill(tree(training.nodes[2].pid)))
        if "cut" in parts:
            measure("cut", lambda: cluster.cut(1))
        training.nodes[0].terminate()
        training.nodes[0].wait(60)
    return {part: seconds for part, seconds in found.items() if part in parts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="exact,slow,killed,lost,cut,joined")
    chosen = parser.parse_args()
    reason = why_not()
    if reason:
        sys.exit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = chosen.parts.split(",")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-nodes-") as name:
        folder = Path(name)
        os.environ["LOCKSTEP_CACHE"] = str(folder / "cache")
        if "exact" in parts:
            exact(folder)
        if "slow" in parts:
            exact(folder, counts=(2,), delay_s=0.2, loss=0.01)
        if set(parts) - {"exact", "slow"}:
            rounds = [recover(folder, number, parts) for number in range(chosen.rounds)]
            for part in rounds[0]:
                seconds = [one[part] for one in rounds]
                print(f"{part}: {spread(seconds, '.1f')} s")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
