"""`lockstep launch ssh` through a real sshd on this machine, which is two hosts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.cluster.cases import STEPS, TASK, TRAINING, export, logged_step
from tests.processes import HANG_S, children, environment, is_running, lockstep, wait_for

SSHD = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")


def why_not():
    """Why there can be no sshd here; None if there can be."""
    if not SSHD or not shutil.which("ssh-keygen"):
        return "there is no sshd: apt-get install openssh-server"
    return None if os.geteuid() == 0 else "needs root"


pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


class Hosts:
    """An sshd with its own keys and port, a configuration in which it is the hosts a and b, and a folder."""

    def __init__(self, folder):
        self.folder = folder
        Path("/run/sshd").mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        lines = [
            "ListenAddress 127.0.0.1",
            f"Port {port}",
            f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/authorized",
        ]
        lines += ["StrictModes no", "UsePAM no", f"PidFile {folder}/sshd.pid", "AcceptEnv PYTHONPATH"]
        (folder / "sshd_config").write_text("\n".join([*lines, ""]))
        lines = [
            "Host a b",
            "HostName 127.0.0.1",
            f"Port {port}",
            f"IdentityFile {folder}/user",
            "StrictHostKeyChecking no",
        ]
        lines += [f"UserKnownHostsFile {folder}/known", "LogLevel ERROR"]
        (folder / "my config").write_text("\n".join([*lines, ""]))
        (folder / "task.py").write_text(TASK)
        self.sshd = subprocess.Popen([SSHD, "-D", "-f", folder / "sshd_config"])
        wait_for(lambda: (folder / "sshd.pid").exists())

    def start(self, run, *options):
        """Start a training in the background."""
        config = f"ssh -F '{self.folder}/my config'"
        command = [sys.executable, "-m", "lockstep", "launch", "ssh", *TRAINING, "--hosts", "a,b", "--nproc", "1"]
        command += ["--ssh", config, "--run-dir", str(run), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environment(), start_new_session=True, **pipes)

    def processes(self, run):
        """The ids of the remote ends' processes of a run, ranks too."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run).encode() in words and b"launch" not in words:
                found.append(int(path.name))
        of_ranks = [rank for pid in found for child in _children(pid) for rank in [child, *_children(child)]]
        return [pid for pid in {*found, *of_ranks} if is_running(pid)]


def _children(pid):
    try:
        return children(pid)
    except OSError:
        return []


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    hosts = Hosts(tmp_path_factory.mktemp("ssh"))
    yield hosts
    hosts.sshd.terminate()
    hosts.sshd.wait(HANG_S)


@pytest.fixture(scope="module")
def reference(hosts):
    """The weights of the training on two ranks of one host."""
    run = hosts.folder / "runs" / "alone"
    done = lockstep("train", f"{hosts.folder}/task.py:Slow", *TRAINING[1:], "--nproc", 2, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    return export(run, hosts.folder / "exported" / "alone")


def test_two_hosts_and_ctrl_c(hosts, reference):
    run = hosts.folder / "runs" / "it's a run"
    process = hosts.start(run)
    wait_for(lambda: logged_step(run) >= 20 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    print(out, err)
    assert process.returncode == 75, out + err
    assert "a, b save and end" in err
    assert not hosts.processes(run)
    process = hosts.start(run)
    out, err = process.communicate(timeout=HANG_S)
    print(out, err)
    assert process.returncode == 0, out + err
    assert "] resuming" in out  # rank 0 is on either host
    assert logged_step(run) == STEPS
    assert export(run, hosts.folder / "exported" / "two") == reference


def test_a_second_ctrl_c_leaves_nothing(hosts):
    run = hosts.folder / "runs" / "at once"
    process = hosts.start(run)
    wait_for(lambda: logged_step(run) >= 10 or process.poll() is not None)
    assert len(hosts.processes(run)) >= 2
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode in (75, 130)
    wait_for(lambda: not hosts.processes(run))


def test_this_end_is_killed(hosts):
    run = hosts.folder / "runs" / "killed"
    process = hosts.start(run)
    wait_for(lambda: logged_step(run) >= 10 or process.poll() is not None)
    before = hosts.processes(run)
    assert len(before) >= 2
    process.kill()
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(map(is_running, before)))
    assert list((run / "checkpoints").glob("step-*"))  # the ranks have saved


def test_the_connection_is_lost(hosts):
    run = hosts.folder / "runs" / "lost"
    process = hosts.start(run)
    wait_for(lambda: logged_step(run) >= 10 or process.poll() is not None)
    before = hosts.processes(run)
    for session in children(hosts.sshd.pid):  # sshd's process for each connection
        os.kill(session, signal.SIGKILL)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, out + err
    assert "cannot connect, or the connection was lost; try: " in err
    wait_for(lambda: not any(map(is_running, before)))
    assert list((run / "checkpoints").glob("step-*"))


def test_a_task_that_fails(hosts):
    run = hosts.folder / "runs" / "wrong"
    process = hosts.start(run, "--env", "PYTHONPATH=/nowhere", "--python", "/nowhere/python")
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 127, out + err
    assert "a: /nowhere/python is missing; give the interpreter" in err
