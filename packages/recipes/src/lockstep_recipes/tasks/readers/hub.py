"""Work without the Hugging Face hub if it cannot be reached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

_TIMEOUT_S = 5.0  # to reach the hub at all


@contextlib.contextmanager
def offline_without_network() -> Iterator[str]:
    """If the hub cannot be reached, its libraries use only the local cache.

    Otherwise they would retry for half a minute, even for a misspelt name.

    Yields:
        The reason why only the cache is used, for an error message: " (...)". Empty if the hub can be reached.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        yield " (HF_HUB_OFFLINE is set)"
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:
        reason = f" (which cannot be reached: {type(error).__name__})"
    else:
        yield ""
        return
    datasets = sys.modules.get("datasets")  # it has its own setting
    before = datasets and datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    if datasets:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = False
        if datasets:
            datasets.config.HF_HUB_OFFLINE = before
