"""What is checked before anything is submitted, and what is shown of secrets."""

import shlex

import pytest

from lockstep.core.errors import UsageError
from lockstep.launch.cluster import job as jobs


def job(**changes):
    given = {"target": "digits", "name": "digits", "nodes": 2, "nproc": "4", "run_dir": "runs/digits"}
    return jobs.Job(**(given | changes))


@pytest.mark.parametrize("text", ["Mine", "Made", "Other", "other", "module"])
def test_a_name_that_the_file_binds(tmp_path, text):
    source = "import module\nfrom x import Other, y as other\nclass Mine: pass\nMade = type('Made', (), {})\n"
    (tmp_path / "a.py").write_text(source)
    jobs.check_target(f"{tmp_path}/a.py:{text}")


def test_a_name_that_the_file_does_not_bind(tmp_path):
    (tmp_path / "a.py").write_text("class Mine: pass\n")
    with pytest.raises(UsageError, match="there is no 'Mime'") as caught:
        jobs.check_target(f"{tmp_path}/a.py:Mime")
    assert "There are: Mine" in caught.value.remedy
    (tmp_path / "b.py").write_text("from module import *\n")
    jobs.check_target(f"{tmp_path}/b.py:Mime")  # nobody knows


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "a.py").write_text("class Mine:\n")
    with pytest.raises(UsageError, match="is not Python"):
        jobs.check_target(f"{tmp_path}/a.py:Mine")


def test_variables(monkeypatch):
    monkeypatch.setenv("FROM_HERE", "b=c")
    assert jobs.read_environment(["A=1=2", "B=", "FROM_HERE"]) == {"A": "1=2", "B": "", "FROM_HERE": "b=c"}


@pytest.mark.parametrize("text", ["1A=2", "A B=2", "=2", "NOT_SET_ANYWHERE", "A=two\nlines"])
def test_wrong_variables(text):
    with pytest.raises(UsageError, match=r"--env"):
        jobs.read_environment([text])


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "secret", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "APIKEY"]
)
def test_secrets_are_not_shown(name):
    given = job(environment={name: "hunter2", "A": "1"})
    assert given.secrets == [name]
    assert given.shown.environment == {name: jobs.HIDDEN, "A": "1"}
    for arguments in (["--env", f"{name}=hunter2"], [f"--env={name}=hunter2"]):
        command = jobs.shown_command(["launch", *arguments, "A=1"])
        assert "hunter2" not in command
        assert shlex.split(command)[-1] == "A=1"


@pytest.mark.parametrize("name", ["KEYS_PER_BATCH", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "MONKEY"])
def test_other_variables_are_shown(name):
    assert not jobs.is_secret(name)


@pytest.mark.parametrize("run_dir", ["/tmp/a", "/tmp", "../tmp/a", "/dev/shm/a"])
def test_a_run_directory_of_one_node_is_a_warning(run_dir):
    assert "--run-dir" in jobs.warnings(job(run_dir=run_dir), 64, "/home")[0]
    assert not jobs.warnings(job(run_dir=run_dir, nodes=1), 64, "/home")


def test_ranks_without_samples_are_a_warning():
    (text,) = jobs.warnings(job(nodes=4, nproc="8"), 24, "/home")
    assert "32 ranks" in text
    assert "8 have nothing to do" in text
    assert not jobs.warnings(job(nodes=4, nproc="8"), 32, "/home")
    assert not jobs.warnings(job(nodes=4, nproc="auto"), 1, "/home")


def test_only_its_own_files_are_overwritten(tmp_path):
    path = tmp_path / "new" / "a.sbatch"
    jobs.write(path, "# mark\n1", mark="# mark", is_secret=False)
    jobs.write(path, "# mark\n2", mark="# mark", is_secret=True)
    assert path.read_text() == "# mark\n2"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("mine")
    with pytest.raises(UsageError, match="not overwritten"):
        jobs.write(path, "# mark\n3", mark="# mark", is_secret=False)
    assert path.read_text() == "mine"
