"""A reader of the output that ends early, such as `head`, is no error of a file."""

import os
import subprocess
import sys

from tests.processes import HANG_S


def test_a_closed_pipe_ends_compare_without_an_error_text(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("task: {kind: toy}\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lockstep", "compare", str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
