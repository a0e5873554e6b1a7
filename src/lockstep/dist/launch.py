"""Start ranks on this machine through torch's elastic agent, and say why one failed."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError, RankError

LAUNCHED = "LOCKSTEP_LAUNCHED"  # set in ranks that this module started: the launcher speaks for them


def launch(arguments: Sequence[str], nproc: int) -> None:
    """Run `python ARGUMENTS` as `nproc` ranks on this machine; returns when all ended well.

    Raises:
        RankError: a rank failed; names it, with its own words, and carries its exit code.
        KeyboardInterrupt: a signal asked to stop; the ranks were stopped too.
    """
    import torch.distributed.elastic.multiprocessing as elastic
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it would say of a failed rank, we say
    # Workers that share the agent's store can read a dead rank's address after a restart (pytorch#135712, #167288).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHED] = "1"
    if nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks that each take all cores slow each other down
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"lockstep-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=elastic.DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            raise _first_cause(error) from None
        except SignalException as signal:
            raise KeyboardInterrupt(str(signal)) from None


def report_failure(error: BaseException, text: str) -> None:
    """Leave `text` for the agent that started this rank (ours or the user's torchrun), where one did."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        secondary = isinstance(error, RankError)
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "secondary": secondary}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _first_cause(error: object) -> LockstepError:
    """Of all ranks that failed, the one that others failed because of."""
    causes = []
    for rank, failure in error.failures.items():  # type: ignore[attr-defined]
        message = failure.error_file_data.get("message", {})
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        ended_by_agent = failure.exitcode == -15
        causes.append((bool(extra.get("secondary")) or ended_by_agent, failure.timestamp, rank, failure))
    _, _, rank, failure = min(causes, key=lambda cause: cause[:3])
    if failure.exitcode < 0:
        hint = "often the system ran out of memory: lower batch.micro or the number of ranks" if failure.exitcode == -9 else None
        return RankError(f"rank {rank} was killed by signal {-failure.exitcode} ({failure.signal_name()})", remedy=hint)
    text = failure.error_file_data.get("message", {}).get("message") or "it left no word; see its output above"
    cause = RankError(f"rank {rank} failed: {text}")
    cause.exit_code = failure.exitcode
    return cause
