"""The commands `lockstep launch slurm|kubernetes|ssh`: what they write, and the errors before anything is submitted."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from tests.processes import ROOT

SLURM = ("slurm", "--nodes", "2", "--gpus-per-node", "4", "--time", "10")
KUBERNETES = ("kubernetes", "--nodes", "2", "--gpus-per-node", "4", "--image", "me/t:1", "--volume", "runs")
SSH = ("ssh", "--hosts", "a,b", "--nproc", "1")
TASK = "from lockstep import Task\nclass Mine(Task):\n    pass\n"


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda *arguments: CliRunner().invoke(app, ["launch", *arguments])


@pytest.fixture
def tool(tmp_path):
    """Puts a command on the path that writes what it was called with, and has the given exit code."""

    def put(name, code=0):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/called"\nexit {code}\n')
        path.chmod(0o755)
        return tmp_path / "called"

    return put


@pytest.mark.parametrize(
    ("arguments", "keys"), [(SLURM, []), (KUBERNETES, []), (KUBERNETES, ["kubernetes.kind=PyTorchJob"])]
)
def test_the_text_is_shown_and_written(call, tmp_path, arguments, keys):
    done = call(*arguments, "digits", "optim.lr=1e-3", *keys)
    assert done.exit_code == 0, done.output
    (written,) = [path for path in tmp_path.iterdir() if path.name.startswith("digits.")]
    assert done.stdout == written.read_text()
    assert f"written: {written.name}. Submit it with: " in done.stderr
    assert "optim.lr=1e-3" in done.stdout


def test_submitted(call, tool):
    called = tool("sbatch")
    assert call(*SLURM, "digits", "--submit").exit_code == 0
    assert called.read_text() == "digits.sbatch\n"


def test_applied(call, tool):
    called = tool("kubectl")
    assert call(*KUBERNETES, "digits", "--apply", "--output", "out/a.yaml").exit_code == 0
    assert called.read_text() == "apply -f out/a.yaml\n"


def test_a_scheduler_that_refuses(call, tool):
    tool("sbatch", code=1)
    done = call(*SLURM, "digits", "--submit")
    assert done.exit_code == 2
    assert "sbatch digits.sbatch: exit code 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SLURM, "nope"), "there is no recipe 'nope'"),
        ((*SLURM, "nope.py:Mine"), "nope.py: no such file"),
        ((*SLURM, "mine.py:Nope"), "mine.py: there is no 'Nope'"),
        ((*SLURM, "digits", "optim.lrr=1"), "did you mean optim.lr?"),
        ((*SLURM, "digits", "--preset", "nope"), "nope"),
        ((*SLURM, "digits", "--nodes", "0"), "--nodes"),
        ((*SLURM, "digits", "--time", "soon"), "'soon' is not a time limit"),
        ((*SLURM, "digits", "--time", "1"), "slurm.signal_before"),
        ((*SLURM, "digits", "slurm.sbatch=a100"), "'a100' is not an option"),
        ((*SLURM, "digits", "slurm.acount=a"), "slurm.acount: unknown key\n  remedy: did you mean slurm.account?"),
        ((*SLURM, "digits", "slurm.account"), "write slurm.account=VALUE"),
        ((*SLURM, "digits", "slurm.max_requeues=-1"), "slurm.max_requeues: '-1': Input should be greater"),
        ((*SLURM, "digits", "--account", "vision"), "remedy: write slurm.account=vision"),
        ((*SLURM, "digits", "--gpus-per-node", "0"), "give --nproc N"),
        ((*SLURM, "digits", "--nproc", "5"), "5 ranks share 4 GPUs"),
        ((*SLURM, "digits", "--env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE is not set here"),
        ((*SLURM, "digits", "--submit"), "the command 'sbatch' is missing"),
        ((*SLURM, "digits", "--output", "mine.py"), "mine.py: exists"),
        ((*KUBERNETES, "digits", "--apply"), "the command 'kubectl' is missing"),
        ((*KUBERNETES, "digits", "kubernetes.memory=64GB"), "'64GB' is not a quantity"),
        ((*KUBERNETES, "digits", "kubernetes.job_name=My_Job"), "such as my-job"),
        ((*KUBERNETES, "digits", "--run-dir", "/home/a"), "/home/a is not on the volume"),
        ((*KUBERNETES, "digits", "--volume", "My Claim"), "--volume"),
        ((*SSH, "digits"), "the command 'ssh' is missing"),
        ((*SSH, "digits", "--ssh", "ssh -i 'key"), "--ssh"),
        ((*SSH, "digits", "--hosts", "a,a"), "a appears twice"),
        ((*SSH, "digits", "--nproc", "many"), "'many' is not a number of ranks"),
        ((*SSH, "mine.py:Nope"), "mine.py: there is no 'Nope'"),
    ],
)
def test_errors_before_anything_is_submitted(call, tmp_path, arguments, said):
    before = sorted(tmp_path.iterdir())
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_secret_is_not_shown(call, tmp_path):
    done = call(*SLURM, "digits", "--env", "WANDB_API_KEY=hunter2", "--env", "A=plain")
    assert "hunter2" not in done.output
    assert "WANDB_API_KEY is in digits.sbatch, which only you can read" in done.stderr
    assert "export A=plain" in done.stdout
    path = tmp_path / "digits.sbatch"
    assert "export WANDB_API_KEY=hunter2" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_variable_without_a_value_stays_out_of_the_script(call, tmp_path, monkeypatch):
    """sbatch passes on the variables of the shell in which it is called."""
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    done = call(*SLURM, "digits", "--env", "WANDB_API_KEY")
    assert done.exit_code == 0
    assert "hunter2" not in (tmp_path / "digits.sbatch").read_text()


def test_cpus_for_ranks_and_workers(call):
    assert "--cpus-per-task=12\n" in call(*SLURM, "digits", "data.workers=2").stdout
    assert "--cpus-per-task=7\n" in call(*SLURM, "digits", "slurm.cpus_per_task=7").stdout


def test_a_run_directory_of_one_node_is_a_warning(call):
    done = call(*SLURM, "digits", "--run-dir", "/tmp/a")
    assert done.exit_code == 0
    assert "warning: the run directory /tmp/a" in done.stderr


def test_a_file_that_the_image_must_have(call):
    assert "the image must have mine.py" in call(*KUBERNETES, "mine.py:Mine").stderr
    assert "the image" not in call(*KUBERNETES, "digits").stderr


def test_a_key_may_be_given_several_times(call):
    script = call(*SLURM, "digits", "slurm.setup=first", "slurm.setup=a: second, b", "slurm.sbatch=--exclusive").stdout
    assert "\nfirst\na: second, b\n" in script
    assert "#SBATCH --exclusive\n" in script
    assert "slurm." not in script.partition("set -u")[2]


@pytest.mark.parametrize("command", ["slurm", "kubernetes", "ssh"])
def test_help_has_an_example(call, command):
    assert f"Example: lockstep launch {command} imagenet" in call(command, "--help").stdout


def test_the_commands_load_no_torch():
    check = (
        "from lockstep.cli.application import app; import sys; sys.exit(bool({'torch', 'yaml'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_the_script_in_the_documentation_is_what_the_command_writes(call):
    options = ("--nodes", "4", "--gpus-per-node", "8", "--time", "04:00:00", "slurm.account=vision")
    places = ("slurm.directory=/scratch/me", "slurm.python=/scratch/me/.venv/bin/python")
    done = call("slurm", "imagenet", *options, "slurm.setup=module load cuda/12.8", *places)
    page = (ROOT / "docs" / "cluster.md").read_text()
    shown = page.partition("```bash\n")[2].partition("```")[0].splitlines()
    written = done.stdout.splitlines()
    assert shown[:2] + shown[3:] == written[:2] + written[3:]  # the third line is the command, here pytest's
