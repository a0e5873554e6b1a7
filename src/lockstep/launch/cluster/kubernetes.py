"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the older training operator."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import Preempted, UsageError
from lockstep.launch.cluster.job import Job

MARK = "# Written by `lockstep launch kubernetes`"
_PORT = 29400
_CONTAINER = "node"  # the name that Kubeflow Trainer expects
_LONGEST_NAME = 50  # a pod's host name has at most 63 letters, and ends with the numbers of the job and the pod
_RESTARTABLE = 138
"""The exit code that replaces 75 in a PyTorchJob. The training operator restarts a pod after codes from 128; 138
(128 + SIGUSR1) is the code that it leaves to users."""
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")


@dataclass(frozen=True)
class Pod:
    """The resources of a node's pod."""

    image: str
    claim: str
    """Name of the PersistentVolumeClaim for runs. All nodes must be able to write to it."""
    mount: str = "/runs"
    """Where it is mounted."""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | None = None
    memory: str | None = None
    shm: str = "8Gi"
    """Size of /dev/shm, through which loader workers pass their samples."""
    directory: str | None = None
    """Working directory. None: the image's."""
    python: str = "python"
    secret: str | None = None
    """Name of a Secret whose keys become environment variables."""
    grace_s: int = 120
    """Seconds between the request to stop and the end of a pod."""


def name_of(text: str) -> str:
    """A Kubernetes name from a config's name: `CT_small` becomes `ct-small`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def check_name(name: str) -> None:
    """Check a name.

    Raises:
        UsageError: Kubernetes does not accept it.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        remedy = f"use up to {_LONGEST_NAME} lower-case letters, digits and -, such as {name_of(name)[:_LONGEST_NAME]}"
        raise UsageError(
            f"{name!r} is not a name for Kubernetes", where="kubernetes.job_name", remedy=remedy.rstrip("-")
        )


def read_volume(text: str) -> tuple[str, str]:
    """Claim and mount path of `--volume CLAIM[:/path]`.

    Raises:
        UsageError: neither of these forms.
    """
    claim, _, path = text.partition(":")
    path = path or Pod.mount
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim) or not path.startswith("/"):
        raise UsageError(f"{text!r} is not a volume", where="--volume", remedy="write CLAIM, or CLAIM:/path")
    return claim, path.rstrip("/") or "/"


def check(pod: Pod) -> None:
    """Check the sizes.

    Raises:
        UsageError: a size is not a quantity.
    """
    for option, value in (("kubernetes.cpu", pod.cpu), ("kubernetes.memory", pod.memory), ("kubernetes.shm", pod.shm)):
        if value is not None and not _QUANTITY.fullmatch(value):
            raise UsageError(f"{value!r} is not a quantity", where=option, remedy="write a number, such as 8, or 64Gi")


def train_job(job: Job, pod: Pod, *, name: str, namespace: str, max_restarts: int = 3) -> list[dict[str, Any]]:
    """A TrainingRuntime and the TrainJob that uses it, for Kubeflow Trainer (trainer.kubeflow.org/v1alpha1).

    Args:
        max_restarts: how often all pods are recreated after one was killed.
    """
    arguments = [_unexpanded(text) for text in job.train]
    if job.nodes > 1:
        # Kubernetes replaces $(NAME). Kubeflow Trainer sets these two: the host name of the first pod, and a port.
        arguments += ["--nnodes", str(job.nodes), "--rendezvous", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"]
    container = _container(_CONTAINER, pod)
    metadata = {"name": name, "namespace": namespace}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {
                        "maxRestarts": max_restarts,
                        "rules": [
                            {"name": "failed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                        ],
                    },
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                "spec": _job_of_nodes(pod, container),
                            },
                        }
                    ],
                }
            },
        },
    }
    trainer = {
        "image": pod.image,
        "command": [pod.python, "-m", "lockstep"],
        "args": arguments,
        "numNodes": job.nodes,
        "env": _variables(job.environment),
        "resourcesPerNode": _resources(pod),
    }
    if job.nproc != "auto":
        trainer["numProcPerNode"] = int(job.nproc)
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {key: value for key, value in trainer.items() if value},
        },
    }
    return [runtime, train]


def pytorch_job(job: Job, pod: Pod, *, name: str, namespace: str, max_restarts: int = 3) -> list[dict[str, Any]]:
    """A PyTorchJob for the training operator (kubeflow.org/v1).

    Args:
        max_restarts: how often pods are restarted after a failure, not counting requests to stop.
    """
    agent = [pod.python, "-m", "lockstep", *job.train]
    if job.nodes > 1:
        agent += ["--nnodes", str(job.nodes), "--rendezvous", f"{name}-worker-0:{_PORT}"]
    command = {"image": pod.image, "command": ["/bin/sh", "-c"], "args": [_unexpanded(_shell(agent))]}
    environment, resources = _variables(job.environment), _resources(pod)
    container = command | _container("pytorch", pod) | ({"env": environment} if environment else {})
    container |= {"resources": resources} if resources else {}
    spec: dict[str, Any] = {
        "runPolicy": {"backoffLimit": max_restarts, "cleanPodPolicy": "Running"},
        # Without a master: then the controller sets no RANK, which would make each agent a rank.
        "elasticPolicy": {"rdzvBackend": "c10d", "minReplicas": job.nodes, "maxReplicas": job.nodes},
        "pytorchReplicaSpecs": {
            "Worker": {"replicas": job.nodes, "restartPolicy": "ExitCode", "template": {"spec": _pod(pod, container)}}
        },
    }
    if job.nproc != "auto":
        spec["nprocPerNode"] = job.nproc
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
    ]


def to_yaml(manifests: list[dict[str, Any]], *, about: str, command: str) -> str:
    """The manifests as a file for `kubectl apply -f`."""
    import yaml  # here, because the command line always imports this module

    class Dumper(yaml.SafeDumper):
        """Writes multi-line texts as blocks, and repeats no object by reference."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Dumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    texts = [yaml.dump(manifest, Dumper=Dumper, sort_keys=False, width=100) for manifest in manifests]
    return f"{MARK}. {about}.\n#   {' '.join(command.splitlines())}\n" + "---\n".join(texts)


def _job_of_nodes(pod: Pod, container: dict[str, Any]) -> dict[str, Any]:
    """The Job whose pods are the nodes. It defines which exit codes restart a pod."""
    return {
        "completionMode": "Indexed",
        "backoffLimit": 0,  # any other failure: the JobSet recreates all pods, maxRestarts times
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                _on_exit_codes("Ignore", [Preempted.exit_code]),
                _on_exit_codes("FailJob", [1, 2, 3]),
            ]
        },
        "template": {"spec": _pod(pod, container) | {"restartPolicy": "Never"}},
    }


def _on_exit_codes(action: str, codes: list[int]) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": codes}}


def _container(name: str, pod: Pod) -> dict[str, Any]:
    """The parts of a container that both kinds have in the same place."""
    container: dict[str, Any] = {"name": name, "image": pod.image}
    if pod.directory:
        container["workingDir"] = pod.directory
    if pod.secret:
        container["envFrom"] = [{"secretRef": {"name": pod.secret}}]
    container["volumeMounts"] = [{"name": "runs", "mountPath": pod.mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    return container


def _pod(pod: Pod, container: dict[str, Any]) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": pod.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": pod.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shm}},
        ],
    }


def _resources(pod: Pod) -> dict[str, Any]:
    asked = {name: value for name, value in (("cpu", pod.cpu), ("memory", pod.memory)) if value}
    if pod.gpus:
        asked[pod.gpu_resource] = str(pod.gpus)
    return {"requests": asked, "limits": asked} if asked else {}


def _variables(environment: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": _unexpanded(value)} for name, value in environment.items()]


def _unexpanded(text: str) -> str:
    """`text` escaped so that a container gets it unchanged: Kubernetes replaces $(NAME) by a variable, and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _shell(agent: list[str]) -> str:
    return f"""\
# The controller starts a pod again after exit codes from 128, and after no other. Exit code 75 means: saved, run me
# again. It becomes {_RESTARTABLE}. The other codes below 128 end the job.
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
{shlex.join(agent)} &
agent=$! again=
trap 'again=1; kill -TERM $agent' TERM
while again=; wait $agent; code=$?; [ -n "$again" ] && kill -0 $agent 2> /dev/null; do :; done
[ $code -ne {Preempted.exit_code} ] || code={_RESTARTABLE}
exit $code
"""
