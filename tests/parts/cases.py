"""What several tests of the logs use."""

from pathlib import Path

from lockstep.core.writer import RunInfo


def run_info(folder, first_step=0, last_step=10):
    config = {"batch": {"global": 24}}
    return RunInfo(
        name="one",
        folder=Path(folder),
        first_step=first_step,
        last_step=last_step,
        world_size=2,
        device="cpu",
        config=config,
    )
