"""Recipes for Lockstep: tasks for text, images, CT volumes and language models, data in shards, and adapters.

Shards: a data set of samples in local or remote shards: Parquet, Arrow, JSON lines, tar, MDS.
adapters: tasks made from a LightningModule or a transformers model.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing's constant would take as long as starting Python
__version__ = "0.1.0"
__all__ = ["Shards"]

if TYPE_CHECKING:
    from lockstep_recipes import adapters as adapters
    from lockstep_recipes.shards.data import Shards


def __dir__() -> list[str]:
    return [*__all__, "adapters", "__version__", "__doc__"]


def __getattr__(name: str) -> object:
    if name == "adapters":  # adapters and data sets import torch; reading a recipe must not wait for that
        return importlib.import_module("lockstep_recipes.adapters")
    if name != "Shards":
        raise AttributeError(f"module 'lockstep_recipes' has no attribute {name!r}")
    return importlib.import_module("lockstep_recipes.shards.data").Shards
