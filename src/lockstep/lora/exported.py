"""How an export of adapters is loaded."""

from __future__ import annotations

from pathlib import Path


def loading(folder: Path) -> str:
    """A line of Python that makes the model of adapters in a folder. A task of one's own makes its base itself."""
    place, base = str(folder), "MODEL"
    names = ["from peft import PeftConfig, PeftModel"]
    if (folder / "config.json").exists():  # of a classifier, with its labels
        names.append("from transformers import AutoConfig, AutoModelForSequenceClassification as Auto")
        base = f"PeftConfig.from_pretrained({place!r}).base_model_name_or_path"
        base = f"Auto.from_pretrained({base}, config=AutoConfig.from_pretrained({place!r}))"
    return "; ".join([*names, f"model = PeftModel.from_pretrained({base}, {place!r})"])
