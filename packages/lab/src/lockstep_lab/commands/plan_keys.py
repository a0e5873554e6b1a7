"""The keys of `lockstep plan`."""

from __future__ import annotations

from pydantic import Field

from lockstep.cli.command_keys import CommandKeys


class PlanKeys(CommandKeys):
    """The keys `plan.KEY=VALUE`."""

    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of a machine. Default: 8, or --gpus.")
    link_bandwidth: str | None = Field(
        None,
        description="Rate between GPUs of a machine, one GPU in one direction: 50GB/s or 400Gbit/s. "
        "Default: the table's.",
    )
    network_bandwidth: str | None = Field(
        None,
        description="Rate between machines, one GPU in one direction. Default: plan.link_bandwidth, if it is given.",
    )
    utilisation: float = Field(0.4, gt=0, le=1, description="Share of the GPU's peak that the training reaches.")
    reserve: float = Field(0.1, ge=0, le=0.9, description="Share of the memory that stays free.")
    samples: int | None = Field(
        None,
        ge=1,
        description="Size of the training set, if the data is not on this machine. The plan then shows the time of an "
        "epoch.",
    )
    classes: int | None = Field(
        None, ge=1, description="Number of classes, if the data is not on this machine. Default: 10."
    )
    failures_per_gpu_year: float | None = Field(
        None, description="Failures of a GPU in a year: the plan then says how often to save."
    )
    save_seconds: float | None = Field(None, description="Seconds that training pauses for each checkpoint.")
    watts: float | None = Field(
        None, description="Power of a GPU with its share of the machine: the plan then shows the energy."
    )
    price_per_gpu_hour: float | None = Field(None, description="Price in any currency: the plan then shows the cost.")
