"""Manifests: what they ask for, and that Kubernetes changes no argument. The published models are in test_models.py."""

import os
import re
import signal
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep.launch.cluster import job as jobs
from lockstep.launch.cluster import kubernetes
from tests.processes import HANG_S, wait_for

POD = kubernetes.Pod("me/train:1", "runs", gpus=8, cpu="64", memory="512Gi")


def job(**changes):
    given = {"target": "digits", "name": "digits", "nodes": 4, "nproc": "8", "run_dir": "/runs/digits"}
    return jobs.Job(**(given | changes))


def expanded(text, variables):
    """What a container gets for an argument: $(NAME) is a variable's value if there is such, and $$ is $."""

    def replaced(match):
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, text)


def container_of(manifests):
    """The container of a pod of the first manifest."""
    spec = manifests[0]["spec"]
    if "pytorchReplicaSpecs" in spec:
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]


def test_a_train_job_has_one_agent_on_each_node():
    runtime, train = kubernetes.train_job(job(), POD, name="digits", namespace="team")
    trainer = train["spec"]["trainer"]
    assert trainer["command"] == ["python", "-m", "lockstep"]
    assert trainer["args"] == [
        *("train", "digits", "--nproc", "8", "--run-dir", "/runs/digits"),
        *("--nnodes", "4", "--rendezvous", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
    ]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    asked = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert trainer["resourcesPerNode"] == {"requests": asked, "limits": asked}
    assert train["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert {manifest["metadata"]["namespace"] for manifest in (runtime, train)} == {"team"}


def test_a_train_job_goes_on_after_code_75_and_ends_after_errors():
    runtime, _ = kubernetes.train_job(job(), POD, name="digits", namespace="team", max_restarts=7)
    jobset = runtime["spec"]["template"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 7
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    nodes = jobset["replicatedJobs"][0]["template"]["spec"]
    assert nodes["template"]["spec"]["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    actions = {
        code: rule["action"]
        for rule in nodes["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {75: "Ignore", 1: "FailJob", 2: "FailJob", 3: "FailJob"}


@pytest.mark.parametrize("make", [kubernetes.train_job, kubernetes.pytorch_job])
def test_volumes(make):
    pod = kubernetes.Pod("me/train:1", "claim", mount="/data/runs", shm="16Gi", secret="wandb", directory="/code")
    manifests = make(job(), pod, name="digits", namespace="team")
    container = container_of(manifests)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"runs": "/data/runs", "shm": "/dev/shm"}
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert container["workingDir"] == "/code"
    text = kubernetes.to_yaml(manifests, about="a", command="b")
    assert "claimName: claim" in text
    assert "sizeLimit: 16Gi" in text
    assert "terminationGracePeriodSeconds: 120" in text


def test_without_gpus_none_are_asked_for():
    pod = kubernetes.Pod("me/train:1", "runs")
    for make in (kubernetes.train_job, kubernetes.pytorch_job):
        text = kubernetes.to_yaml(make(job(), pod, name="digits", namespace="team"), about="a", command="b")
        assert "nvidia" not in text
        assert "resources" not in text


def test_one_node_meets_nobody():
    for make in (kubernetes.train_job, kubernetes.pytorch_job):
        text = kubernetes.to_yaml(make(job(nodes=1), POD, name="digits", namespace="team"), about="a", command="b")
        assert "--rendezvous" not in text


texts = st.text(st.characters(exclude_characters="\0\r", codec="utf-8", max_codepoint=0x2FFF), max_size=12)
texts |= st.text("$()AX \n'\"{", max_size=12)
VARIABLES = {"A": "wrong", "AX": "wrong", "PET_MASTER_ADDR": "digits-node-0-0.digits", "PET_MASTER_PORT": "29500"}


@settings(max_examples=8, deadline=None)
@given(overrides=st.lists(texts, min_size=15, max_size=20), value=texts)
def test_every_argument_arrives_as_it_was_given(overrides, value):
    training = job(overrides=tuple(overrides), environment={"GIVEN": value})
    text = kubernetes.to_yaml(
        kubernetes.train_job(training, POD, name="digits", namespace="team"), about="a", command="b"
    )
    trainer = list(yaml.safe_load_all(text))[1]["spec"]["trainer"]
    arguments = [expanded(argument, VARIABLES) for argument in trainer["args"]]
    assert arguments == [*training.train, "--nnodes", "4", "--rendezvous", "digits-node-0-0.digits:29500"]
    assert [expanded(variable["value"], VARIABLES) for variable in trainer["env"]] == [value]


AGENT = """#!/bin/sh
# In the place of python.
printf '%s\\0' "$@" > "$HERE/arguments"
trap 'exit 75' TERM
touch "$HERE/started"
eval "$DOES"
"""


@pytest.fixture
def agent(tmp_path):
    """Starts the shell lines of a PyTorchJob with another program in the place of python."""
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)

    def start(does, **changes):
        pod = kubernetes.Pod("me/train:1", "runs", python=str(tmp_path / "agent"))
        manifests = kubernetes.pytorch_job(job(**changes), pod, name="digits", namespace="team")
        text = kubernetes.to_yaml(manifests, about="a", command="b")
        container = container_of([yaml.safe_load(text)])
        command = [expanded(word, VARIABLES) for word in [*container["command"], *container["args"]]]
        own = {"HERE": str(tmp_path), "DOES": does, "RANK": "1", "WORLD_SIZE": "4"}
        return subprocess.Popen(command, env=os.environ | own)

    return start


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (2, 2), (75, 138), (137, 137), (143, 143)])
def test_a_pytorch_job_starts_pods_again_after_code_75(agent, code, seen):
    assert agent(f"exit {code}").wait(HANG_S) == seen


def test_a_pytorch_job_passes_sigterm_on_and_waits(agent, tmp_path):
    process = agent("while :; do sleep 0.02; done")
    wait_for((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 138


def test_an_agent_of_a_pytorch_job_is_no_rank(agent):
    assert agent('[ -z "$RANK$WORLD_SIZE" ]').wait(HANG_S) == 0


@settings(max_examples=4, deadline=None)
@given(overrides=st.lists(texts, min_size=20, max_size=30))
def test_every_argument_arrives_through_the_shell(tmp_path_factory, overrides):
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent").write_text(AGENT)
    (folder / "agent").chmod(0o755)
    pod = kubernetes.Pod("me/train:1", "runs", python=str(folder / "agent"))
    training = job(overrides=tuple(overrides))
    text = kubernetes.to_yaml(
        kubernetes.pytorch_job(training, pod, name="digits", namespace="team"), about="a", command="b"
    )
    container = container_of([yaml.safe_load(text)])
    command = [expanded(word, VARIABLES) for word in [*container["command"], *container["args"]]]
    assert subprocess.run(command, env=os.environ | {"HERE": str(folder), "DOES": "exit 0"}).returncode == 0
    arguments = (folder / "arguments").read_text().split("\0")[:-1]
    assert arguments == ["-m", "lockstep", *training.train, "--nnodes", "4", "--rendezvous", "digits-worker-0:29400"]


@pytest.mark.parametrize(
    ("text", "name"),
    [("digits", "digits"), ("CT_small", "ct-small"), ("3d", "run-3d"), ("a..b", "a-b"), ("_", "run"), ("Ä", "run")],
)
def test_names(text, name):
    assert kubernetes.name_of(text) == name
    kubernetes.check_name(name)


@pytest.mark.parametrize("name", ["Digits", "a_b", "-a", "a-", "1a", "", "a" * 51])
def test_wrong_names(name):
    with pytest.raises(UsageError, match="is not a name for Kubernetes"):
        kubernetes.check_name(name)


def test_claims():
    assert kubernetes.read_volume("runs") == ("runs", "/runs")
    assert kubernetes.read_volume("my-claim:/data/") == ("my-claim", "/data")
    for wrong in ("", ":/runs", "runs:data", "My_Claim"):
        with pytest.raises(UsageError, match="--volume"):
            kubernetes.read_volume(wrong)


@pytest.mark.parametrize("sizes", [{"memory": "64GB"}, {"cpu": "many"}, {"shm": ""}, {"cpu": "-1"}])
def test_wrong_sizes(sizes):
    with pytest.raises(UsageError, match="is not a quantity"):
        kubernetes.check(kubernetes.Pod("me/train:1", "runs", **sizes))
    kubernetes.check(kubernetes.Pod("me/train:1", "runs", cpu="1500m", memory="1.5Ti", shm="1000000"))
