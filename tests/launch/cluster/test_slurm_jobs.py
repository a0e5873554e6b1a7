"""Generated scripts under a real SLURM with two nodes on this machine: `make test-slurm`.

After a job was queued again, SLURM waits two minutes before it starts. The tests wait two seconds: then they change the
start to now.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.launch.cluster.cases import STEPS, TASK, TRAINING, export, logged_step
from tests.processes import HANG_S, ROOT, environment, is_running

START = ROOT.parent / "shared" / "slurm" / "start"


def why_not():
    """Why there can be no SLURM here; None if there can be."""
    if not START.is_file():
        return "needs ../shared/slurm/start"
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name)]
    return f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else None


pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


class Slurm:
    """A SLURM, and a folder from which jobs are submitted."""

    def __init__(self, folder):
        self.folder, self.config = folder, folder / "slurm"
        self.environment = environment(SLURM_CONF=str(self.config / "slurm.conf"))
        (folder / "task.py").write_text(TASK)

    def call(self, *command, check=True):
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def stop(self):
        """End all jobs, and the daemons."""
        self.call("scancel", "--user", "root", check=False)
        deadline = time.monotonic() + HANG_S
        while self.call("squeue", "--noheader", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.5)
        daemons = [int(path.read_text()) for path in self.config.glob("*.pid")]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in filter(is_running, daemons):
                os.kill(daemon, number)
            time.sleep(2)

    def submit(self, name, *options, time="10"):
        run = ("--nodes", "2", "--gpus-per-node", "0", "--nproc", "1", "--time", time, f"slurm.job_name={name}")
        command = (sys.executable, "-m", "lockstep", "launch", "slurm", *TRAINING, *run, "--run-dir", f"runs/{name}")
        said = self.call(*command, "--submit", *options)
        return Job(self, re.search(r"Submitted batch job (\d+)", said)[1], name)


_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_REVOKED_S = 2
"""slurmd refuses to start a job again within the second in which it has ended the job: "Job credential revoked", state
FAILED, exit code 1. This is one reason why SLURM waits two minutes."""


class Job:
    """A job that was submitted."""

    def __init__(self, slurm, number, name):
        self.slurm, self.number, self.name = slurm, number, name
        self.run = slurm.folder / "runs" / name

    def about(self):
        text = self.slurm.call("scontrol", "show", "job", "-o", self.number)
        fields = dict(part.partition("=")[::2] for part in text.split() if "=" in part)
        return SimpleNamespace(state=fields["JobState"], restarts=int(fields["Restarts"]), reason=fields["Reason"])

    @property
    def output(self):
        path = self.slurm.folder / f"{self.name}-{self.number}.out"
        return path.read_text() if path.exists() else ""

    @property
    def step(self):
        return logged_step(self.run)

    def wait_for_step(self, step, timeout=HANG_S):
        """Wait until the training has logged a step."""
        deadline = time.monotonic() + timeout
        while self.step < step:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def wait(self, timeout=HANG_S):
        """Wait for the end of the job, and start it soon where it is queued again. Its last state."""
        deadline = time.monotonic() + timeout
        while (about := self.about()).state not in _ENDED:
            if about.state == "PENDING" and about.reason == "BeginTime":
                time.sleep(_REVOKED_S)
                self.slurm.call("scontrol", "update", f"JobId={self.number}", "StartTime=now", check=False)
            assert time.monotonic() < deadline, f"{about} {self.output}"
            time.sleep(0.5)
        return about

    def weights(self):
        """The bytes of each weight."""
        return export(self.run, self.slurm.folder / "exported" / self.name)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    subprocess.run([str(START), str(slurm.config)], check=True, timeout=HANG_S)
    yield slurm
    slurm.stop()


@pytest.fixture(scope="module")
def reference(slurm):
    """The weights of a training on two nodes that nothing interrupts."""
    job = slurm.submit("reference")
    about = job.wait()
    assert (about.state, about.restarts) == ("COMPLETED", 0), job.output
    print(job.output)
    return job.weights()


@pytest.fixture
def job(request, slurm, reference):
    """A training that has logged some steps."""
    job = slurm.submit(request.node.name.removeprefix("test_"))
    job.wait_for_step(30)
    yield job
    slurm.call("scancel", job.number, check=False)


def goes_on(job, reference, restarts=1):
    """Check that a job ends, was queued again, and has the weights of the training that nothing interrupted."""
    about = job.wait()
    print(job.output)
    assert about.state == "COMPLETED", job.output
    assert about.restarts >= restarts
    assert "resuming" in job.output or not restarts
    assert job.weights() == reference


def test_the_same_weights_as_on_one_node(slurm, reference):
    run = slurm.folder / "runs" / "alone"
    slurm.call(sys.executable, "-m", "lockstep", "train", *TRAINING, "--nproc", "2", "--run-dir", run)
    assert Job(slurm, "0", "alone").weights() == reference


def test_time_limit(slurm, reference):
    job = slurm.submit("time_limit", "slurm.signal_before=80", time="2")
    goes_on(job, reference)
    assert re.search(r"stopped at step-\d+; job \d+ is queued again", job.output)


def test_preempted(slurm, reference, job):
    other = slurm.call(
        "sbatch", "-p", "high", "--nodes", "2", "--exclusive", "--output", "/dev/null", "--wrap", "sleep 3"
    )
    assert "Submitted" in other
    goes_on(job, reference)
    assert "DUE TO PREEMPTION" in job.output


def test_requeued(slurm, reference, job):
    slurm.call("scontrol", "requeue", job.number)
    goes_on(job, reference)


def test_cancelled(slurm, reference, job):
    slurm.call("scancel", job.number)
    about = job.wait()
    time.sleep(3)
    assert job.about().state == about.state == "CANCELLED"
    assert job.step < STEPS


def test_drained(slurm, reference, job):
    """A node that is drained goes on until its job ends, and gets no other job."""
    slurm.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        goes_on(job, reference, restarts=0)
        assert job.about().restarts == 0
        waiting = slurm.submit("drained_too")
        time.sleep(3)
        assert waiting.about().state == "PENDING"
    finally:
        slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME")
    waiting.wait_for_step(10)
    slurm.call("scancel", waiting.number)
    waiting.wait()


def test_slurmd_is_killed_and_comes_back(slurm, reference, job):
    path = slurm.config / "slurmd-n2.pid"
    subprocess.run(["kill", "-9", path.read_text().strip()], check=True)
    time.sleep(3)
    slurm.call("slurmd", "-N", "n2", "-f", slurm.config / "slurm.conf")
    goes_on(job, reference, restarts=0)


def test_node_goes_down(slurm, reference, job):
    slurm.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    time.sleep(3)
    # A node whose slurmd registers again may be back by itself.
    slurm.call("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    goes_on(job, reference)
