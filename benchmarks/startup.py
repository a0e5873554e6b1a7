"""Seconds from the command to the end of the first step, each in separate processes, compared with a plain loop.

    python benchmarks/startup.py [--rounds 7] [--ranks 1 2 8] [--launches 0]

The plain loop runs as `python` on one rank and under `torchrun` on several; Lockstep as `lockstep train`, and with
`--cold`. The three alternate; the result is the median of ratios to the plain loop, by the clock and by the processor
time of all processes. Then the memory of all processes while they train (pages that processes share are divided among
them: PSS), `lockstep --help`, and `import lockstep`.

`--launches N` starts N trainings of two ranks in succession and prints which processes and files are left over.
"""

from __future__ import annotations

import argparse
import glob
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import ratios, spread, take_turns

THIS = str(Path(__file__).resolve())
LOCKSTEP = str(Path(sys.executable).parent / "lockstep")


def mark_first_step():
    """Record the time when the first step is done and the second begins."""
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["MARK"]).write_text(str(time.time()))


def plain_loop():
    """A hand-written loop with DDP, tqdm and TensorBoard."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))
    loader = DataLoader(data, 32 // world, sampler=DistributedSampler(data, world, rank))
    writer = SummaryWriter(tempfile.mkdtemp()) if rank == 0 else None
    bar = tqdm(total=2, disable=rank > 0)
    for step, (inputs, targets) in enumerate(loader):
        if step == 1:
            mark_first_step()
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update()
        if step == 1:
            break
    if writer is not None:
        writer.add_scalar("loss", float(loss), 1)
        writer.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ != "__main__":  # `lockstep train` reads its task from this file
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from lockstep import Task

    class Marked(Task):
        """The same model and data."""

        calls = 0

        def model(self):
            return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))

        def train_data(self):
            return TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))

        def loss(self, model, batch):
            self.calls += torch.is_grad_enabled()  # not the dry run before the first step
            if self.calls == 2:
                mark_first_step()
            return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


def environment(mark):
    """That of an installation, whose files Python has compiled."""
    return os.environ | {"MARK": str(mark), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


def first_step(command, folder):
    """Seconds until the first step is done, and the processor time of all processes until then."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    begun = time.time()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen(command, env=environment(mark), **quiet)
    while not mark.exists() and job.poll() is None:
        time.sleep(0.01)
    used = sum(processor_s(pid) for pid in tree(job.pid))
    if job.wait():
        raise subprocess.CalledProcessError(job.returncode, command)
    return float(mark.read_text()) - begun, used


def seconds(command):
    begun = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.time() - begun


def commands(ranks, folder, steps=2):
    """The plain loop, Lockstep, and Lockstep with cold starts."""
    plain = [sys.executable, THIS, "--plain"]
    if ranks > 1:
        plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *plain[1:]]
    task = [f"{THIS}:Marked", "device=cpu", f"train.steps={steps}"]
    ours = [LOCKSTEP, "train", *task, "--nproc", str(ranks), "--run-dir", str(folder / "run"), "--fresh"]
    return {"plain": plain, "lockstep": ours, "lockstep --cold": [*ours, "--cold"]}


def compare(ranks, rounds, folder):
    ways = {name: partial(first_step, command, folder) for name, command in commands(ranks, folder).items()}
    found = take_turns(ways, rounds, warm_up=1)
    plain = list(zip(*found.pop("plain"), strict=True))
    medians = [statistics.median(values) for values in plain]
    print(f"{ranks} ranks: plain {medians[0]:.2f} s, processors {medians[1]:.2f} s", flush=True)
    for name, results in found.items():
        ours = list(zip(*results, strict=True))
        medians = [statistics.median(values) for values in ours]
        by_clock, by_processor = (spread(ratios(*pair), ".3f") for pair in zip(ours, plain, strict=True))
        print(f"  {name}: {medians[0]:.2f} s, ratio {by_clock}; processors {medians[1]:.2f} s, ratio {by_processor}")


def processes():
    """The parent of each process of this machine, by process."""
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                text = file.read()
        except OSError:
            continue
        parents[int(path.split("/")[2])] = int(text.rpartition(")")[2].split()[1])
    return parents


def tree(pid):
    """A process and all that it started."""
    parents, found = processes(), [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def processor_s(pid):
    """The processor time of a process, and of those that it has waited for."""
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")


def proportional_mb(pid):
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def memory(ranks, folder):
    for name, command in commands(ranks, folder, steps=1_000_000).items():
        if name == "plain":
            continue
        mark = folder / "mark"
        mark.unlink(missing_ok=True)
        job = subprocess.Popen(
            command,
            env=environment(mark),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not mark.exists():
            time.sleep(0.1)
        time.sleep(3)
        parts = sorted((proportional_mb(pid) for pid in tree(job.pid)), reverse=True)
        print(f"{ranks} ranks, {name}: {sum(parts):.0f} MB in {len(parts)} processes", flush=True)
        job.terminate()
        job.wait()


def left_over(launches, folder):
    """Launch repeatedly with a separate folder for temporary files, which also marks our processes."""
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    mark = f"TMPDIR={temporary}\0".encode()

    def is_ours(pid):
        try:
            return mark in Path(f"/proc/{pid}/environ").read_bytes() and pid != os.getpid()
        except OSError:
            return False

    before = set(os.listdir("/dev/shm"))
    for launch in range(1, launches + 1):
        first_step(commands(2, folder)["lockstep"], folder)
        if launch % 10 == 0 or launch == launches:
            time.sleep(1)
            left = [pid for pid in processes() if is_ours(pid)]
            shared = sorted(set(os.listdir("/dev/shm")) - before)
            print(f"{launch} launches left processes {left} and files {os.listdir(temporary)} {shared}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--launches", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_loop()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.launches:
            left_over(options.launches, folder)
            return
        for ranks in options.ranks:
            compare(ranks, options.rounds, folder)
            memory(ranks, folder)
    helps = [seconds([LOCKSTEP, "--help"]) for _ in range(options.rounds)]
    imports = [seconds([sys.executable, "-c", "import lockstep"]) for _ in range(options.rounds)]
    print(f"lockstep --help: {statistics.median(helps):.3f} s; import lockstep: {statistics.median(imports):.3f} s")


if __name__ == "__main__":
    main()
