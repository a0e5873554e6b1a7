"""Options for low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lockstep.core.config.config_section import Section


class LoraOptions(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): the weights of the model are frozen, and a layer adds
    alpha / rank * B A x, where A and B train."""

    rank: PositiveInt = 16
    """Rank of the adapters: rows of A, columns of B."""
    alpha: PositiveFloat | None = None
    """None: twice the rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the input of adapters."""
    targets: Annotated[list[str], Field(min_length=1)] | str | None = None
    """Layers that get adapters: suffixes of their names, `all-linear` (all linear layers but the last), or a regular
    expression. None: peft's default for the architecture."""
    base_dtype: Literal["fp32", "bf16"] = "fp32"
    """The number format of the frozen weights. bf16 halves their memory. Adapters are float32."""
    dora: bool = False
    """Train the norms of the weights separately (DoRA, Liu et al. 2024, arXiv:2402.09353)."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732)."""

    def __str__(self) -> str:
        options = ", ".join(f"{key} {value}" for key, value in self.model_dump(exclude_none=True).items())
        return f"peft adapters train, the {self.base_dtype} weights are frozen: {options}"
