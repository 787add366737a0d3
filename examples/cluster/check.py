"""Compares Kubernetes manifests with the types that their operators publish; `.ci/cluster` runs it.

`python check.py FILE...`: an object that its type has read and written again must be the same. A field that the type does not have
is lost on the way, and a value of another type is refused or comes back as another one.
"""

import sys

import yaml
from kubeflow.training.api_client import ApiClient
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet


def jobset(manifest):
    return JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


def pytorchjob(manifest):
    client = ApiClient()
    # Its public form takes only the answer of a server.
    return client.sanitize_for_serialization(client._ApiClient__deserialize(manifest, "KubeflowOrgV1PyTorchJob"))


TYPES = {("jobset.x-k8s.io/v1alpha2", "JobSet"): jobset, ("kubeflow.org/v1", "PyTorchJob"): pytorchjob}


def differences(one, other, path=""):
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(one.get(key), other.get(key), f"{path}.{key}") for key in sorted(one.keys() | other.keys())]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(one, other))]
    else:
        return [] if (type(one), one) == (type(other), other) else [f"{path}: {one!r} is read as {other!r}"]
    return [line for pair in pairs for line in differences(*pair)]


wrong = []
for path in sys.argv[1:]:
    with open(path) as file:
        manifest = yaml.safe_load(file)
    read = TYPES[manifest["apiVersion"], manifest["kind"]]
    wrong += [f"{path}{line}" for line in differences(manifest, read(manifest))]
print("\n".join(wrong) or f"{len(sys.argv) - 1} manifests are what their types read")
sys.exit(bool(wrong))
