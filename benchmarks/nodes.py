"""Several nodes as network namespaces with addresses of their own, gloo between them: exactness, and time to recover.

    python benchmarks/nodes.py [--rounds 3] [--parts exact,slow,killed,lost,cut,joined]

Needs Linux and root. One rank on each node, one thread for each rank. `exact`: digits, one epoch, on 2 and on 3 nodes;
the weights must be bit for bit those of as many ranks on one node. `slow`: the same on 2 nodes, over a link with 200 ms
of delay in each direction and 1 % loss. The other parts measure seconds from an event to the first new step, in a
training on nodes that may come and go (`--nnodes 1:3`): a rank is `killed`; a node is `lost` (its launcher and ranks
are killed); its link is `cut`; a node has `joined` (from the moment when its command is given).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from lockstep.checkpoint import files, store  # noqa: E402
from tests import namespaces, processes  # noqa: E402

DIGITS = ["digits", "train.epochs=1", "train.eval_every_epochs=0", "checkpoint.every_steps=5", "log.every_steps=5"]
SLOW = [f"{HERE}/nodes_task.py:Slow", "task.step_s=0.05", "train.steps=1000000", "checkpoint.every_steps=20"]
LOG = ["log.writers=[text_log,json_lines]", "device=cpu"]
FIRST = re.compile(r"step (\d+)/\d+  .* after the beginning")


def weights(run):
    newest = store.available(run / "checkpoints")[0]
    assert not store.check(newest)
    return newest.step, dict(files.read(newest.path, newest.index))


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in one[1] | other[1])


class Training:
    """One training on the nodes of a cluster, and what its launchers print, with times."""

    def __init__(self, cluster, run, nnodes, arguments):
        self.cluster, self.run = cluster, run
        meeting = ["--nnodes", nnodes, "--rendezvous", cluster.address(0)]
        self.arguments = ["train", *arguments, *LOG, *meeting, "--run-dir", run]
        self.lines, self.nodes, self.threads = [], {}, []

    def start(self, node):
        self.nodes[node] = self.cluster.start(node, *self.arguments)
        self.threads.append(threading.Thread(target=self._read, args=(self.nodes[node],), daemon=True))
        self.threads[-1].start()

    def _read(self, process):
        for line in process.stdout:
            self.lines.append((time.monotonic(), line))
        process.wait()

    def wait(self):
        for thread in self.threads:
            thread.join()
        codes = [process.returncode for process in self.nodes.values()]
        assert not any(codes), "".join(line for _, line in self.lines)

    def starts(self):
        """Time and step of the first step of each start."""
        return [(when, int(found[1])) for when, line in self.lines if (found := FIRST.match(line))]

    def step(self):
        path = self.run / "metrics.jsonl"
        return path.read_text().count('"step"') if path.exists() else 0

    def event(self, name, happen):
        """Seconds from `happen` to the first new step."""
        before = len(self.starts())
        begun = time.monotonic()
        happen()
        processes.wait_for(lambda: len(self.starts()) > before, timeout=180)
        seconds = self.starts()[-1][0] - begun
        print(f"  {name}: {seconds:.1f} s, went on at step {self.starts()[-1][1]}", flush=True)
        more = self.step() + 3
        processes.wait_for(lambda: self.step() > more, timeout=60)
        return seconds


def tree(pid):
    below = [process for child in processes.children(pid) for process in tree(child)]
    return [pid, *below]


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def one_node(folder, ranks):
    run = folder / f"one-{ranks}"
    command = processes.command("train", *DIGITS, *LOG, "--nproc", ranks, "--run-dir", run)
    subprocess.run(command, check=True, capture_output=True, env=processes.environment())
    return weights(run)


def exact(folder, counts=(2, 3), **link):
    for count in counts:
        with namespaces.Namespaces(count, **link) as cluster:
            training = Training(cluster, folder / f"nodes-{count}-{len(link)}", str(count), DIGITS)
            begun = time.monotonic()
            for node in reversed(range(count)):  # the node with the store comes last
                training.start(node)
            training.wait()
            seconds = time.monotonic() - begun
            relay = cluster.relay
        verdict = "bit-identical" if same(weights(training.run), one_node(folder, count)) else "DIFFERENT"
        lost = f", {relay.dropped} of {relay.passed + relay.dropped} packets lost" if relay else ""
        print(f"digits on {count} nodes against {count} ranks on one: {verdict} ({seconds:.0f} s{lost})", flush=True)


def recover(folder, number, parts):
    """One training in which all events happen."""
    found = {}
    with namespaces.Namespaces(3) as cluster:
        training = Training(cluster, folder / f"recover-{number}", "1:3", [*SLOW, "log.every_steps=1"])
        training.start(0)
        training.start(1)
        processes.wait_for(lambda: training.starts() and training.step() > 30, timeout=180)
        processes.wait_for(lambda: any(" nodes: " in line or "2 nodes" in line for _, line in training.lines))
        if "killed" in parts:
            victim = tree(training.nodes[1].pid)[-1]
            found["killed"] = training.event("a rank is killed", lambda: kill([victim]))
        if {"joined", "lost"} & set(parts):
            found["joined"] = training.event("a node joins", lambda: training.start(2))
            found["lost"] = training.event("a node is lost", lambda: kill(tree(training.nodes[2].pid)))
        if "cut" in parts:
            found["cut"] = training.event("a link is cut", lambda: cluster.cut(1))
        training.nodes[0].terminate()
        training.nodes[0].wait(60)
    return {part: seconds for part, seconds in found.items() if part in parts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="exact,slow,killed,lost,cut,joined")
    chosen = parser.parse_args()
    reason = namespaces.why_not()
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
                print(f"{part}: median {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
