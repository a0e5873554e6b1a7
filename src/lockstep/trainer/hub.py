"""Uploads of exports to the Hugging Face hub."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

from lockstep.configs import registry
from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.foreign_errors import first_line, optional

_KINDS = ("text", "lm", "classification", "segmentation", "detection")
"""Shipped kinds of tasks that export some or all models for transformers."""
_CONFIGS = ("config.json", "adapter_config.json")  # such a folder has one of them


def check(name: str | None, kind: str, *, private: bool, optimizer: bool) -> None:
    """Before anything is computed, check that an export can be uploaded as `name`.

    Args:
        name: OWNER/NAME. None: nothing is uploaded.
        kind: of the task.
        private: whether a private repository is wanted.
        optimizer: whether the export is a file with the optimizer's state.

    Raises:
        UsageError: the options do not go together, the name is none, exports of such tasks are not of Hugging Face,
            there is no token, the hub does not know the token, or the token cannot write for OWNER.
    """
    if name is None:
        if private:
            raise UsageError("has no meaning without --push-to-hub", where="--private", remedy="leave it out")
        return
    where = f"--push-to-hub {name}"
    if optimizer:
        raise UsageError("the file of --optimizer is not uploaded", where=where, remedy="leave one of the two out")
    if kind in registry.kinds() and kind not in _KINDS:
        remedy = "leave --push-to-hub out"
        raise UsageError(f"an export of task.kind {kind} is not a folder for transformers", where=where, remedy=remedy)
    hub = _hub(where)
    from huggingface_hub import constants

    try:
        importlib.import_module("huggingface_hub.utils").validate_repo_id(name)
        owner = name[: name.index("/")]
    except ValueError as error:
        what = first_line(error) if "/" in name else "the name has no owner"
        raise UsageError(what, where=where, remedy="give OWNER/NAME, such as my-name/my-model") from error
    if hub.get_token() is None:
        raise UsageError("there is no token of the hub", where=where, remedy="run `hf auth login`, or set HF_TOKEN")
    try:
        known = hub.HfApi().whoami()
    except Exception as error:
        what = f"the hub at {constants.ENDPOINT} does not accept the token: {first_line(error)}"
        remedy = "check the network, and the token with `hf auth whoami`"
        raise UsageError(what, where=where, remedy=remedy) from error
    owners = [known["name"], *(organisation["name"] for organisation in known.get("orgs", ()))]
    if owner not in owners:
        what = f"the token of {known['name']} cannot write for {owner}"
        raise UsageError(what, where=where, remedy=f"give one of: {', '.join(owners)}")
    if known.get("auth", {}).get("accessToken", {}).get("role") == "read":
        remedy = "make a token that can write: https://huggingface.co/settings/tokens"
        raise UsageError("the token can only read", where=where, remedy=remedy)


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload an export as one commit. The repository is made if there is none.

    Returns:
        the address of the repository.

    Raises:
        UsageError: transformers cannot load the folder.
        LockstepError: the upload failed. The folder stays; the error has the command that uploads it.
    """
    where = f"--push-to-hub {name}"
    if not any((folder / config).exists() for config in _CONFIGS):
        what = (
            f"the export is in {folder}, but has no config.json, so transformers cannot load it: nothing was uploaded"
        )
        raise UsageError(what, where=where, remedy="train a model of transformers: task.model, or task.scratch")
    api = _hub(where).HfApi()
    try:
        address = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="An export of Lockstep")
    except Exception as error:
        command = shlex.join(["hf", "upload", name, str(folder), ".", *["--private"] * private])
        what = f"the export is in {folder}, but was not uploaded: {first_line(error)}"
        raise LockstepError(what, where=where, remedy=f"upload it with: {command}") from error
    return str(address)


def _hub(where: str) -> Any:
    remedy = "pip install huggingface_hub"
    return optional("huggingface_hub", "huggingface_hub is not installed", where=where, remedy=remedy, kind=UsageError)
