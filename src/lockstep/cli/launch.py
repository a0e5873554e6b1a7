"""`lockstep launch slurm`, `lockstep launch kubernetes` and `lockstep launch ssh`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.commands import Command, CommandGroup, takes_keys
from lockstep.cli.options import Debug, Force, Overrides, Target, as_arguments
from lockstep.cli.reporting import reporting, tell
from lockstep.core.errors import Preempted, UsageError, number_of
from lockstep.launch.cluster import job as jobs
from lockstep.launch.cluster import kubernetes, slurm, ssh
from lockstep.trainer import local_ranks

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig

Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Number of nodes.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of each node; 0: the ranks use CPUs.")]
Nproc = Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks on each node. Default: a rank for each GPU.")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME|FILE.yaml", help="Preset of the nodes, see lockstep doctor presets."),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option("--max-restarts", min=0, help="Restarts of killed or crashed ranks. Default: 3."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="Set a variable of the ranks. Without =VALUE: its value here."),
]
Output = Annotated[Path | None, typer.Option("--output", metavar="FILE", help="File to write.")]


launch = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train on several machines.",
    epilog="Example: lockstep launch slurm imagenet --nodes 4 --gpus-per-node 8 --time 04:00:00",
)


@launch.command(
    cls=Command,
    name="slurm",
    epilog="Example: lockstep launch slurm imagenet --nodes 4 --gpus-per-node 8 --time 04:00:00 --submit",
)
@takes_keys("slurm", "lockstep.cli.launch_keys:SlurmKeys")
def for_slurm(
    target: Target,
    overrides: Overrides = None,
    *,
    nodes: Nodes,
    gpus: Gpus,
    time: Annotated[str, typer.Option(metavar="HH:MM:SS", help="Time limit. Longer runs resume by themselves.")],
    nproc: Nproc = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run, on a file system of all nodes. Default: runs/NAME.")
    ] = None,
    env: Env = None,
    preset: Preset = None,
    max_restarts: MaxRestarts = None,
    output: Output = None,
    force: Force = False,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script with sbatch, too.")] = False,
    debug: Debug = False,
) -> None:
    """Write a job script for SLURM and show it. --submit also submits it."""
    with reporting(debug):
        from lockstep.cli.command_keys import split
        from lockstep.cli.launch_keys import SlurmKeys

        overrides, keys = split(overrides or (), "slurm", SlurmKeys)
        settings = _load(target, overrides, preset)
        name = keys.job_name or settings.name
        given = [text for text in env or () if "=" in text]
        more = {"--preset": preset, "--max-restarts": max_restarts}
        job = _job(
            target, overrides, settings, nodes=nodes, nproc=nproc, gpus=gpus, run_dir=run_dir, env=given, more=more
        )
        jobs.read_environment(env or ())  # a variable without a value: sbatch passes it on as it is here
        cpus = keys.cpus_per_task or int(job.nproc) * (1 + settings.data.workers)
        allocation = slurm.Allocation(
            time=time,
            gpus_per_node=gpus,
            cpus_per_task=cpus,
            memory=keys.mem,
            account=keys.account,
            partition=keys.partition,
            qos=keys.qos,
            job_name=name,
            signal_before_s=keys.signal_before,
            more=keys.sbatch,
        )
        slurm.check(allocation)
        tool = jobs.check_tool("sbatch", "leave --submit out, and submit the file elsewhere") if submit else ""
        place = str((keys.directory or Path()).absolute())
        interpreter = keys.python or ("python" if keys.container else sys.executable)

        def text_of(shown: jobs.Job) -> str:
            return slurm.script(
                shown,
                allocation,
                directory=place,
                python=interpreter,
                container=keys.container,
                setup=keys.setup,
                max_requeues=keys.max_requeues,
                command=jobs.shown_command(sys.argv[1:]),
            )

        _warn(job, settings, place)
        path = output or Path(f"{name}.sbatch")
        _write_and_show(path, job, text_of, mark=slurm.MARK, force=force)
        _hand_over([tool, str(path)], submit, f"sbatch {shlex.quote(str(path))}")


@launch.command(
    cls=Command,
    name="kubernetes",
    epilog="Example: lockstep launch kubernetes imagenet --nodes 4 --gpus-per-node 8 --image train:1 --volume runs",
)
@takes_keys("kubernetes", "lockstep.cli.launch_keys:KubernetesKeys")
def for_kubernetes(
    target: Target,
    overrides: Overrides = None,
    *,
    nodes: Nodes,
    gpus: Gpus,
    image: Annotated[str, typer.Option(help="Container image with Lockstep.")],
    volume: Annotated[
        str, typer.Option(metavar="CLAIM[:/PATH]", help="PersistentVolumeClaim for runs, mounted at /runs.")
    ],
    nproc: Nproc = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run, on the volume. Default: /runs/NAME.")
    ] = None,
    env: Env = None,
    preset: Preset = None,
    max_restarts: MaxRestarts = None,
    output: Output = None,
    force: Force = False,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the manifest with kubectl, too.")] = False,
    debug: Debug = False,
) -> None:
    """Write a manifest for Kubernetes and show it. --apply also applies it."""
    with reporting(debug):
        from lockstep.cli.command_keys import split
        from lockstep.cli.launch_keys import KubernetesKeys

        overrides, keys = split(overrides or (), "kubernetes", KubernetesKeys)
        settings = _load(target, overrides, preset)
        claim, mount = kubernetes.read_volume(volume)
        name = keys.job_name or kubernetes.name_of(settings.name)
        kubernetes.check_name(name)
        place = run_dir or Path(mount, settings.name)
        more = {"--preset": preset, "--max-restarts": max_restarts}
        job = _job(
            target, overrides, settings, nodes=nodes, nproc=nproc, gpus=gpus, run_dir=place, env=env or (), more=more
        )
        if place.is_absolute() and not place.is_relative_to(mount):
            remedy = f"give a folder in {mount}"
            raise UsageError(f"{place} is not on the volume", where="--run-dir", remedy=remedy)
        pod = kubernetes.Pod(
            image=image,
            claim=claim,
            mount=mount,
            gpus=gpus,
            gpu_resource=keys.gpu_resource,
            cpu=keys.cpu,
            memory=keys.memory,
            shm=keys.shm,
            directory=keys.directory,
            python=keys.python,
            secret=keys.secret,
            grace_s=keys.grace,
        )
        kubernetes.check(pod)
        tool = jobs.check_tool("kubectl", "leave --apply out, and apply the file elsewhere") if apply else ""
        make = kubernetes.train_job if keys.kind == "TrainJob" else kubernetes.pytorch_job

        def text_of(shown: jobs.Job) -> str:
            manifests = make(shown, pod, name=name, namespace=keys.namespace)
            return kubernetes.to_yaml(manifests, about=job.about, command=jobs.shown_command(sys.argv[1:]))

        _warn(job, settings, mount)
        if ".py:" in target or target.endswith((".yaml", ".yml")):
            file = target.partition(".py:")[0] + ".py" if ".py:" in target else target
            tell(f"note: the image must have {file} at this path, from its working directory")
        path = output or Path(f"{name}.{keys.kind.lower()}.yaml")
        _write_and_show(path, job, text_of, mark=kubernetes.MARK, force=force)
        _hand_over([tool, "apply", "-f", str(path)], apply, f"kubectl apply -f {shlex.quote(str(path))}")


@launch.command(
    cls=Command, name="ssh", epilog="Example: lockstep launch ssh imagenet --hosts node1,node2 --nproc auto"
)
def through_ssh(
    target: Target,
    overrides: Overrides = None,
    *,
    hosts: Annotated[str, typer.Option(metavar="A,B,C", help="The hosts, as ssh knows them. They meet on the first.")],
    nproc: Annotated[str, typer.Option("--nproc", help="Ranks on each host; auto: one per GPU.")] = "auto",
    directory: Annotated[str | None, typer.Option(help="Working directory on the hosts. Default: this one.")] = None,
    python: Annotated[
        str | None, typer.Option(help="Interpreter with Lockstep on the hosts. Default: this one.")
    ] = None,
    command: Annotated[
        str,
        typer.Option("--ssh", metavar="COMMAND", help='Command of ssh, with its options: --ssh "ssh -p 2222 -i KEY".'),
    ] = "ssh",
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Meeting point of the hosts. Default: the first host:29400."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run, on a file system of all hosts. Default: runs/NAME.")
    ] = None,
    env: Env = None,
    preset: Preset = None,
    max_restarts: MaxRestarts = None,
    debug: Debug = False,
) -> None:
    """Train on several hosts through ssh. Ctrl-C saves and stops everywhere."""
    with reporting(debug):
        settings = _load(target, overrides or (), preset)
        names = ssh.read_hosts(hosts)
        local_ranks.check_nproc(nproc)
        more = {"--preset": preset, "--max-restarts": max_restarts}
        many = len(names)
        job = _job(
            target, overrides, settings, nodes=many, nproc=nproc, gpus=0, run_dir=run_dir, env=env or (), more=more
        )
        words = _split(command, "--ssh")
        jobs.check_tool(words[0], "install an ssh client, or name it with --ssh")
        there = ssh.Hosts(names, directory or os.getcwd(), python or sys.executable, tuple(words))
        _warn(job, settings, there.directory)
        meeting = rendezvous or ssh.address_of(there)
        meeting = meeting if ":" in meeting else f"{meeting}:{ssh.PORT}"
        tell(f"{job.about}: {', '.join(names)}; they meet at {meeting}")
        code = ssh.run(job, there, meeting)
        if code == Preempted.exit_code:
            tell("stopped; the same command resumes from the newest checkpoint")
        if code:
            raise typer.Exit(code)


def _load(target: str, overrides: Sequence[str], preset: str | None) -> RunConfig:
    """The config of a training on other machines: with a preset, but without looking at this machine."""
    from lockstep.cli import config_preset
    from lockstep.configs import config_file

    settings = config_file.load(target, overrides)
    return settings if preset is None else config_preset.read(preset).apply(settings, overrides)


def _job(
    target: str,
    overrides: Sequence[str] | None,
    settings: RunConfig,
    *,
    nodes: int,
    nproc: int | str | None,
    gpus: int,
    run_dir: Path | None,
    env: Sequence[str],
    more: Mapping[str, object],
) -> jobs.Job:
    """The job, after checks of the target's file, the ranks and the environment variables.

    Args:
        more: further options of `lockstep train`, with their values.
    """
    jobs.check_target(target)
    if nproc is None and not gpus:
        remedy = "give --nproc N, the ranks on each node, or --gpus-per-node"
        raise UsageError("without GPUs, the number of ranks is not known", where="--gpus-per-node 0", remedy=remedy)
    if gpus and nproc is not None and int(nproc) > gpus:
        remedy = "use at most one rank for each GPU"
        raise UsageError(f"{nproc} ranks share {number_of(gpus, 'GPU')} of a node", where="--nproc", remedy=remedy)
    return jobs.Job(
        target,
        settings.name,
        nodes,
        str(nproc or gpus),
        str(run_dir or Path("runs", settings.name)),
        tuple(overrides or ()),
        tuple(as_arguments(more)),
        jobs.read_environment(env),
    )


def _split(text: str, option: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}", where=option, remedy="close the quotes") from error
    if not words:
        raise UsageError("is empty", where=option, remedy="name a command")
    return words


def _warn(job: jobs.Job, settings: RunConfig, directory: str) -> None:
    for text in jobs.warnings(job, settings.batch.global_, directory):
        tell(f"warning: {text}")


def _write_and_show(path: Path, job: jobs.Job, text_of: Callable[[jobs.Job], str], *, mark: str, force: bool) -> None:
    """Write the text into a file, and print it without secrets."""
    jobs.write(path, text_of(job), mark=mark, is_secret=bool(job.secrets), force=force)
    print(text_of(job.shown), end="", flush=True)
    for name in job.secrets:
        tell(f"warning: the value of {name} is in {path}, which only you can read")


def _hand_over(command: Sequence[str], wanted: bool, by_hand: str) -> None:
    """Run the scheduler's command, or say which command the user may run."""
    if not wanted:
        tell(f"written: {command[-1]}. Submit it with: {by_hand}")
        return
    done = subprocess.run(command)
    if done.returncode:
        raise UsageError(
            f"exit code {done.returncode}; it said why above", where=by_hand, remedy="change what it names"
        )
