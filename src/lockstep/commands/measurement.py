"""`lockstep plan --measure`: on the ranks of this machine, of which rank 0 prints what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import local_ranks
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.config import RunConfig


def run(config: RunConfig, nproc: str, arguments: Sequence[str], *, utilisation: float, json_file: str | None) -> None:
    """Start the ranks, or be one of them.

    Args:
        nproc: ranks on this machine, or `auto`.
        arguments: of `lockstep plan --measure`, for the ranks.
        utilisation: that the estimate of a step's time takes.
        json_file: a file for the result as JSON, or `-`.
    """
    local_ranks.check_nproc(nproc)
    if "RANK" not in os.environ and nproc != "1":
        from lockstep.distributed import launch

        ranks = local_ranks.ranks_of(nproc)
        offloads = config.parallel.cpu_offload
        launch.prepare(ranks, modules=local_ranks.modules_of(config), host_computes=offloads)
        launch.launch(["plan", *arguments, "--measure"], ranks)
        return
    from lockstep.plan import calibrate, measure, measured

    found = measure.measure(config)
    if found is None:  # another rank than 0
        return
    rows = calibrate.calibrate(config, found, utilisation)
    written = json.dumps(measured.as_json(rows, found), indent=1)
    if json_file == "-":
        print(written)
        return
    print(measured.text(rows, found, calibrate.peak_flops(config, found)))
    if json_file is not None:
        try:
            Path(json_file).write_text(written + "\n", encoding="utf-8")
        except OSError as error:
            what, remedy = f"cannot be written: {error.strerror}", "give a place where you can write"
            raise UsageError(what, where=json_file, remedy=remedy) from error
        print(f"written: {json_file}")
