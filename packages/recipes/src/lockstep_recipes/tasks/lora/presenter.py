"""Log lines about adapters, and their exports: for peft, or merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep_recipes.tasks.lm import card
from lockstep_recipes.tasks.lm.presenter import LmPresenter
from lockstep_recipes.tasks.lora import adapters

_USE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
ids = model.generate(**{inputs}, generation_config=GenerationConfig.from_pretrained("FOLDER"))
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```"""


class LoraPresenter(LmPresenter):
    """Presents and exports a language model with adapters."""

    def of_run(self) -> list[str]:
        """The lines of the model without adapters, and one about the adapters."""
        first, *lines = super().of_run()
        return [first, f"  {self.task.options.lora}", *lines]

    def export(self, model: nn.Module, folder: Path) -> list[str]:
        """Write the files that `AutoModelForCausalLM` reads, or without `merged` the config that `PeftModel` reads."""
        warnings = super().export(model, folder)
        if not self.merged:
            (folder / "config.json").unlink()  # otherwise transformers would look for complete weights
            held: Any = model
            config = held.peft_config[adapters.ADAPTER]
            name = str(self.task.options.model)
            config.base_model_name_or_path = str(Path(name).resolve()) if Path(name).is_dir() else name
            config.inference_mode = True
            config.save_pretrained(str(folder))
            use = _USE.replace("{base}", config.base_model_name_or_path)
            (folder / "README.md").write_text(card.write(self.task, model, library="peft", use=use, step=self.step))
        return warnings

    def export_weights(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """The adapters under peft's names, or with `merged` the weights of the model with the adapters in them."""
        if self.merged:
            model = self.task.model()
            model.load_state_dict(dict(tensors), strict=False)
            return "model.safetensors", adapters.merge(model)
        found = adapters.import_peft().get_peft_model_state_dict(model, dict(tensors), save_embedding_layers=False)
        return "adapter_model.safetensors", {f"base_model.model.{name}": tensor for name, tensor in found.items()}
