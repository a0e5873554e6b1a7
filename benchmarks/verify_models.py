"""`lockstep verify` on small, new models of many families of the package `transformers`.

    .venv/bin/python benchmarks/verify_models.py [FAMILY ...] [--nproc 2] [--checks a,b] [--steps 4] [--full]

The families and their task are in `tests/verify/transformer_models.py`. Every task is right, so each fault is a false
alarm, or names something that is really so in the model. A line per family tells how many checks passed, and which were
not shown or found a fault, with the reason. The exit code is 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lockstep.core.errors import LockstepError
from lockstep.recipes import config_file
from lockstep.verify import command
from lockstep.verify.result import CheckResult
from lockstep.verify.workers import Workers
from tests.verify.transformer_models import FAMILIES, arguments


def verify(family: str, folder: Path, workers: Workers, options: argparse.Namespace) -> list[CheckResult]:
    """The results of the checks of one family."""
    target, *overrides = arguments(family)
    settings = config_file.load(target, overrides)
    config = settings.model_copy(update={"batch": settings.batch.resolve(options.nproc)}).model_dump(by_alias=True)
    checks = options.checks.split(",") if options.checks else ()
    how = {"checks": checks, "quick": not options.full, "steps": options.steps, "workers": workers}
    return command.verify(config, options.nproc, folder, tell=lambda _: None, **how).checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--checks", default="")
    parser.add_argument("--steps", type=int, help="of each training that is compared with another")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    faults = 0
    with tempfile.TemporaryDirectory() as root:
        workers = Workers(Path(root, "verify.log"))  # the same processes for all families: transformers loads slowly
        try:
            for family in options.families or FAMILIES:
                begun = time.perf_counter()
                try:
                    results = verify(family, Path(root, family), workers, options)
                except LockstepError as error:
                    results = [CheckResult("fault", str(error), name="task")]
                words = {status: [one for one in results if one.status == status] for status in ("not shown", "fault")}
                passed = len(results) - sum(map(len, words.values()))
                seconds = time.perf_counter() - begun
                verdict = "FAULT" if words["fault"] else "right"
                left_out = ", ".join(one.name for one in words["not shown"]) or "none"
                faults += bool(words["fault"])
                print(
                    f"{verdict} {family:<20} {passed:>2} passed, not shown: {left_out}  ({seconds:.0f} s)", flush=True
                )
                for one in [*words["fault"], *words["not shown"]]:
                    print(f"    {one.status:<9} {one.name}: {one.reason[:400]}", flush=True)
        finally:
            workers.close()
    print(f"{len(options.families or FAMILIES)} families, {faults} with faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
