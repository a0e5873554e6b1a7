"""Real faults of one of two nodes, as far as one machine can make them: is each reported, and after how many seconds?

    python benchmarks/preflight.py            # requires root: node b has its own mounts
    python benchmarks/preflight.py --cost     # the cost of the checks for two ranks of one machine

Two launchers on this machine are the nodes `a` and `b`. Different folders are mounts that only `b` sees (`unshare -m`).
A `sitecustomize.py` for `b` replaces what one machine cannot have twice (a different torch, a GPU, a clock).
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import free_port

COMMAND = [sys.executable, "-m", "lockstep"]
PATIENCE_S = 90
TASK = """
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from lockstep import Task

class Mine(Task):
    def __init__(self, train):
        self.train = train
    def model(self):
        return torch.nn.Linear(4, 1)
    def train_data(self):
        numbers = torch.frombuffer(bytearray(Path(self.train).read_bytes()), dtype=torch.uint8).float().reshape(-1, 4)
        return TensorDataset(numbers, numbers.sum(1, keepdim=True))
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()
"""
# name: (code for b's interpreter, commands in b's own mounts, other keys of b, words that the error must contain)
FAULTS = {
    "another torch": ("import torch; torch.__version__ = '2.12.1'", [], [], ["torch", "2.12.1"]),
    "another key": ("", [], ["log.every_steps=7"], ["log.every_steps", "node b"]),
    "another code of the task": ("", ["mount --bind {other}/task.py {work}/task.py"], [], ["code on rank 1", "node b"]),
    "run directory read-only": (
        "",
        ["mount --bind {run} {run}", "mount -o remount,ro,bind {run}"],
        [],
        ["Read-only", "node b"],
    ),
    "run directory not shared": ("", ["mount -t tmpfs none {run}"], [], ["cannot see", "node b"]),
    "run directory full": (
        "",
        ["mount -t tmpfs -o size=8k none {run}", "cp /bin/ls {run}/x || true"],
        [],
        ["No space", "node b"],
    ),
    "no data": ("", ["mount -t tmpfs none {work}/data"], [], ["data.train is nothing", "node b"]),
    "other samples, as many": (
        "",
        ["mount --bind {other}/data {work}/data"],
        [],
        ["different training data", "node b"],
    ),
    "one GPU for both": ("{devices}.Cpu.identity = lambda self: 'GPU-1'", [], [], ["share the device GPU-1"]),
    "GPU in use": (
        "{devices}.Cpu.free_memory = lambda self: (1 << 28, 80 << 30)\n"
        "{devices}.Cpu.users = lambda self: ['process 4711 (python) holds 79000 MiB']",
        [],
        [],
        ["process 4711", "node b"],
    ),
    "clock 90 s behind": (
        "import time; now = time.time; time.time = lambda: now() - 90",
        [],
        [],
        ["clock of node b is 90 s"],
    ),
    "slow network card": (
        "from lockstep.launch.preflight import links; import time; send = links._send\n"
        "links._send = lambda *arguments: (time.sleep(0.05), send(*arguments))",
        [],
        [],
        ["connection is slow (a to b"],
    ),
}


def start(node: str, command: list[str], folder: Path, code: str, mounts: list[str]) -> subprocess.Popen[str]:
    shim = folder / f"shim-{node}"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(code.replace("{devices}", "__import__('lockstep.core.devices').devices"))
    paths = [str(shim), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"LOCKSTEP_NODE": node, "PYTHONPATH": os.pathsep.join(paths if code else paths[1:])}
    if mounts:
        places = {"run": folder / "run", "work": folder / "work", "other": folder / "other"}
        line = " && ".join([*(mount.format(**places) for mount in mounts), f"exec {shlex.join(command)}"])
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", line]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def try_fault(name: str) -> bool:
    code, mounts, keys, words = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="preflight-") as text:
        folder = Path(text)
        for place, content in (("work", bytes(range(200)) * 2), ("other", bytes(range(1, 201)) * 2)):
            (folder / place / "data").mkdir(parents=True)
            (folder / place / "data" / "numbers").write_bytes(content)
            (folder / place / "task.py").write_text(TASK + ("x = 1\n" if place == "other" else ""))
        (folder / "run").mkdir()
        target = [f"{folder}/work/task.py:Mine", f"data.train={folder}/work/data/numbers", "train.steps=2"]
        command = [*COMMAND, "train", *target, "batch.global=8", "log.pictures=0", "log.model_summary=false"]
        several = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}", "--wait-for-nodes", "30"]
        options = ["--run-dir", str(folder / "run"), "--nproc", "1", *several]
        begun = time.monotonic()
        both = "same device" in words[0]
        nodes = [
            start("a", [*command, *options], folder, code if both else "", []),
            start("b", [*command, *keys, *options], folder, code, mounts),
        ]
        said = []
        for node in nodes:
            try:
                said.append(node.communicate(timeout=PATIENCE_S)[0])
            except subprocess.TimeoutExpired:
                node.kill()
                said.append(node.communicate()[0])
        seconds = time.monotonic() - begun
        log = folder / "run" / "train.log"
        found = "\n".join([*said, log.read_text() if log.exists() else ""])
        line = next((line.strip() for line in found.splitlines() if all(word in line for word in words)), "")
        codes = ", ".join(str(node.returncode) for node in nodes)
        print(f"| {name} | {seconds:.1f} | {codes} | {line[:260] or 'NOT NAMED: ' + found[-600:]} |", flush=True)
        return bool(line)


def cost(rounds: int) -> None:
    """Seconds of the checks, on the slowest rank, with two ranks of one node that have already joined."""
    code = (
        "import time; from pathlib import Path; from lockstep.core.parallel.world import join_world\n"
        "from lockstep.launch.preflight import run; from lockstep.launch.preflight.facts import Subject\n"
        "def main(_):\n"
        "    with join_world('cpu') as world:\n"
        "        times = []\n"
        f"        for _ in range({rounds}):\n"
        "            world.all_sum([0.0]); vars(world).pop('nodes', None)\n"
        "            begun, worked = time.perf_counter(), time.process_time()\n"
        "            run.check(Subject({'a': 1}, '', Path('runs/none'), {}, None, False), world)\n"
        "            times.append((time.perf_counter() - begun, time.process_time() - worked))\n"
        "        found = world.gather(times)\n"
        "        if found:\n"
        "            for place, what in enumerate(('of the clock', 'of the CPU')):\n"
        "                slowest = [max(one[place] for one in both) * 1000 for both in zip(*found)]\n"
        "                median = sorted(slowest)[len(slowest) // 2]\n"
        "                print(f'ms {what}: first {slowest[0]:.1f}, then median {median:.1f}, '\n"
        "                      f'most {max(slowest[1:]):.1f}', flush=True)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "measured.py").write_text(code)
        begin = "from lockstep.launch import launcher; import measured; "
        begin += "launcher.prepare(2); launcher.launch([], 2, main=measured.main)"
        environment = os.environ | {"PYTHONPATH": folder}
        subprocess.run([sys.executable, "-c", begin], env=environment, check=True, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--only", help="run only faults whose names contain this")
    options = parser.parse_args()
    if options.cost:
        cost(20)
        return
    print(f"load {os.getloadavg()[0]:.1f}\n| fault of node b | seconds | exit codes | message |\n|---|---:|---|---|")
    chosen = [name for name in FAULTS if options.only is None or options.only in name]
    named = [try_fault(name) for name in chosen]
    sys.exit(not all(named))


if __name__ == "__main__":
    main()
