"""The manifests against the published models of Kubeflow and Kubernetes. `make test-cluster` installs these."""

import importlib.util
import json
import types

import pytest
import yaml

from lockstep.launch.cluster import job as jobs
from lockstep.launch.cluster import kubernetes

LIBRARIES = ("kubeflow_trainer_api", "kubeflow.training", "kubernetes")


def is_there(library):
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not all(map(is_there, LIBRARIES)), reason=f"needs {', '.join(LIBRARIES)}; see make test-cluster"
    ),
]
# From one GPU to 512, on nodes of up to 8, and CPUs alone.
SIZES = [(1, gpus) for gpus in (0, 1, 2, 4, 7)] + [(nodes, 8) for nodes in range(1, 65)]


def manifests(make, nodes, gpus, **changes):
    training = jobs.Job(
        "digits", "digits", nodes, str(gpus or 2), "/runs/digits", ("optim.lr=1e-3",), environment={"A": "$(B)"}
    )
    pod = kubernetes.Pod(
        "me/train:1", "runs", gpus=gpus, cpu="8", memory="64Gi", secret="s", directory="/code", **changes
    )
    text = kubernetes.to_yaml(make(training, pod, name="digits", namespace="team"), about="a", command="b")
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
def test_train_job(nodes, gpus):
    from kubeflow_trainer_api import models

    runtime, train = manifests(kubernetes.train_job, nodes, gpus)
    for kind, manifest in ((models.TrainerV1alpha1TrainingRuntime, runtime), (models.TrainerV1alpha1TrainJob, train)):
        read = kind.from_dict(manifest)
        # The models leave out keys that they do not know, so an equal manifest has only known keys.
        assert json.loads(json.dumps(read.to_dict(), default=str)) == manifest


@pytest.mark.parametrize(("nodes", "gpus"), SIZES)
def test_pytorch_job(nodes, gpus):
    from kubeflow.training import ApiClient

    (manifest,) = manifests(kubernetes.pytorch_job, nodes, gpus)
    client = ApiClient()
    read = client.deserialize(types.SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
    assert client.sanitize_for_serialization(read) == manifest
    # The pod, which the first model leaves open, by Kubernetes' own.
    import kubernetes as official

    client = official.client.ApiClient()
    template = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    read = client.deserialize(types.SimpleNamespace(data=json.dumps(template)), "V1PodTemplateSpec")
    assert client.sanitize_for_serialization(read) == template


def test_the_models_know_the_whole_pod_of_a_train_job():
    import kubernetes as official

    runtime, _ = manifests(kubernetes.train_job, 2, 8)
    spec = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    client = official.client.ApiClient()
    read = client.deserialize(types.SimpleNamespace(data=json.dumps(spec)), "V1JobSpec")
    assert client.sanitize_for_serialization(read) == spec


def test_a_key_that_is_wrong_is_found():
    from kubeflow_trainer_api import models

    runtime, train = manifests(kubernetes.train_job, 2, 8)
    runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestart"] = 3
    assert models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() != runtime
    train["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(train)
