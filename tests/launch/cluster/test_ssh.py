"""Hosts through ssh, with a program in the place of ssh that runs the command on this machine."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep.launch.cluster import host_agent, ssh
from lockstep.launch.cluster import job as jobs
from tests.processes import HANG_S, ROOT, is_running, wait_for

# In the place of `lockstep`: says what it got, and does what the variable DOES says.
CHILD = """#!/bin/bash
echo "$LOCKSTEP_NODE got $*"
trap 'echo "$LOCKSTEP_NODE: TERM"; exit 75' TERM
trap 'echo "$LOCKSTEP_NODE: INT"; exit 130' INT
echo $$ > "$HERE/$LOCKSTEP_NODE"
eval "$DOES"
"""
WAITS = "while :; do sleep 0.02; done"
# In the place of ssh: `ssh -G host` says its name; other calls run the last argument.
SSH = """#!/bin/bash
if [ "$1" = -G ]; then printf 'user me\\nhostname %s.example\\n' "$2"; exit; fi
host=${@: -2:1}
if [ "$host" = "$GONE" ]; then echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; fi
exec sh -c "${@: -1}"
"""
# What `lockstep launch ssh` does, with the host agent's child replaced.
DRIVER = """
import sys, json
from lockstep.launch.cluster import job as jobs, ssh
folder, hosts, does = sys.argv[1:]
training = jobs.Job("digits", "digits", 2, "1", "runs/digits", ("a b",), environment={"HERE": folder, "DOES": does})
there = ssh.Hosts(tuple(hosts.split(",")), folder, folder + "/python", (folder + "/ssh",))
sys.exit(ssh.run(training, there, "a:29400"))
"""
AGENT = """#!/bin/sh
exec {python} -c 'import sys; from lockstep.launch.cluster import host_agent as h
h.COMMAND = ("{folder}/child",)
sys.exit(h.main())'
"""


@pytest.fixture
def place(tmp_path):
    """A folder with programs in the place of ssh, of the hosts' Python, and of `lockstep`."""
    agent = AGENT.format(python=sys.executable, folder=tmp_path)
    for name, text in (("child", CHILD), ("ssh", SSH), ("python", agent)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(place, does, hosts="a,b", **extra):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | extra
    command = [sys.executable, "-c", DRIVER, str(place), hosts, does]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def wait_for_children(place, hosts=("a", "b")):
    """The process ids of the children on the hosts, once all have started."""
    wait_for(lambda: all((place / host).exists() and (place / host).read_text() for host in hosts))
    return [int((place / host).read_text()) for host in hosts]


# ---- the parts


def test_hosts():
    assert ssh.read_hosts("a, b,me@c") == ("a", "b", "me@c")
    for wrong in ("", ",", "a,a", "a b", "-oProxyCommand=x"):
        with pytest.raises(UsageError, match="--hosts"):
            ssh.read_hosts(wrong)


def test_the_hosts_meet_at_the_name_that_ssh_has_for_the_first(place):
    assert ssh.address_of(ssh.Hosts(("a", "b"), "/", "python", (f"{place}/ssh",))) == "a.example"
    assert ssh.address_of(ssh.Hosts(("me@a", "b"), "/", "python", (f"{place}/none",))) == "a"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([75, 1], 1),
        ([2, 1], 2),
        ([255, 1], 1),
        ([255, 75], 1),
        ([0, 255], 1),
        ([143, 75], 143),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(codes, code):
    assert ssh.exit_code([(str(number), code) for number, code in enumerate(codes)]) == code


def test_the_same_command_on_each_host():
    training = jobs.Job("digits", "digits", 2, "auto", "runs/a", ("b=c d",), ("--preset", "p"), {"LOCKSTEP_NODE": "x"})
    order = ssh.orders(training, "h1", "h0:1")
    assert order["arguments"] == [
        *("train", "digits", "b=c d", "--nproc", "auto", "--run-dir", "runs/a", "--preset", "p"),
        *("--nnodes", "2", "--rendezvous", "h0:1"),
    ]
    assert order["environment"] == {"LOCKSTEP_NODE": "x"}  # as the user says
    alone = jobs.Job("digits", "digits", 1, "2", "runs/a")
    assert "--rendezvous" not in ssh.orders(alone, "h1", "h0:1")["arguments"]


names = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=10, deadline=None)
@given(directory=names, python=names)
def test_odd_names_of_folders_arrive(tmp_path_factory, directory, python):
    folder = tmp_path_factory.mktemp("place") / f"d{directory}"
    folder.mkdir()
    program = folder / f"p{python}"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@"\n')
    program.chmod(0o755)
    hosts = ssh.Hosts(("a",), str(folder), str(program))
    done = subprocess.run(["sh", "-c", hosts.remote], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [str(folder), "-m", "lockstep.launch.cluster.host_agent"]
    assert hosts.command("a")[-2:] == ["a", hosts.remote]


@settings(max_examples=3, deadline=None)
@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=10, max_size=20))
def test_every_argument_arrives_as_it_was_given(tmp_path_factory, arguments):
    folder = tmp_path_factory.mktemp("place")
    (folder / "child").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (folder / "child").chmod(0o755)
    command = shlex.split(AGENT.format(python=sys.executable, folder=folder).partition("exec ")[2])
    order = json.dumps({"arguments": arguments, "environment": {}}) + "\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    agent = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    agent.stdin.write(order.encode())
    agent.stdin.flush()
    assert agent.stdout.read().decode().split("\0")[:-1] == arguments
    agent.communicate()
    assert agent.returncode == 0


# ---- the whole


def test_what_hosts_print_has_their_names(place):
    process = launch(place, 'echo "$LOCKSTEP_NODE errs" >&2')
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    got = "got train digits a b --nproc 1 --run-dir runs/digits --nnodes 2 --rendezvous a:29400"
    assert sorted(out.splitlines()) == [f"[a] a {got}", f"[b] b {got}"]
    assert sorted(err.splitlines()) == ["[a] a errs", "[b] b errs"]


def test_ctrl_c_saves_and_stops_everywhere(place):
    process = launch(place, WAITS)
    wait_for_children(place)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 75
    assert {"[a] a: TERM", "[b] b: TERM"} <= set(out.splitlines())
    assert "a, b save and end" in err


def test_a_second_ctrl_c_ends_at_once(place):
    process = launch(place, "trap '' TERM; " + WAITS)
    children = wait_for_children(place)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert {"[a] a: INT", "[b] b: INT"} <= set(out.splitlines())
    assert not any(map(is_running, children))


def test_nothing_stays_when_this_end_is_killed(place):
    process = launch(place, WAITS)
    children = wait_for_children(place)
    process.kill()
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(map(is_running, children)))


def test_nothing_stays_when_the_remote_end_is_killed(place):
    process = launch(place, WAITS)
    children = wait_for_children(place)
    for child in children:
        parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    wait_for(lambda: not any(map(is_running, children)))
    assert process.returncode != 0


def test_a_host_that_cannot_be_reached(place):
    process = launch(place, "sleep 0.3; exit 1", GONE="b")
    err = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 1
    assert "[b] ssh: connect to host b port 22: No route to host" in err
    assert f"b: cannot connect, or the connection was lost; try: {place}/ssh b true" in err


def test_silence_is_a_lost_connection(tmp_path):
    """No sign of life for a while, although the connection stays open: the ranks save and stop."""
    (tmp_path / "child").write_text(CHILD)
    (tmp_path / "child").chmod(0o755)
    code = AGENT.format(python=sys.executable, folder=tmp_path).replace("; from", "\nfrom")
    command = shlex.split(code.partition("exec ")[2])
    command[-1] = command[-1].replace("h.COMMAND", "h._SILENCE_S = 0.5\nh.COMMAND")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HERE": str(tmp_path), "DOES": WAITS}
    agent = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    order = {"arguments": [], "environment": {"LOCKSTEP_NODE": "a"}}
    agent.stdin.write(f"{json.dumps(order)}\n".encode())
    agent.stdin.flush()
    (child,) = wait_for_children(tmp_path, ("a",))
    assert agent.wait(HANG_S) == 75
    assert not is_running(child)
    agent.communicate()
    assert host_agent.SIGN_EVERY_S * 3 < host_agent._SILENCE_S
