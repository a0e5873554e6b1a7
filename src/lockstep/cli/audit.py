"""`lockstep audit`: the command `lockstep-audit` of the package torch-lockstep-audit, if it is installed."""

from __future__ import annotations

import typer

import lockstep
from lockstep.cli.commands import WORDS
from lockstep.cli.reporting import reporting
from lockstep.core.errors import UsageError

_REMEDY = f"in the clone of Lockstep {lockstep.__version__}: pip install -e packages/audit"


def audit(context: typer.Context) -> None:
    """Name what is silently wrong in a distributed training script."""
    with reporting(debug=False):
        try:
            import lockstep_audit.command
        except ModuleNotFoundError as error:
            if error.name != "lockstep_audit":
                raise
            raise UsageError("the audit is its own package, and is not installed", remedy=_REMEDY) from None
        if lockstep_audit.__version__ != lockstep.__version__:
            versions = f"torch-lockstep-audit is {lockstep_audit.__version__}, torch-lockstep {lockstep.__version__}"
            raise UsageError(f"{versions}: they are released together", remedy=_REMEDY)
    raise typer.Exit(lockstep_audit.command.main(context.meta[WORDS], name="lockstep audit"))
