"""A request to stop that comes while ranks start: no rank begins its command."""

import os
from multiprocessing import connection

import pytest

from lockstep.core.errors import Preempted
from lockstep.core.parallel import heartbeat, launched
from lockstep.launch import rank_output

KNOWN = 7


def begin(folder):
    """Exit code of a rank whose command ends with `KNOWN` where the launcher can find the rank."""
    process = os.fork()
    if not process:
        os.environ[launched.FOLDER], os.environ["RANK"] = str(folder), "1"
        heartbeat.own.cache_clear()
        is_known = lambda: os._exit(KNOWN if heartbeat.all_in(folder)[0].pid == os.getpid() else 1)  # noqa: E731
        try:
            rank_output.call_with_stderr(connection.Connection(os.dup(2), readable=False), is_known)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(("asked", "code"), [(True, Preempted.exit_code), (False, KNOWN)])
def test_a_rank_begins_only_where_nobody_asked_to_stop_before(tmp_path, asked, code):
    if asked:
        (tmp_path / launched.STOP_FILE).write_text("SIGINT")
    assert begin(tmp_path) == code
