"""Where the nodes of a run meet, how to wait for that endpoint, and the address at which others reach this node."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.errors import RankError, UsageError

DEFAULT_PORT = 29400
ADDRESS = "LOCKSTEP_NODE_ADDRESS"
"""Environment variable: the address at which other nodes reach this node, if Lockstep does not find it."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch: the network interface of gloo."""
LOOK_S = 0.25
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 30.0
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation; nothing is sent there
_GET_ADDRESS, _GET_MASK = 0x8915, 0x891B  # of an interface, on Linux


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet: HOST:PORT."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, where: str = "--rendezvous") -> Endpoint:
    """An endpoint from HOST, HOST:PORT, or [IPv6]:PORT.

    Raises:
        UsageError: the text has none of these forms.
    """
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d+))?", text.strip())
    match = bracketed or re.fullmatch(r"([\w.-]+)(?::(\d+))?", text.strip())
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise UsageError(
            f"{text!r} is not the address of a node",
            where=where,
            remedy=f"give HOST:PORT, such as node0:{DEFAULT_PORT}, with a port from 1 to 65535: "
            "the name or the address of one of the nodes",
        )
    return Endpoint(match[1], port)


def parse_nnodes(text: str, where: str = "--nnodes") -> tuple[int, int]:
    """The smallest and largest number of nodes, from `2` or `1:4`.

    Raises:
        UsageError: the text has neither form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        remedy = "give a number from 1, such as 2, or the smallest and the largest number, such as 1:4"
        raise UsageError(f"{text!r} is not a number of nodes", where=where, remedy=remedy)
    return least, most


@dataclass(frozen=True)
class Several:
    """The number of nodes, and where they meet."""

    least: int
    most: int
    endpoint: Endpoint


def several(nnodes: str | None, rendezvous: str | None) -> Several | None:
    """Parse `--nnodes` and `--rendezvous`. None: there is one node.

    Raises:
        UsageError: a value is wrong, or the rendezvous or the number of nodes is missing.
    """
    if nnodes is None and rendezvous is not None:  # else each node would train alone
        raise UsageError(
            f"the nodes meet at {rendezvous}, but the number of nodes is missing",
            where="--nnodes",
            remedy="give --nnodes with the number of nodes, such as --nnodes 2; or remove --rendezvous (and the "
            "environment variable LOCKSTEP_RENDEZVOUS) to train only on this machine",
        )
    least, most = parse_nnodes("1" if nnodes is None else nnodes)
    if most == 1:
        return None
    if rendezvous is None:
        raise UsageError(
            f"{nnodes} nodes, but no rendezvous",
            where="--rendezvous",
            remedy="give --rendezvous HOST:PORT on all nodes: the name or the address of one of them, "
            f"such as node0:{DEFAULT_PORT}",
        )
    return Several(least, most, parse_endpoint(rendezvous))


def resolve(host: str) -> list[str]:
    """The addresses of a host; empty if its name is not known (yet)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class ProcessClock:
    """Seconds during which this process ran. Time does not advance while the process is frozen (SIGSTOP).

    Otherwise a process that wakes up would consider all others dead.
    """

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, time.monotonic()

    def look(self) -> float:
        """The seconds since this object was created. Call it at least every second."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 1.0)
        self._last = now
        return self.seconds


class MissingNodesError(RankError):
    """Too few nodes came."""


class Waiting:
    """Reports what it waits for, after some seconds and then repeatedly, and ends the wait.

    Args:
        limit_s: seconds.
        where: the option that a `MissingNodesError` names.
        remedy: its advice.
    """

    def __init__(self, limit_s: float, where: str, remedy: str) -> None:
        self.limit_s, self.where, self.remedy = limit_s, where, remedy
        self.clock, self.tell_at = ProcessClock(), _TELL_AFTER_S

    def look(self, what: Callable[[], str]) -> None:
        """Report the wait, if it is time.

        Args:
            what: describes what it waits for.

        Raises:
            MissingNodesError: the time is over.
        """
        seconds = self.clock.look()
        if seconds > self.limit_s:
            error = f"gave up after waiting {self.limit_s:g} s for {what()}"
            raise MissingNodesError(error, where=self.where, remedy=self.remedy)
        if seconds >= self.tell_at:
            print(f"waiting for {what()} ({seconds:.0f} of {self.limit_s:g} s)", file=sys.stderr, flush=True)
            self.tell_at = seconds + _TELL_EVERY_S


def find(host: str, limit_s: float) -> list[str]:
    """The addresses of a host, as soon as its name is known.

    Raises:
        MissingNodesError: it was not known within `limit_s` seconds.
    """
    remedy = "give the name or the address of one of the nodes as --rendezvous HOST:PORT"
    waiting = Waiting(limit_s, "--rendezvous", remedy)
    while not (addresses := resolve(host)):
        waiting.look(lambda: f"the host name {host} to resolve")
        time.sleep(LOOK_S)
    return addresses


def wait_for(endpoint: Endpoint, limit_s: float) -> None:
    """Wait until a process listens at `endpoint`.

    Raises:
        MissingNodesError: none did within `limit_s` seconds.
    """
    remedy = (
        "start the command on that node, too; check that HOST is the name or the address of one of the nodes, "
        f"and that a firewall lets port {endpoint.port} through, and then the ports that torch chooses"
    )
    waiting = Waiting(limit_s, "--rendezvous", remedy)
    while True:
        try:
            socket.create_connection((endpoint.host, endpoint.port), timeout=2).close()
            return
        except OSError as error:
            reason = str(error)
        waiting.look(lambda reason=reason: f"the node at {endpoint}, where nodes meet ({reason})")  # type: ignore[misc]
        time.sleep(LOOK_S)


def is_own(address: str) -> bool:
    """True if an interface of this machine has this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """True if only processes of the same machine can use this address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def own_address(host: str, addresses: list[str]) -> str:
    """The address at which the other nodes reach this node.

    On the node that has HOST, this is HOST itself. Elsewhere it is the address from which packets to HOST are sent.

    Args:
        addresses: those of `host`.

    Raises:
        UsageError: the environment variable `ADDRESS` does not contain an address.
    """
    if given := os.environ.get(ADDRESS):
        found = resolve(given)
        if not found:
            raise UsageError(
                f"{given!r} is neither an address nor a name that resolves here",
                where=ADDRESS,
                remedy="give the address at which other nodes reach this node; `ip -brief address` lists its addresses",
            )
        return found[0]
    meant_loopback = host == "localhost" or is_loopback(host)
    for address in addresses:
        # Debian gives a machine's name the address 127.0.1.1, which other nodes cannot reach.
        if is_own(address) and (meant_loopback or not is_loopback(address)):
            return address
    for target in (*(address for address in addresses if not is_loopback(address)), *_ELSEWHERE):
        source = _source_for(target)
        if source:
            return source
    return "127.0.0.1"


def _source_for(target: str) -> str | None:
    """The local address from which packets to `target` are sent. Nothing is sent to find it."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The network interface that has `address`, or another address of its network. None: not found."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    wanted, fits = ipaddress.ip_address(address), None
    for _, name in socket.if_nameindex():
        own, mask = _of_interface(name, _GET_ADDRESS), _of_interface(name, _GET_MASK)
        if own == address:
            return name
        if own and mask and wanted in ipaddress.ip_network(f"{own}/{mask}", strict=False):
            fits = name
    return fits


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by name. Empty if the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return {}
    found = {name: _of_interface(name, _GET_ADDRESS) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address}


def _of_interface(name: str, what: int) -> str | None:
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), what, struct.pack("256s", name[:15].encode()))[20:24])
    return None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            parts = line.split()
            if parts[0] == wanted:
                return parts[-1]
    return None
