"""Nodes on one machine: network namespaces with addresses of their own, joined by a bridge. Root only."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

from tests import processes
from tests.slow_link import Relay, tunnel

_numbers = itertools.count()


def why_not():
    """Why this machine cannot have namespaces; None if it can."""
    if sys.platform != "linux" or not shutil.which("ip"):
        return "network namespaces need Linux and the command ip"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"lk{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this machine allows no network namespaces: {made.stderr.strip()}"
    ip("netns", "delete", name)
    return None


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, text=True)


class Namespaces:
    """`count` nodes with addresses of their own, on a bridge. A context manager.

    Args:
        delay_s, loss: two nodes are joined by a slow link instead, see `tests.slow_link`.
    """

    def __init__(self, count, delay_s=0.0, loss=0.0):
        self.slow, self.relay = (delay_s, loss) if delay_s or loss else None, None
        self.number = next(_numbers)
        self.prefix = f"lk{os.getpid() % 10000}x{self.number}"
        self.subnet = f"10.{77 + self.number}.{os.getpid() % 250}"
        self.count, self.processes = count, []

    def __enter__(self):
        if self.slow:
            self._join_slowly()
            return self
        bridge = f"{self.prefix}b"
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for node in range(self.count):
            name = self.name(node)
            ip("netns", "add", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth7", "netns", name)
            ip("link", "set", f"{name}v", "master", bridge, "up")
            ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth7")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth7", "up")
        return self

    def _join_slowly(self):
        for node in range(2):
            ip("netns", "add", self.name(node))
            ip("-n", self.name(node), "link", "set", "lo", "up")
        self.relay = Relay(*(tunnel(self.name(node), "eth7") for node in range(2)), *self.slow)
        for node in range(2):
            ip("-n", self.name(node), "address", "add", f"{self.address(node)}/24", "dev", "eth7")
            ip("-n", self.name(node), "link", "set", "eth7", "up", "mtu", 1500)

    def __exit__(self, *error):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout:
                process.stdout.close()
        if self.relay:
            self.relay.close()
        for node in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self.name(node))
        if not self.slow:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("link", "delete", f"{self.prefix}b")

    def name(self, node):
        return f"{self.prefix}n{node}"

    def address(self, node):
        return f"{self.subnet}.{node + 1}"

    def start(self, node, *arguments, output=subprocess.PIPE, **variables):
        """Start the `lockstep` command on a node, in a session of its own. Both streams go to `output`."""
        command = ["ip", "netns", "exec", self.name(node), *processes.command(*arguments)]
        variables = {"LOCKSTEP_NODE": f"node{node}"} | variables
        process = subprocess.Popen(
            command,
            env=processes.environment(**variables),
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def cut(self, node):
        """Cut the link of a node: nothing arrives any more, and nobody is told."""
        ip("link", "set", f"{self.name(node)}v", "down")

    def mend(self, node):
        ip("link", "set", f"{self.name(node)}v", "up")


BEGINS = re.compile(r"[\w ]+: .*, steps \d+ to \d+, ")
STEP = re.compile(r"step (\d+)/\d+  ")


class Training:
    """One training on the nodes of a cluster, and what its launchers print, with times."""

    def __init__(self, cluster, run, nnodes, *arguments, host=0):
        self.cluster, self.run = cluster, run
        meeting = ["--nnodes", nnodes, "--rendezvous", cluster.address(host)]
        self.arguments = ["train", *arguments, *meeting, "--run-dir", run]
        self.lines, self.nodes, self.threads = [], {}, []

    def start(self, node, *more, **variables):
        """Start the launcher of a node."""
        process = self.nodes[node] = self.cluster.start(node, *self.arguments, *more, **variables)
        self.threads.append(threading.Thread(target=self._read, args=(node, process), daemon=True))
        self.threads[-1].start()

    def _read(self, node, process):
        for line in process.stdout:
            self.lines.append((time.monotonic(), node, line))
        process.wait()

    def wait(self):
        """Wait for all launchers. Gives their exit codes, by node."""
        for thread in self.threads:
            thread.join(processes.HANG_S)
        return {node: process.poll() for node, process in self.nodes.items()}

    def output(self, node=None):
        """What the launcher of a node, or of all nodes, has printed."""
        return "".join(line for _, by, line in self.lines if node in (None, by))

    def starts(self):
        """Time and step of the first step of each start. The training must log every step."""
        found, begins = [], False
        for when, _, line in list(self.lines):
            step = STEP.match(line)
            if step and begins:
                found.append((when, int(step[1])))
            begins = bool(BEGINS.match(line)) or (begins and not step)
        return found

    def step(self):
        """The last step in the log; 0 if there is none."""
        path = self.run / "metrics.jsonl"
        steps = re.findall(r'"step": (\d+)', path.read_text()) if path.exists() else []
        return int(steps[-1]) if steps else 0

    def wait_for_step(self, step):
        processes.wait_for(lambda: self.step() >= step)

    def event(self, happen):
        """Seconds from `happen` to the first new step, when some more steps were made."""
        before, begun = len(self.starts()), time.monotonic()
        happen()
        processes.wait_for(lambda: len(self.starts()) > before)
        when, step = self.starts()[-1]
        self.wait_for_step(step + 3)
        return when - begun


def tree(pid):
    """A process and all below it."""
    return [pid, *(process for child in processes.children(pid) for process in tree(child))]


def kill(pids, number=signal.SIGKILL):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
