"""What marks a run directory, what in it is ours, and that nothing of the user is deleted or replaced."""

import os
import shutil
from pathlib import Path

import pytest

from lockstep import Trainer
from lockstep.configs import config_file
from lockstep.core import run_folder
from lockstep.core.errors import UsageError
from lockstep.parts.writer_kinds import files_of_writers
from tests import own_tasks, runs
from tests.core.checkpoint.cases import commit
from tests.test_run_directory import claimed

WRITERS = {"log": {"writers": ["text_log", "json_lines", "tensorboard"], "pictures": 2}}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("LOCKSTEP_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(f"of the user: {name}\n")


def content(folder):
    """The text of every file below a folder, by name, and `None` for a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


# ---- which folders are refused


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_the_user_stays_as_it_is_and_is_refused_with_the_names_in_the_way(tmp_path, fresh):
    write(tmp_path, "config.yaml", "source/main.py", "task/a.txt", "samples/0.png", "metrics.jsonl", "report.html")
    write(tmp_path, "checkpoints/step-00000001/weights", "pictures/x.png", "memory/x", "profile/x", ".gitignore")
    before = content(tmp_path)
    with pytest.raises(UsageError) as caught:
        Trainer(runs.config(), run_dir=tmp_path, fresh=fresh, quiet=True).fit(own_tasks.Plain())
    assert content(tmp_path) == before  # nor is there a lock
    names = "checkpoints/, config.yaml, memory/, metrics.jsonl, pictures/, profile/, report.html, samples/ and 2 more"
    assert caught.value.what == f"the folder is not a run directory, and is not empty: it has {names}"
    assert (caught.value.where, "Trainer(run_dir=...)" in caught.value.remedy) == (str(tmp_path), True)


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "train.py", "metrics.jsonl", "data/x.csv", "environment.json", "config.yaml", "runs/a/b/c.log/d"],
)
def test_a_single_file_of_the_user_is_enough(tmp_path, name):
    write(tmp_path, name)
    with pytest.raises(UsageError, match=f"it has {name.partition('/')[0]}"):
        claimed(tmp_path)
    assert content(tmp_path).keys() == {str(path) for path in (Path(name), *Path(name).parents)} - {"."}


def test_a_folder_of_runs_is_refused_and_a_run_in_it_is_named(tmp_path):
    claimed(tmp_path / "digits")
    with pytest.raises(UsageError, match=r"it has digits/") as caught:
        claimed(tmp_path, fresh=True)
    assert caught.value.remedy.endswith(f"such as {tmp_path / 'digits'}")
    assert sorted(os.listdir(tmp_path)) == ["digits"]


def test_what_others_put_there_before_a_run_is_no_obstacle_and_stays(tmp_path):
    names = (".gitkeep", ".nfs0001", ".git/x", ".lock", "train.log", "slurm-12.out", "job.o123", "job.e123.4", "a.err")
    names += ("output.txt", "slurm-requeues", "verify.json", "verify.html", "verify.log", "hang-20260101-120000.txt")
    names += ("verify-ab12_x9z/task/x", "logs/0.log", "checkpoints/", "samples/", "lost+found/x")
    write(tmp_path, *names)
    before = content(tmp_path)
    claimed(tmp_path, fresh=True)
    after = content(tmp_path)
    assert set(after) == {*before, "config.yaml", "environment.json"}
    assert {name for name in before if after[name] != before[name]} == {".lock"}


def test_all_that_was_ever_a_run_is_accepted(tmp_path):
    folder = tmp_path / "run"
    claimed(folder)
    (folder / ".lock").unlink()
    write(folder, "notes.txt", "data/x")
    shutil.copytree(folder, tmp_path / "copy")
    claimed(tmp_path / "copy")  # a copy without hidden files
    (folder / "config.yaml").unlink()
    claimed(folder)  # config.yaml is lost

    # An earlier version wrote config.yaml first, and was killed before it wrote environment.json.
    shutil.rmtree(folder)
    write(folder, "source/x.py")
    (folder / "config.yaml").write_text(config_file.to_yaml(config_file.parse(runs.config(), needs_task=False)))
    assert not run_folder.is_run(folder)  # somebody may have copied the file
    (folder / ".lock").write_text("process 12 on host\n")
    assert run_folder.is_run(folder)
    (folder / ".lock").unlink()
    commit(folder / "checkpoints", 1)
    assert run_folder.is_run(folder)  # a copy of the checkpoints and the config


# ---- what --fresh deletes


def test_fresh_deletes_all_that_a_run_wrote_and_keeps_all_files_of_the_user(tmp_path):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 2}, **WRITERS)
    Trainer(settings, run_dir=tmp_path, quiet=True, profile="2-3").fit(own_tasks.Classes())
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/rank0.pickle").write_text("")
    of_run = set(content(tmp_path))
    assert {"checkpoints", "source", "tensorboard", "profile", "metrics.jsonl", "model.txt"} <= of_run
    mine = ("notes.txt", "samples/mine.png", "pictures/a.png", "profile/a", "memory/a", "data/train/x", "out.log")
    mine += ("checkpoints/mine/x", "checkpoints/step-00000004.bak/x", "tensorboard/mine/x", "step-00000001/x")
    write(tmp_path, *mine)
    claimed(tmp_path, fresh=True)
    after = content(tmp_path)
    files = {name for name, text in after.items() if text is not None}
    assert files == {*mine, ".lock", "config.yaml", "environment.json"}
    assert all(after[name] == f"of the user: {name}\n".encode() for name in mine)
    assert not (tmp_path / "source").exists()


def test_links_stay_or_are_followed_and_what_a_single_link_leads_to_stays(tmp_path):
    """A link to a large disk stays, and what is ours behind it goes. A file of the user is never deleted by a link."""
    folder, large = tmp_path / "run", tmp_path / "large"
    write(large, "mine.txt", "code/main.py", "log.txt", "old/__0_0.distcp")
    folder.mkdir()
    (folder / "checkpoints").symlink_to(large / "checkpoints")
    with pytest.raises(UsageError, match="it has checkpoints"):
        claimed(folder)  # it leads nowhere
    (large / "checkpoints").mkdir()
    settings = runs.config(train={"steps": 4})
    Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Plain())
    shutil.rmtree(folder / "source")
    (folder / "source").symlink_to(large / "code")
    (folder / "train.log").unlink()
    (folder / "train.log").symlink_to(large / "log.txt")
    (large / "checkpoints" / "step-00000002").symlink_to(large / "old")
    (large / "checkpoints" / "mine").write_text("")
    Trainer(settings, run_dir=folder, fresh=True, quiet=True).fit(own_tasks.Plain())
    assert (folder / "checkpoints").is_symlink()
    assert sorted(os.listdir(large / "checkpoints")) == ["mine", "step-00000004"]
    assert {name: text for name, text in content(large).items() if text and "checkpoints" not in name} == {
        name: f"of the user: {name}\n".encode() for name in ("mine.txt", "code/main.py", "log.txt", "old/__0_0.distcp")
    }


def test_a_kill_in_the_middle_of_fresh_leaves_a_run_directory(tmp_path, monkeypatch):
    claimed(tmp_path)
    write(tmp_path, "metrics.jsonl", "train.log", "source/x.py", "report.html")
    left = list(run_folder.ours(tmp_path, files_of_writers([])))
    assert left[-1].name == "environment.json"
    for path in left[:-1]:
        assert run_folder.is_run(tmp_path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    claimed(tmp_path, fresh=True)


@pytest.mark.parametrize("file", ["", ".", "/etc", "../other", "a/../../b"])
def test_a_writer_cannot_name_what_lies_outside(tmp_path, file):
    path = tmp_path / "mine.py"
    path.write_text(
        f"from lockstep.core.writer import Writer\n\n\nclass Mine(Writer):\n    files = ({file!r},)\n",
    )
    with pytest.raises(UsageError, match=r"Mine\.files: .* is not inside the run directory"):
        files_of_writers([f"{path}:Mine"])
