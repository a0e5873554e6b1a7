"""How to load an export of adapters."""

from __future__ import annotations

from pathlib import Path


def loading(folder: Path) -> str:
    """A line of Python that loads the model of the adapters in a folder. For your own task, make the base model
    yourself."""
    place, base = str(folder), "MODEL"
    names = ["from peft import PeftConfig, PeftModel"]
    if (folder / "config.json").exists():  # for a classifier, with its labels
        names.append("from transformers import AutoConfig, AutoModelForSequenceClassification as Auto")
        base = f"PeftConfig.from_pretrained({place!r}).base_model_name_or_path"
        base = f"Auto.from_pretrained({base}, config=AutoConfig.from_pretrained({place!r}))"
    return "; ".join([*names, f"model = PeftModel.from_pretrained({base}, {place!r})"])
