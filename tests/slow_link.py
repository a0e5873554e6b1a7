"""A slow link between two network namespaces, with delay and loss, where the kernel has no netem.

Each namespace has a tunnel (/dev/net/tun). One thread passes packets from one tunnel to the other after the delay, and
drops some of them.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time

_SET = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_NETWORK = 0x40000000
_LARGEST = 1 << 16


def tunnel(namespace, name):
    """The file of a new tunnel in a namespace. Its interface has no address yet."""
    before, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _SET, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
        return file
    finally:
        _enter(before)
        os.close(before)
        os.close(there)


def _enter(namespace):
    """Let this thread use another network. Python itself can do it from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


class Relay:
    """Passes packets between two tunnels.

    Args:
        delay_s: of each packet, one way.
        loss: the share of packets that are dropped.
    """

    def __init__(self, one, other, delay_s, loss, seed=0):
        self.files, self.delay_s, self.loss = (one, other), delay_s, loss
        self.random, self.closing = random.Random(seed), threading.Event()
        self.passed = self.dropped = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        waiting, order = [], itertools.count()
        other = dict(zip(self.files, reversed(self.files), strict=True))
        while not self.closing.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, file, packet = heapq.heappop(waiting)
                try:
                    os.write(file, packet)
                    self.passed += 1
                except OSError:  # the interface is down
                    self.dropped += 1
            timeout = min(0.1, max(0.0, waiting[0][0] - now)) if waiting else 0.1
            for file in select.select(self.files, (), (), timeout)[0]:
                try:
                    while True:
                        packet = os.read(file, _LARGEST)
                        if self.random.random() < self.loss:
                            self.dropped += 1
                        else:
                            heapq.heappush(waiting, (time.monotonic() + self.delay_s, next(order), other[file], packet))
                except BlockingIOError:
                    pass
                except OSError:
                    return

    def close(self):
        self.closing.set()
        self.thread.join()
        for file in self.files:
            os.close(file)
