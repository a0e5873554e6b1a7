"""Files and folders that a user names for a command to write: what is there already is not lost."""

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

WRITTEN = {"out", "output", "json_file", "chart", "profile", "write_baseline"}
"""Options and arguments of commands that name what is written."""
NEVER_OVERWRITE = {
    "shards": "it goes on behind its last whole shard",
    "doctor first-hour": "it takes an empty folder only",
}


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_command_that_writes_what_a_user_names_has_force():
    lacking = []
    for name, command in commands(typer.main.get_command(app)):
        options = {parameter.name for parameter in command.params if not getattr(parameter, "is_flag", False)}
        options |= {parameter.name for parameter in command.params if parameter.name == "force"}
        writes = options & WRITTEN
        writes -= {"profile"} if name in ("train", "run") else set()  # steps
        if writes and "force" not in options and name not in NEVER_OVERWRITE:
            lacking.append(f"{name}: {', '.join(sorted(writes))}")
    assert not lacking


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = ["train.steps=2", "log.writers=[text_log,json_lines]", "log.pictures=0", "device=cpu"]
    done = call("train", "toy", *settings, "--run-dir", folder / "run")
    assert done.exit_code == 0, done.stderr
    return folder / "run"


def test_a_file_that_exists_is_replaced_only_with_force(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    plan = ("plan", "toy", "--gpu-memory", "8GB")
    cases = [
        (("predict", trained, "--samples", 1, "--out", "rows.csv"), "rows.csv"),
        (("predict", trained, "--samples", 1, "--out", "rows"), "rows/predictions.jsonl"),
        (("report", trained, "--out", "page.html"), "page.html"),
        (("compare", trained, trained, "--out", "two.html"), "two.html"),
        (("export", trained, "state.pt", "--optimizer"), "state.pt"),
        ((*plan, "--json", "plan.json"), "plan.json"),
        ((*plan, "--chart", "plan.svg"), "plan.svg"),
        (("plan", "--advise", trained, "--json", "advice.json"), "advice.json"),
        (("replay", trained, "--step", 1, "--json", "step.json"), "step.json"),
        (("replay", trained, "--step", 1, "--profile", "trace.json"), "trace.json"),
        (("init", "first.py"), "first.py"),
        (("init", "--from", "ddp", "--out", "ddp.md"), "ddp.md"),
        (
            ("launch", "slurm", "toy", "--nodes", 1, "--gpus-per-node", 1, "--time", "1:00:00", "--output", "a.sbatch"),
            "a.sbatch",
        ),
    ]
    for arguments, name in cases:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        (file.parent / ".lockstep-predictions").touch()
        file.write_text("by hand")
        done = call(*arguments)
        case = f"{arguments}: {done.stderr}"
        assert done.exit_code == 2, case
        assert "it is not overwritten" in done.stderr, case
        assert f"{name}: exists" in done.stderr, case
        assert "--force" in done.stderr, case
        assert file.read_text() == "by hand", case
        if arguments[0] not in ("replay", "compare") and "--advise" not in arguments:  # they take seconds
            done = call(*arguments, "--force")
            assert done.exit_code == 0, f"{arguments}: {done.output}"
            assert b"by hand" not in file.read_bytes(), case


def test_what_takes_long_is_refused_before_it_begins(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit(9)\n")
    kept = tmp_path / "kept.json"
    kept.write_text("by hand")
    for arguments in (
        ("audit", "--output", kept, "script.py"),
        ("audit", "--write-baseline", kept, "script.py"),
        ("doctor", "check-device", "--json", kept, "--seconds", 0),
        ("tune", "lr", "toy", "--out", "kept.svg"),
    ):
        (tmp_path / "kept.svg").write_text("by hand")
        done = call(*arguments)
        assert (done.exit_code, "--force" in done.stderr) == (2, True), f"{arguments}: {done.output}"
        assert kept.read_text() == (tmp_path / "kept.svg").read_text() == "by hand"


def test_force_deletes_an_earlier_export_and_no_other_folder(trained, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    assert call("export", trained, out, "--no-program").exit_code == 0
    (out / "model.pt2").write_text("of the export before")
    refused = call("export", trained, out)
    assert (refused.exit_code, "is an earlier export" in refused.stderr, "--force" in refused.stderr) == (2, True, True)
    done = call("export", trained, out, "--no-program", "--force")
    assert done.exit_code == 0, done.stderr
    assert (out / "model.safetensors").is_file()
    assert not (out / "model.pt2").exists()
    other.mkdir()
    (other / "thesis.tex").write_text("by hand")
    for more in ((), ("--force",)):
        refused = call("export", trained, other, *more)
        assert (refused.exit_code, "exists and is not empty" in refused.stderr) == (2, True)
    assert (other / "thesis.tex").read_text() == "by hand"


def test_a_place_where_no_file_can_be_is_an_error_and_an_own_file_is_replaced(tmp_path):
    file = tmp_path / "page.html"
    check_replaceable(None, force=False)
    check_replaceable(file, force=False)
    file.write_text("<!-- the mark -->")
    check_replaceable(file, force=False, mark="the mark")
    check_replaceable(file, force=True)
    for mark, says in ((None, "exists: it is not"), ("another", "exists, and this command did not write it")):
        with pytest.raises(UsageError, match=says):
            check_replaceable(file, force=False, mark=mark)
    for path, says in ((tmp_path, "is a folder"), (tmp_path / "nowhere" / "a.json", "there is no such folder")):
        for force in (False, True):
            with pytest.raises(UsageError, match=says):
                check_replaceable(path, force=force)
