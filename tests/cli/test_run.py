"""`lockstep run`, before it starts a script."""

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app


@pytest.mark.parametrize(
    ("script", "arguments", "warns"),
    [
        ("print('it ran')", ["--nproc", "2"], True),
        ("print('it ran')", ["--max-restarts=1"], True),
        ("print('it ran')  # --nproc is its own", ["--nproc", "2"], False),
        ("print('it ran')", ["--lr", "0.1"], False),
    ],
)
def test_an_option_after_a_script_that_does_not_know_it_is_a_warning(tmp_path, script, arguments, warns):
    path = tmp_path / "train.py"
    path.write_text(script)
    done = CliRunner().invoke(app, ["run", str(path), *arguments])
    assert done.exit_code == 0, done.output
    assert (f"write lockstep run {arguments[0].partition('=')[0]} VALUE {path}" in done.stderr) == warns
