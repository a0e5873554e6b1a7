"""The manifests of checkpoints, and what they say: which checkpoints there are.

It imports no torch, so that a page on a run is there at once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.core.checkpoint import files

MANIFEST = "manifest.json"
INDEX = "index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a manifest. `check` compares its files with the manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Step after which the state was saved."""
        return int(self.manifest["step"])

    @property
    def checked_step(self) -> int:
        """The last step whose state a check of the watch had seen when this was saved. -1: there was none."""
        return int(self.manifest.get("checked_step", -1))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(about["bytes"] for about in self.manifest["files"].values())

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the evaluation at this step; empty if there was none, or it has not ended yet."""
        return dict(self.manifest["metrics"])

    @cached_property
    def contents(self) -> dict[str, Any]:
        """The content of the index: `tensors` and `values`."""
        content: dict[str, Any] = json.loads((self.path / INDEX).read_bytes())
        return content

    @property
    def index(self) -> files.Index:
        """The place of each tensor, by name."""
        return _plain(self.contents["tensors"])

    @property
    def values(self) -> dict[str, Any]:
        """State that is not a tensor, by name."""
        return _plain(self.contents["values"])


def _plain(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """By the names in the plain model: earlier versions saved compiled models under the names of `torch.compile`."""
    return {name.replace("_orig_mod.", ""): value for name, value in by_name.items()}


def listed(folder: Path) -> list[Checkpoint]:
    """All checkpoints with a valid manifest, newest first. Their other files are not checked."""
    checkpoints = [Checkpoint(path, manifest) for path in folders(folder) if isinstance(manifest := read(path), dict)]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def unreadable(folder: Path) -> list[str]:
    """A complaint for each manifest that is damaged."""
    return [f"{path.name}: {fault}" for path in folders(folder) if isinstance(fault := read(path), str)]


def folders(folder: Path) -> list[Path]:
    """Directories with a manifest file, the newest last."""
    named = [
        path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name) and (path / MANIFEST).exists()
    ]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def signed(content: Mapping[str, Any]) -> str:
    """A manifest as text, with a checksum of the manifest itself."""
    return json.dumps({"crc32": zlib.crc32(json.dumps(content).encode()), "checkpoint": content})


def read(path: Path) -> dict[str, Any] | str | None:
    """The content of a manifest; text on what is wrong with it; or None if there is no manifest."""
    try:
        text = (path / MANIFEST).read_text()
        content: dict[str, Any] = json.loads(text)["checkpoint"]
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    return content if text == signed(content) else f"{MANIFEST} differs from its checksum"
