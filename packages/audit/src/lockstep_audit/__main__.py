"""`python -m lockstep_audit SCRIPT.py ...`: run a script as Python would, and record what it does.

Each rank runs this, under any launcher. `lockstep-audit` starts its ranks with this command and then writes the report.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

from lockstep_audit import this_process, words
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.judge import USAGE, AuditVerdict, judge_here
from lockstep_audit.observe import boot, places
from lockstep_audit.observe.recorder import recorder
from lockstep_audit.settings import JUDGED_OUTSIDE, NOTEBOOK, Settings


def _options() -> argparse.ArgumentParser:
    name = "python -m lockstep_audit"
    usage = f"{name} [OPTIONS] SCRIPT|-m MODULE [ARGS]..."
    parser = argparse.ArgumentParser(prog=name, usage=usage, allow_abbrev=False)
    get = os.environ.get
    parser.add_argument("--folder", type=Path, default=get(boot.FOLDER), help="folder for events")
    parser.add_argument("--every", type=int, default=int(get(boot.EVERY, "50")), help="examine every K-th step")
    parser.add_argument("--patience", type=float, default=float(get(boot.PATIENCE, "60")), help="seconds until a hang")
    parser.add_argument("--no-probe", action="store_true", default=get(boot.PROBE) == "0", help="do not read samples")
    return parser


def main(arguments: list[str] | None = None, settings: Settings | None = None) -> None:
    """Run a script or module as `__main__`, observed. End the process as the script would.

    Under a foreign launcher, the first rank then writes the report and ends with the report's exit code.

    Args:
        settings: the options of the report.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = _options()
    try:
        own, target = words.split(parser, given)
    except AuditUsageError as error:
        parser.error(str(error))
    options = parser.parse_args(own)
    has_module = target[:1] == ["-m"]
    name, *rest = target[has_module:] or [""]
    if "ipykernel" in sys.modules or name.endswith(".ipynb"):
        parser.exit(USAGE, NOTEBOOK + "\n")
    if options.every < 1 or options.patience <= 0:
        parser.error(f"--every {options.every} must be at least 1, and --patience {options.patience} above 0")
    if not name:
        parser.error("name a script, or a module with -m")
    if not has_module and not Path(name).exists():
        parser.error(f"script {name} does not exist")
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", os.getpid())
    run_id = os.getppid() if run_id == "none" else run_id  # a launcher without a run id: its ranks have one parent
    folder = options.folder or Path(f"lockstep-audit-{run_id}")
    boot.activate(folder, every=options.every, patience=options.patience, probe=not options.no_probe)
    recorder.is_main = True

    def report(status: int) -> int:
        """The exit code of the first rank, which writes the report. A script that failed keeps its own code."""
        if this_process.rank() or JUDGED_OUTSIDE in os.environ:
            return status
        recorder.end()
        verdict = judge_here(folder, settings or Settings())
        return status if verdict in (AuditVerdict.CLEAN, AuditVerdict.FAILED) else verdict.exit_code

    boot.on_leave.append(report)
    try:
        run(name if has_module else None, None if has_module else name, rest)
    finally:
        boot.on_leave.clear()
        if code := report(0):
            sys.exit(code)


def run(module: str | None, script: str | None, arguments: list[str]) -> None:
    """Run a module or script as `__main__`, with its own arguments and search path."""
    try:
        if module:
            sys.argv = [module, *arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            assert script is not None
            sys.argv = [script, *arguments]
            _run_script(script)
    except SystemExit as ended:
        recorder.note_exit(ended.code, None)
        raise
    except KeyboardInterrupt as error:
        recorder.note_exit(130, error)
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        error.__traceback__ = trace
        recorder.note_exit(1, error)
        recorder.guard("exit", recorder.end)  # now: ranks that lose this one may have it killed
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def _is_ours(path: str) -> bool:
    return path == __file__ or path == "<frozen runpy>"


def _run_script(script: str) -> None:
    """Run the script as `python SCRIPT` does. `__main__` stays the script until the end, for children and `atexit`."""
    path = os.path.abspath(script)
    if os.path.isdir(path) or not path.endswith(".py"):
        runpy.run_path(path, run_name="__main__")
        return
    places.declare_user(path)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module: Any = types.ModuleType("__main__")
    main_module.__file__, main_module.__spec__, main_module.__loader__ = path, None, None
    main_module.__builtins__ = __builtins__
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


if __name__ == "__main__":
    main()
