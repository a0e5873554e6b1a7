"""The keys of `lockstep launch slurm` and of `lockstep launch kubernetes`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lockstep.cli.command_keys import CommandKeys, Lines
from lockstep.launch.cluster import kubernetes, slurm


class SlurmKeys(CommandKeys):
    """The keys `slurm.KEY=VALUE`."""

    account: str | None = Field(None, description="Account to charge, as for sbatch.")
    partition: str | None = Field(None, description="Partition, as for sbatch.")
    qos: str | None = Field(None, description="Quality of service, as for sbatch.")
    cpus_per_task: int | None = Field(
        None, ge=1, description="CPUs of each node. Default: one for each rank and loader worker."
    )
    mem: str | None = Field(None, description="Memory of each node, such as 64G.")
    container: str | None = Field(None, description="FILE.sif for apptainer, or an image for pyxis.")
    job_name: str | None = Field(None, description="Name of the job. Default: the config's name.")
    directory: Path | None = Field(None, description="Working directory. Default: this one.")
    python: str | None = Field(None, description="Interpreter with Lockstep. Default: this one; in a container python.")
    setup: Lines = Field((), description='A line of shell, such as "module load cuda". May be given several times.')
    sbatch: Lines = Field((), description="A further option, such as --constraint=a100. May be given several times.")
    signal_before: int = Field(
        slurm.Allocation.signal_before_s, ge=1, description="Save and stop this many seconds before the time limit."
    )
    max_requeues: int = Field(
        3, ge=0, description="Times in a row that the job is queued again without a new checkpoint."
    )


class KubernetesKeys(CommandKeys):
    """The keys `kubernetes.KEY=VALUE`."""

    namespace: str = Field("default", description="Namespace of the job.")
    kind: Literal["TrainJob", "PyTorchJob"] = Field(
        "TrainJob", description="TrainJob for Kubeflow Trainer, or PyTorchJob for the older training operator."
    )
    cpu: str | None = Field(None, description="CPUs of each node.")
    memory: str | None = Field(None, description="Memory of each node, such as 64Gi.")
    shm: str = Field(kubernetes.Pod.shm, description="Size of /dev/shm.")
    grace: int = Field(
        kubernetes.Pod.grace_s, ge=1, description="Seconds from the request to stop to the end of a pod."
    )
    gpu_resource: str = Field(kubernetes.Pod.gpu_resource, description="Name that the cluster gives to GPUs.")
    secret: str | None = Field(None, description="A Secret whose keys become environment variables.")
    job_name: str | None = Field(None, description="Name of the job. Default: the config's name.")
    directory: str | None = Field(None, description="Working directory. Default: the image's.")
    python: str = Field(kubernetes.Pod.python, description="Interpreter with Lockstep in the image.")
