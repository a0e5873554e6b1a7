"""A thread that records where this process is when nothing moves."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

from lockstep_audit.observe import communication, places, torch_internals
from lockstep_audit.observe.recorder import recorder

_LOOKS = 8
_ENTRIES = 20
_thread: tuple[int, threading.Thread] | None = None


def start() -> None:
    """Start the thread. A forked process needs its own."""
    global _thread
    if _thread is None or _thread[0] != os.getpid():
        thread = threading.Thread(target=_watch, name="lockstep-audit", daemon=True)
        _thread = (os.getpid(), thread)
        thread.start()


def _watch() -> None:
    seen, noted = "", 0.0
    main = torch_internals.MainThreadProbe()
    while not recorder.has_ended:
        time.sleep(min(recorder.patience / _LOOKS, 5.0))
        if _imports():
            recorder.progress()
        since, moves = time.monotonic() - recorder.moved, main.has_moved()  # since the previous check
        if since < recorder.patience or recorder.rank is None:
            seen = ""
            continue
        told = recorder.guard("stuck", _told)
        if told is None:
            return
        now, last = json.dumps([told, moves], default=str), time.monotonic() - noted
        if last > recorder.patience or (now != seen and last > recorder.patience / 2):
            seen, noted = now, time.monotonic()
            recorder.emit_still("stuck", **told, moves=moves, since_s=round(since, 1))


def _imports() -> bool:
    """True if the main thread is importing a module, which may take long."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and places.kind_of(frame.f_code)[0] is not places.USER:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _told() -> dict[str, Any]:
    communication.note_groups()
    frames = sys._current_frames()
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if thread.ident in {*frames} - {threading.get_ident()}]
    stacks = {thread.name: list(places.stack(frames[thread.ident or 0])) for thread in others}
    frame = frames.get(main.ident or 0)
    at = places.here(frame) if frame is not None else None
    return {"at": at, "stacks": stacks, "collectives": _last(), "blocked_in": _blocked_in(frame)}


def _last() -> list[dict[str, Any]]:
    return [_entry(entry) for entry in torch_internals.recorded_collectives()[-_ENTRIES:]]


def at_exit() -> dict[str, Any]:
    """The last collectives before an error ends the script."""
    return {"last": _last() or None} if recorder.error or getattr(sys, "last_value", None) else {}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    number, state = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"], entry["state"]
    told = {"group": str(entry["process_group"][0]), "sequence": number, "name": entry["profiling_name"]}
    told |= {"sizes": entry["input_sizes"], "dtypes": entry["input_dtypes"]}
    return told | {"state": "completed" if entry["retired"] else state}


def _blocked_in(frame: FrameType | None) -> str | None:
    """The outermost function of torch that the main thread is in, below the user's code."""
    found = None
    while frame is not None and places.kind_of(frame.f_code)[0] is not places.USER:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "torch" and "<locals>" not in frame.f_code.co_qualname:
            found = f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return found
