"""A SLURM job script: one agent on each node, stopped before the time limit, and requeued until the end."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.core.errors import UsageError
from lockstep.launch.cluster.job import Job

MARK = "# Written by `lockstep launch slurm`"
_FORMS = (
    (re.compile(r"(\d+)"), (60,)),
    (re.compile(r"(\d+):([0-5]?\d)"), (60, 1)),
    (re.compile(r"(\d+):([0-5]?\d):([0-5]?\d)"), (3600, 60, 1)),
    (re.compile(r"(\d+)-([01]?\d|2[0-3])"), (86400, 3600)),
    (re.compile(r"(\d+)-([01]?\d|2[0-3]):([0-5]?\d)"), (86400, 3600, 60)),
    (re.compile(r"(\d+)-([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)"), (86400, 3600, 60, 1)),
)


@dataclass(frozen=True)
class Allocation:
    """The resources to request from SLURM, in addition to nodes."""

    time: str
    """Time limit, in a form that sbatch reads."""
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    """CPUs of a node. None: SLURM decides, which often means one."""
    memory: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    job_name: str = "lockstep"
    signal_before_s: int = 120
    """Seconds before the time limit at which the ranks are asked to save and stop."""
    more: tuple[str, ...] = field(default=())
    """Further options of sbatch, such as --constraint=a100."""


def seconds_of(time: str) -> int:
    """The seconds of a time limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UsageError: not such a time, or zero.
    """
    for form, factors in _FORMS:
        match = form.fullmatch(time)
        if match and (seconds := sum(int(part) * factor for part, factor in zip(match.groups(), factors, strict=True))):
            return seconds
    remedy = "write HH:MM:SS, D-HH:MM:SS, or a number of minutes"
    raise UsageError(f"{time!r} is not a time limit", where="--time", remedy=remedy)


def check(allocation: Allocation) -> None:
    """Check the time limit and the further options.

    Raises:
        UsageError: a wrong time, a time that leaves nothing for training, or an invalid option.
    """
    limit = seconds_of(allocation.time)
    if limit <= allocation.signal_before_s:
        raise UsageError(
            f"the ranks would be asked to stop {allocation.signal_before_s} s before a limit of {limit} s",
            where="--time",
            remedy="give a longer time, or fewer seconds with slurm.signal_before",
        )
    for option in allocation.more:
        if not re.fullmatch(r"-[^\n]+", option):
            raise UsageError(
                f"{option!r} is not an option", where="slurm.sbatch", remedy="write slurm.sbatch=--constraint=a100"
            )


def script(
    job: Job,
    allocation: Allocation,
    *,
    directory: str,
    python: str,
    container: str | None = None,
    setup: Sequence[str] = (),
    max_requeues: int = 3,
    command: str = "",
) -> str:
    """The text of the job script.

    Args:
        directory: the working directory on all nodes.
        python: the interpreter with Lockstep, on the nodes or in the container.
        container: an image. A file .sif is started with apptainer, and any other image by SLURM's plugin pyxis.
        setup: lines of shell, such as `module load cuda`.
        max_requeues: how often in a row the job is requeued without a new checkpoint.
        command: the command line that made the script, for its header.
    """
    parts = [
        _head(job, allocation, directory, command),
        "set -u\n"
        f"run_dir={shlex.quote(job.run_dir)}\n"
        f"max_requeues={max_requeues}  # in a row, without a new checkpoint\n"
        f"signal_before={allocation.signal_before_s}  # seconds, as in --signal",
    ]
    lines = [*setup, *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())]
    parts += [_TRAPS.strip()]
    parts += ["\n".join(lines)] if lines else []
    parts += [_RENDEZVOUS.strip()] if job.nodes > 1 else []
    parts += [_PROGRESS.strip()]
    parts += [_start(job, allocation, directory=directory, python=python, container=container)]
    parts += [_END.strip()]
    return "\n\n".join(parts) + "\n"


def _head(job: Job, allocation: Allocation, directory: str, command: str) -> str:
    def option(text: str) -> str:
        return f"#SBATCH {text}"

    def given(name: str, value: object) -> list[str]:
        # sbatch splits these lines at spaces as a shell does; quotes keep a value with spaces together.
        text = str(value)
        quoted = text if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text) else '"' + text.replace('"', '\\"') + '"'
        return [] if value is None else [option(f"{name}={quoted}")]

    lines = ["#!/bin/bash", f"{MARK}. {job.about}."]
    lines += [f"#   {' '.join(command.splitlines())}"] if command else []
    lines += given("--job-name", allocation.job_name)
    lines += [option(f"--nodes={job.nodes}"), option("--ntasks-per-node=1")]
    lines += given("--cpus-per-task", allocation.cpus_per_task)
    lines += given("--gpus-per-node", allocation.gpus_per_node or None)
    lines += given("--mem", allocation.memory)
    lines += given("--time", allocation.time)
    lines += given("--account", allocation.account) + given("--partition", allocation.partition)
    lines += given("--qos", allocation.qos)
    lines += [option(f"--signal=B:USR1@{allocation.signal_before_s}"), option("--requeue")]
    lines += given("--chdir", directory)
    lines += [*given("--output", f"{allocation.job_name}-%j.out"), option("--open-mode=append")]
    lines += [option(text) for text in allocation.more]
    return "\n".join(lines)


def _start(job: Job, allocation: Allocation, *, directory: str, python: str, container: str | None) -> str:
    """The lines that start the agents and wait for their end."""
    agent = [python, "-m", "lockstep", *job.train]
    wrapped, options = [], []
    places = [directory, *([job.run_dir] if os.path.isabs(job.run_dir) else [])]
    if container is not None and container.endswith(".sif"):
        binds = ["--bind", ",".join(places), "--pwd", directory]
        wrapped = ["apptainer", "exec", *(["--nv"] if allocation.gpus_per_node else []), *binds, container]
    elif container is not None:
        mounts = "--container-mounts=" + ",".join(f"{place}:{place}" for place in places)
        options = [f"--container-image={container}", mounts, f"--container-workdir={directory}"]
    # SLURM gives a job step only as many CPUs as a task asks for, whatever the job has.
    cpus = ["--cpus-per-task=$SLURM_CPUS_PER_TASK"] if allocation.cpus_per_task is not None else []
    meeting = []
    if job.nodes > 1:
        meeting = [
            f'--nnodes {job.nodes} --rendezvous "$rendezvous"',
            '--rendezvous-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        ]
    lines = [
        " ".join(["srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0", *cpus, *map(shlex.quote, options)]),
        "bash -c 'LOCKSTEP_NODE=$SLURMD_NODENAME exec \"$@\"' lockstep",
        *([shlex.join(wrapped)] if wrapped else []),
        shlex.join(agent),
        *meeting,
    ]
    return "# One agent on each node. It starts the ranks of its node.\n" + " \\\n    ".join(lines) + " &"


_TRAPS = """
# SLURM sends USR1 to this script before the time limit. The agents get it, save, and end with exit code 75.
# TERM comes from scancel, preemption, `scontrol requeue` and at the time limit. SLURM sends it to the agents too.
agents= again= asked= ended=
trap 'again=1 asked=$SECONDS; [ -z "$agents" ] || kill -USR1 "$agents"' USR1
trap 'again=1 ended=$SECONDS' TERM
"""

_RENDEZVOUS = """
# The agents meet on the first host of the job. LOCKSTEP_RENDEZVOUS=HOST:PORT in the environment names another place.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if ! getent hosts "$first" > /dev/null; then  # the name does not resolve: take the address that SLURM uses
    first=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
fi
rendezvous=${LOCKSTEP_RENDEZVOUS:-$first:$((29400 + SLURM_JOB_ID % 3000))}
"""

_PROGRESS = """
newest() { ls "$run_dir/checkpoints" 2> /dev/null | grep '^step-[0-9]*$' | sort | tail -n 1; }
before=$(newest)
mkdir -p "$run_dir"
"""

_END = """
agents=$!
[ -z "$asked" ] || { sleep 5; kill -USR1 "$agents"; }  # USR1 came before there were agents
while again=; wait "$agents"; code=$?; [ -n "$again" ]; do :; done  # a signal interrupts `wait`

# Exit code 75: the ranks have saved and stopped, and the same job resumes from there. Other codes end the job, unless
# the ranks were killed at the time limit.
if [ "$code" != 75 ] && { [ -z "$asked" ] || [ "$code" -le 128 ]; }; then exit "$code"; fi
# After TERM, SLURM requeues the job itself, or it was cancelled. Only at the time limit, this script must do it.
if [ -n "$ended" ] && { [ -z "$asked" ] || [ $((ended - asked)) -lt $((signal_before - 5)) ]; }; then exit "$code"; fi
after=$(newest)
count=0
if [ "$after" = "$before" ]; then
    read -r job count 2> /dev/null < "$run_dir/slurm-requeues" && [ "$job" = "$SLURM_JOB_ID" ] || count=0
    count=$((count + 1))
fi
if [ "$count" -gt "$max_requeues" ]; then
    echo "not requeued: stopped $count times in a row without a new checkpoint in $run_dir" >&2
    exit "$code"
fi
echo "$SLURM_JOB_ID $count" > "$run_dir/slurm-requeues"
scontrol requeue "$SLURM_JOB_ID" || exit "$code"  # it printed the reason
echo "stopped at ${after:-no checkpoint}; job $SLURM_JOB_ID is requeued" >&2
"""
