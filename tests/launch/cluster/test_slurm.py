"""The job script, run by bash with commands in the place of SLURM's."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep.launch.cluster import job as jobs
from lockstep.launch.cluster import slurm
from tests.processes import HANG_S, wait_for

SRUN = """#!/bin/bash
# In the place of srun: writes what it was called with, and does what the test says.
printf '%s\\0' "$@" > "$HERE/arguments"
env -0 > "$HERE/environment"
trap 'echo USR1 >> "$HERE/signals"; exit 75' USR1
trap 'echo TERM >> "$HERE/signals"; exit 75' TERM
touch "$HERE/started"
eval "$DOES"
"""
SCONTROL = """#!/bin/bash
# In the place of scontrol.
case "$1 $2" in
"show hostnames") printf '%s\\n' "${NODES:-localhost}" other ;;
"show node") echo "NodeName=$3 Arch=x86_64"; echo "   NodeAddr=10.1.2.3 NodeHostName=$3 Version=22" ;;
requeue*) [ -z "${REFUSES:-}" ] || { echo "refused" >&2; exit 1; }; echo "$2" >> "$HERE/requeued" ;;
esac
"""


class Place:
    """A folder with the commands, and what they wrote."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def environment(self, does, **extra):
        path = f"{self.folder}:{os.environ['PATH']}"
        own = {"HERE": str(self.folder), "DOES": does, "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]"}
        return os.environ | {"PATH": path, "SLURM_CPUS_PER_TASK": "8"} | own | extra

    def start(self, text, does="exit 0", **extra):
        (self.folder / "job.sh").write_text(text)
        command = ["bash", "job.sh"]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment(does, **extra), stderr=subprocess.PIPE, text=True
        )

    def run(self, text, does="exit 0", **extra):
        process = self.start(text, does, **extra)
        said = process.communicate(timeout=HANG_S)[1]
        return process.returncode, said

    @property
    def arguments(self):
        return (self.folder / "arguments").read_text().split("\0")[:-1]

    @property
    def requeued(self):
        path = self.folder / "requeued"
        return path.read_text().split() if path.exists() else []

    def wait_for(self, name):
        wait_for((self.folder / name).exists)

    def wait_for_pid(self):
        """The process that has written its id into the file `pid`."""
        wait_for(lambda: (self.folder / "pid").exists() and (self.folder / "pid").read_text().endswith("\n"))
        return int((self.folder / "pid").read_text())


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def script(allocation=None, *, python="python", max_requeues=2, container=None, setup=(), directory="/work", **changes):
    training = {"target": "digits", "name": "digits", "nodes": 2, "nproc": "4", "run_dir": "runs/digits"}
    return slurm.script(
        jobs.Job(**(training | changes)),
        allocation or slurm.Allocation("04:00:00", gpus_per_node=4, cpus_per_task=8),
        directory=directory,
        python=python,
        container=container,
        setup=setup,
        max_requeues=max_requeues,
        command="lockstep launch slurm digits",
    )


# ---- what is asked for


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("1:30", 90),
        ("04:00:00", 14400),
        ("72:00:00", 259200),
        ("1-0", 86400),
        ("2-12:30", 217800),
        ("0-00:00:05", 5),
    ],
)
def test_time_limits(text, seconds):
    assert slurm.seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "4h", "0", "00:00:00", "4:61", "-5", "1-24", "1:2:3:4", "1-1:1:1:1", "ten", "4:00:00 "]
)
def test_wrong_time_limits(text):
    with pytest.raises(UsageError, match="not a time limit"):
        slurm.seconds_of(text)


def test_a_time_that_leaves_nothing_for_training():
    with pytest.raises(UsageError, match="120 s before a limit of 120 s"):
        slurm.check(slurm.Allocation("2"))
    slurm.check(slurm.Allocation("3"))


@pytest.mark.parametrize("option", ["constraint=a100", "--a\n#SBATCH --b", ""])
def test_wrong_options(option):
    with pytest.raises(UsageError, match="is not an option"):
        slurm.check(slurm.Allocation("10", more=(option,)))


def test_the_head_asks_for_what_was_given():
    given = slurm.Allocation(
        "1-0", gpus_per_node=8, cpus_per_task=96, memory="64G", account="a", partition="p,q", qos="high",
        job_name="my run", signal_before_s=300, more=("--constraint=a100", "--exclusive"),
    )  # fmt: skip
    asked = [line.removeprefix("#SBATCH ") for line in script(given).splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        '--job-name="my run"',
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--mem=64G",
        "--time=1-0",
        "--account=a",
        "--partition=p,q",
        "--qos=high",
        "--signal=B:USR1@300",
        "--requeue",
        "--chdir=/work",
        '--output="my run-%j.out"',
        "--open-mode=append",
        "--constraint=a100",
        "--exclusive",
    ]


def test_without_gpus_none_are_asked_for():
    assert "gpus" not in script(slurm.Allocation("10")).partition("\n\n")[0]


# ---- the agents


def test_one_agent_on_each_node(place):
    assert place.run(script(), SLURM_RESTART_COUNT="3") == (0, "")
    arguments = place.arguments
    assert arguments[:4] == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=8"]
    agent = arguments[arguments.index("lockstep") + 1 :]
    assert agent[:6] == ["python", "-m", "lockstep", "train", "digits", "--nproc"]
    options = dict(zip(agent[5::2], agent[6::2], strict=True))
    assert options == {
        "--nproc": "4",
        "--run-dir": "runs/digits",
        "--nnodes": "2",
        "--rendezvous": f"localhost:{29400 + 4711 % 3000}",
        "--rendezvous-id": "4711.3",
    }
    assert place.requeued == []


def test_the_rank_of_a_message_is_that_of_a_node_of_slurm(place):
    place.run(script())
    wrapper = place.arguments[4:7]
    done = subprocess.run(
        [*wrapper, "lockstep", "sh", "-c", "echo $LOCKSTEP_NODE $1", "_", "a b"],
        capture_output=True,
        text=True,
        env=os.environ | {"SLURMD_NODENAME": "n2"},
    )
    assert wrapper[:2] == ["bash", "-c"]
    assert done.stdout == "n2 a b\n"


def test_a_host_whose_name_does_not_resolve(place):
    place.run(script(), NODES="no-such-host.invalid")
    assert f"10.1.2.3:{29400 + 4711 % 3000}" in place.arguments
    place.run(script(), NODES="no-such-host.invalid", LOCKSTEP_RENDEZVOUS="a:1")
    assert "a:1" in place.arguments


def test_one_node_meets_nobody(place):
    text = script(nodes=1)
    assert "rendezvous" not in text
    assert place.run(text)[0] == 0


def test_apptainer(place):
    place.run(script(container="/images/my image.sif", run_dir="/scratch/a"))
    arguments = place.arguments[place.arguments.index("lockstep") + 1 :]
    assert arguments[:7] == ["apptainer", "exec", "--nv", "--bind", "/work,/scratch/a", "--pwd", "/work"]
    assert arguments[7:11] == ["/images/my image.sif", "python", "-m", "lockstep"]


def test_pyxis(place):
    place.run(script(container="nvcr.io#nvidia/pytorch:25.01"))
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01" in place.arguments
    assert "--container-mounts=/work:/work" in place.arguments
    assert "--container-workdir=/work" in place.arguments


texts = st.text(st.characters(exclude_characters="\0\n\r", codec="utf-8"), max_size=12)


@settings(max_examples=4, deadline=None)
@given(overrides=st.lists(texts, min_size=20, max_size=40), run_dir=texts, value=texts, python=texts.filter(bool))
def test_every_argument_arrives_as_it_was_given(tmp_path_factory, overrides, run_dir, value, python):
    place = Place(tmp_path_factory.mktemp("place"))
    run_dir = "r" + run_dir.replace("/", "_")
    text = script(overrides=tuple(overrides), run_dir=run_dir, environment={"GIVEN": value}, python=python)
    assert place.run(text, LC_ALL="C.UTF-8")[0] == 0
    agent = place.arguments[place.arguments.index("lockstep") + 1 :]
    assert agent[:5] == [python, "-m", "lockstep", "train", "digits"]
    assert agent[5 : 5 + len(overrides)] == overrides
    assert agent[5 + len(overrides) :][:4] == ["--nproc", "4", "--run-dir", run_dir]
    assert f"GIVEN={value}" in (place.folder / "environment").read_text().split("\0")
    assert (place.folder / run_dir).is_dir()
    shutil.rmtree(place.folder)


# ---- the end


@pytest.mark.parametrize("code", [0, 1, 2, 3, 137])
def test_other_codes_end_the_job(place, code):
    assert place.run(script(), f"exit {code}") == (code, "")
    assert place.requeued == []


def test_code_75_queues_the_job_again(place):
    does = "mkdir -p runs/digits/checkpoints/step-00000008; exit 75"
    code, said = place.run(script(), does)
    assert (code, place.requeued) == (0, ["4711"])
    assert said == "stopped at step-00000008; job 4711 is requeued\n"


def test_a_job_that_slurm_does_not_queue_again_ends_with_code_75(place):
    """The same command goes on from there."""
    assert place.run(script(), "exit 75", REFUSES="1") == (75, "refused\n")
    assert place.requeued == []


def test_a_job_that_makes_no_progress_is_not_queued_for_ever(place):
    for number in (1, 2):
        assert place.run(script(), "exit 75")[0] == 0
        assert len(place.requeued) == number
    code, said = place.run(script(), "exit 75")
    assert code == 75
    assert "stopped 3 times in a row without a new checkpoint in runs/digits" in said
    assert len(place.requeued) == 2


def test_progress_starts_the_count_again(place):
    for number in range(1, 8):
        does = f"mkdir -p runs/digits/checkpoints/step-0000000{number // 2}; exit 75"
        assert place.run(script(), does)[0] == 0
    assert len(place.requeued) == 7


def test_another_job_starts_the_count_again(place):
    for job in ("1", "1", "2", "2"):
        assert place.run(script(), "exit 75", SLURM_JOB_ID=job)[0] == 0
    assert place.requeued == ["1", "1", "2", "2"]


def ended(process):
    """The exit code of a script, once it has ended."""
    process.communicate(timeout=HANG_S)
    return process.returncode


WAITS = "while :; do sleep 0.02; done"


def test_the_signal_before_the_time_limit_reaches_the_agents(place):
    process = place.start(script(), WAITS)
    place.wait_for("started")
    process.send_signal(signal.SIGUSR1)
    assert ended(process) == 0
    assert (place.folder / "signals").read_text() == "USR1\n"
    assert place.requeued == ["4711"]


def test_a_signal_during_the_setup_is_not_lost(place):
    text = script(setup=["touch setup; sleep 0.1"]).replace("sleep 5", "sleep 0.3")
    process = place.start(text, WAITS)
    place.wait_for("setup")
    process.send_signal(signal.SIGUSR1)
    assert ended(process) == 0
    assert place.requeued == ["4711"]


def test_the_script_waits_for_the_agents_after_sigterm(place):
    """SLURM sends SIGTERM to the agents too, so that the script need not."""
    does = "trap '' TERM; sleep 0.3; exit 3"
    process = place.start(script(), does)
    place.wait_for("started")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 3


def test_agents_that_are_killed_at_the_time_limit_go_on_too(place):
    process = place.start(script(), "trap '' USR1; echo $$ > pid; " + WAITS)
    pid = place.wait_for_pid()
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    assert ended(process) == 0
    assert place.requeued == ["4711"]


def test_a_job_that_slurm_ends_is_not_queued_again_by_the_script(place):
    """After scancel it must not come back. After preemption and `scontrol requeue`, SLURM queues it again by itself."""
    process = place.start(script(), "trap 'sleep 0.1; exit 75' TERM; echo $$ > pid; " + WAITS)
    pid = place.wait_for_pid()
    process.send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGTERM)
    assert ended(process) == 75
    assert place.requeued == []


@pytest.mark.parametrize(("signal_before", "queued"), [(5, ["4711"]), (600, [])])
def test_sigterm_after_the_signal_is_the_time_limit_or_scancel(place, signal_before, queued):
    text = script(slurm.Allocation("04:00:00", cpus_per_task=8, signal_before_s=signal_before))
    process = place.start(text, "trap '' USR1; trap 'exit 143' TERM; echo $$ > pid; " + WAITS)
    pid = place.wait_for_pid()
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGTERM)
    ended(process)
    assert place.requeued == queued
