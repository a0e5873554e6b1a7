"""Agents on several hosts through ssh: one command here starts them, shows their output, and ends with them."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from lockstep.core.errors import Preempted, UsageError
from lockstep.launch.cluster import host_agent
from lockstep.launch.cluster.job import Job

PORT = 29400
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes"),  # a password prompt would wait forever
    *("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
_LOST = 255  # ssh's own exit code
_OTHERS_S = 90.0  # after a host has failed, for the others to end by themselves
_STOPPING_S = 150.0  # after a request to stop, for all hosts to save and to end
_AT_ONCE_S = 8.0  # after a request to end immediately
_LOOK_EVERY_S = 0.1
_NO_COMMAND = 127  # a shell's exit code for a missing command


@dataclass(frozen=True)
class Hosts:
    """Where the agents run, and how to reach them."""

    names: tuple[str, ...]
    directory: str
    """Working directory on all hosts."""
    python: str
    """The interpreter with Lockstep on the hosts."""
    ssh: tuple[str, ...] = ("ssh",)
    """The command, with options such as -p and -i."""

    def command(self, host: str) -> list[str]:
        """The command that starts the remote end on a host. Everything else follows through its standard input."""
        return [*self.ssh, *_OPTIONS, host, self.remote]

    @property
    def remote(self) -> str:
        """The command that the shell of a host executes."""
        return (
            f"cd {shlex.quote(self.directory)} && exec {shlex.quote(self.python)} -m lockstep.launch.cluster.host_agent"
        )


def read_hosts(text: str) -> tuple[str, ...]:
    """The names of `--hosts a,b,c`.

    Raises:
        UsageError: there is none, one is not a name, or one appears twice.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name.startswith("-") or any(letter.isspace() for letter in name):
            raise UsageError(f"{name!r} is not a host", where="--hosts", remedy="write --hosts a,b,c")
        if names.count(name) > 1:
            raise UsageError(
                f"{name} appears twice", where="--hosts", remedy="name each host once; --nproc sets the ranks"
            )
    if not names:
        raise UsageError("no host is given", where="--hosts", remedy="write --hosts a,b,c")
    return names


def address_of(hosts: Hosts) -> str:
    """The name or address of the first host for the others: its HostName in ssh's configuration."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            [*hosts.ssh, "-G", hosts.names[0]], capture_output=True, text=True, timeout=10, check=True
        )
        for line in shown.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname" and value:
                return value
    return hosts.names[0].rpartition("@")[2]


def orders(job: Job, host: str, rendezvous: str) -> dict[str, object]:
    """The message to the remote end on a host: the arguments of `lockstep`, and environment variables."""
    meeting = ["--nnodes", str(job.nodes), "--rendezvous", rendezvous] if job.nodes > 1 else []
    return {"arguments": [*job.train, *meeting], "environment": {"LOCKSTEP_NODE": host, **job.environment}}


def run(job: Job, hosts: Hosts, rendezvous: str) -> int:
    """Start an agent on each host, and wait until all have ended.

    A first Ctrl-C, SIGTERM or SIGHUP asks the ranks to save and stop. A second ends them immediately.

    Returns:
        the exit code: that of the host that failed first; 75 if the ranks have saved and stopped.
    """
    with _asked() as asked:
        remotes = [_Remote(host, hosts.command(host), orders(job, host, rendezvous)) for host in hosts.names]
        return _wait(remotes, asked, hosts)


def exit_code(ended: Sequence[tuple[str, int]]) -> int:
    """The exit code of a run, from hosts and their codes in the order in which they ended."""
    codes = [code for _, code in ended]
    failed = [code for code in codes if code not in (0, Preempted.exit_code)]
    of_ranks = [code for code in failed if code != _LOST]
    if failed:
        return of_ranks[0] if of_ranks else 1
    return Preempted.exit_code if Preempted.exit_code in codes else 0


@dataclass
class _Asked:
    """Requests to stop from signals."""

    times: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.times += 1


@contextlib.contextmanager
def _asked() -> Iterator[_Asked]:
    asked = _Asked()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before: Mapping[int, Callable[[int, FrameType | None], object] | int | None] = {
        number: signal.signal(number, asked.handle) for number in heeded
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Remote:
    """The ssh process of a host, and the threads that show its output."""

    def __init__(self, host: str, command: Sequence[str], order: Mapping[str, object]) -> None:
        self.host = host
        # In its own session: Ctrl-C reaches only this process, which passes it on.
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.threads = [
            threading.Thread(target=_show, args=(host, self.process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=_show, args=(host, self.process.stderr, sys.stderr), daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        self.say(json.dumps(order))

    def say(self, line: str) -> None:
        """Send a line. Nobody reads it if the connection is gone."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def end(self) -> int:
        """The exit code of a process that has ended, after all of its output was shown."""
        for thread in self.threads:
            thread.join(2.0)
        code = self.process.returncode
        return code if code >= 0 else 128 - code


def _wait(remotes: Sequence[_Remote], asked: _Asked, hosts: Hosts) -> int:
    """Wait for all hosts, and pass requests to stop on to them. Every wait is limited."""
    running, ended = list(remotes), list[tuple[str, int]]()
    passed_on, deadline, next_sign = 0, float("inf"), time.monotonic()
    while running:
        for remote in [remote for remote in running if remote.process.poll() is not None]:
            running.remove(remote)
            code = remote.end()
            ended.append((remote.host, code))
            _tell_end(remote.host, code, hosts)
            if code not in (0, Preempted.exit_code) and running and deadline == float("inf"):
                deadline = time.monotonic() + _OTHERS_S
        if time.monotonic() >= next_sign:
            for remote in running:
                remote.say(host_agent.ALIVE)
            next_sign = time.monotonic() + host_agent.SIGN_EVERY_S
        late = time.monotonic() > deadline
        wanted = min(2, max(asked.times, passed_on + late))
        if wanted > passed_on:
            passed_on = wanted
            deadline = time.monotonic() + (_STOPPING_S if wanted == 1 else _AT_ONCE_S)
            for remote in running:
                remote.say(host_agent.STOP if wanted == 1 else host_agent.KILL)
            _tell_passed_on(wanted, [remote.host for remote in running], by_signal=not late)
        elif late:  # the remote ends do not answer, and end by themselves without heartbeats
            for remote in running:
                remote.process.kill()
        time.sleep(_LOOK_EVERY_S)
    if asked.times > 1:
        return 130
    return exit_code(ended)


def _tell_passed_on(times: int, waiting: Sequence[str], *, by_signal: bool) -> None:
    names = ", ".join(waiting)
    if not by_signal:
        again = " again" if times > 1 else ""
        _tell(f"still running after another host failed: {names}; asked{again} to end")
    elif times == 1:
        _tell(f"stopping: {names} save and end. Repeat to end immediately")
    else:
        _tell(f"ending immediately: {names}")


def _tell_end(host: str, code: int, hosts: Hosts) -> None:
    if code == _LOST:
        _tell(f"{host}: cannot connect, or the connection was lost; try: {shlex.join([*hosts.ssh, host, 'true'])}")
    elif code == _NO_COMMAND:
        _tell(f"{host}: {hosts.python} is missing; give the interpreter with Lockstep there with --python")
    elif code not in (0, Preempted.exit_code):
        _tell(f"{host}: ended with exit code {code}")


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


_showing = threading.Lock()


def _show(host: str, stream: IO[bytes], out: IO[str]) -> None:
    """Print the lines of a host with its name. The terminal may be gone, but the host must be able to continue."""
    for line in stream:
        text = line.decode(errors="replace").rstrip("\n")
        with _showing, contextlib.suppress(OSError, ValueError):
            print(f"[{host}] {text}", file=out, flush=True)
