"""Nodes on one machine: network namespaces with addresses of their own, joined by a bridge. Root only."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys

from tests import processes

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
    """`count` nodes with the addresses 10.77.N.1, 10.77.N.2, ... on a bridge of their own. A context manager."""

    def __init__(self, count):
        self.number = next(_numbers)
        self.prefix = f"lk{os.getpid() % 10000}x{self.number}"
        self.subnet = f"10.{77 + self.number}.{os.getpid() % 250}"
        self.count, self.processes = count, []

    def __enter__(self):
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

    def __exit__(self, *error):
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout:
                process.stdout.close()
        for node in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self.name(node))
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
