"""CPU time per step with and without metrics of the training (log.train_metrics), in one process, in turns.

    python benchmarks/train_metrics.py [--recipes digits segmentation] [--rounds 15] [KEY=VALUE ...]

A round is a training of `--steps` steps through Lockstep's own loop, without evaluation, once with and once without the
metrics; the order changes from round to round. What counts is the median over rounds of the difference and of the ratio
of their CPU times per step, with one thread: on a shared machine these vary less than times on the clock. Import, model
and data set are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path


def seconds_per_step(trainer, world, with_metrics):
    from lockstep.core import loop
    from lockstep.core.parallel.signals import StopConsensus, StopFlag
    from lockstep.core.train_metrics import TrainMetrics
    from lockstep.core.training_run import join_parts
    from lockstep.trainer import assemble

    task = trainer.task()
    prepared = assemble.prepare(trainer.setup, task, world)
    prepared.state.metrics = TrainMetrics(task, world) if with_metrics else None
    if with_metrics:
        prepared.state.metrics._make()  # imports torchmetrics
    begun = time.process_time()
    loop.fit(
        prepared.state,
        prepared.batches,
        plan=prepared.plan,
        stop=prepared.stop,
        intervals=loop.Intervals(log=50),
        parts=join_parts(prepared, ()),
        consensus=StopConsensus(world, StopFlag()),
    )
    return (time.process_time() - begun) / prepared.stop


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["digits"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=100)
    options, overrides = parser.parse_known_args()

    import torch

    from lockstep.core.parallel.world import join_world
    from lockstep.recipes import config_file
    from lockstep.trainer.trainer import Trainer

    torch.set_num_threads(1)
    for recipe in options.recipes:
        steps = [f"train.steps={options.steps}", "train.epochs=null", "device=cpu", "train.eval_every_epochs=0"]
        config = config_file.load(recipe, [*steps, *overrides])
        with join_world("cpu") as world, tempfile.TemporaryDirectory() as name:
            trainer = Trainer(config, run_dir=Path(name, "run"), quiet=True)
            trainer.config = trainer.config.model_copy(update={"batch": trainer.config.batch.resolve(1)})
            trainer.run_dir.mkdir()
            pairs = []
            for number in range(options.rounds + 1):
                order = (True, False) if number % 2 else (False, True)
                times = {wanted: seconds_per_step(trainer, world, wanted) * 1e3 for wanted in order}
                if number:  # the first round warms up
                    pairs.append((times[False], times[True]))
        without = statistics.median(a for a, _ in pairs)
        extra = statistics.median(b - a for a, b in pairs)
        ratios = [b / a for a, b in pairs]
        print(
            f"{recipe}: without {without:.3f} ms, metrics {extra:+.3f} ms, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
