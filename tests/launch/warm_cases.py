"""A program for `test_warm_process`: `python -m tests.launch.warm_cases CASE` prints one JSON object."""

import atexit
import concurrent.futures
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

from lockstep.launch import warm_process


def describe(out):
    """What a new process sees of itself and of the process that it was forked from."""
    parent = os.getppid()
    fields = {
        "parent": parent,
        "parent_threads": len(os.listdir(f"/proc/{parent}/task")),
        "leads_session": os.getsid(0) == os.getpid(),
        "default_signals": [signal.getsignal(s) in (signal.SIG_DFL, signal.default_int_handler) for s in SIGNALS],
        "ignores_hangup": signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "draws": [float(np.random.rand()), __import__("random").random()],
        "name": multiprocessing.current_process().name,
        "start_method": multiprocessing.get_start_method(),
        "rank": os.environ.get("RANK"),
        "gone": "GONE" in os.environ,
        "imported": "wave" in sys.modules,
    }
    atexit.register(lambda: open(out, "w").write(json.dumps(fields)))


def work_in_threads(out):
    """Leave a pool of threads open, as users do. An interpreter ends it when it exits."""
    global pool
    pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(describe, out).result()


def wait(out):
    with open(out, "w") as file:
        file.write(str(os.getppid()))
    time.sleep(900)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main(case, folder):
    warm_process.MODULES = ("wave",)
    if case == "unsafe":
        warm_process.MODULES = ("tests.launch.starts_a_thread",)
    os.environ["GONE"] = "1"
    if case == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if case != "cold":
        warm_process.start()
    if case == "killed":
        os.kill(warm_process._warm_pid, signal.SIGKILL)
        os.waitid(os.P_PID, warm_process._warm_pid, os.WEXITED | os.WNOWAIT)  # it has ended, and can still be asked how
    del os.environ["GONE"]
    outs = [f"{folder}/{rank}" for rank in range(2)]
    target = {"wait": wait, "threads": work_in_threads}.get(case, describe)
    processes = [warm_process.start_process(target, out, RANK=str(rank)) for rank, out in enumerate(outs)]
    for process in processes:
        process.join()
    print(json.dumps([json.load(open(out)) for out in outs]), threading.active_count())


if __name__ == "__main__":
    main(*sys.argv[1:])
