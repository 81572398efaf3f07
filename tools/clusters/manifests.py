"""Checks Kubernetes manifests, and says what their pods run.

    manifests.py check FILE      by official schemas, as PyPI has them
    manifests.py pods FILE       a line per pod: its DNS name, then variables and command for a shell

| kind | schema |
|---|---|
| Service, Job, and the pod and job templates of the other two | Kubernetes's OpenAPI, as JSON schemas: `kubernetes-validate`, strict |
| JobSet | the API's generated models: `kubeflow-trainer-api` |
| PyTorchJob | the API's generated models: `kubeflow-training` |

A generated model drops fields that it does not know, so each field must survive a way through it.
"""

import json
import shlex
import sys
import warnings

import kubernetes_validate
import yaml

warnings.filterwarnings("ignore")


def lost(given, kept, path=""):
    """Fields of `given` that `kept` has not, or has with another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [field for key in given for field in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [field for i, pair in enumerate(zip(given, kept)) for field in lost(*pair, f"{path}[{i}]")]
    return [] if given == kept else [path]


def by_schema(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def by_models(document, kept):
    if fields := lost(document, kept):
        sys.exit(f"{document['kind']}: fields that its API does not know: {', '.join(fields)}")


def pod_template(template):
    by_schema({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})


def check_jobset(document):
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    by_models(document, JobsetV1alpha2JobSet.from_dict(document).to_dict())
    for job in document["spec"]["replicatedJobs"]:
        by_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]})


def check_pytorchjob(document):
    import kubernetes.client
    from kubeflow.training import models

    # The client looks for models by name among its own.
    for name in dir(models):
        if name.startswith("KubeflowOrgV1"):
            setattr(kubernetes.client.models, name, getattr(models, name))
    client = kubernetes.client.ApiClient()
    answer = type("Answer", (), {"data": json.dumps(document)})
    by_models(document, client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob")))
    for replica in document["spec"]["pytorchReplicaSpecs"].values():
        pod_template(replica["template"])


CHECKS = {"JobSet": check_jobset, "PyTorchJob": check_pytorchjob, "Job": by_schema, "Service": by_schema}


def indexed_pods(name, subdomain, spec):
    """Pods of an indexed Job: names and variables as the Job controller gives them."""
    for index in range(spec["completions"]):
        yield f"{name}-{index}.{subdomain}", spec["template"]["spec"], {"JOB_COMPLETION_INDEX": index}


def pods_of(document):
    name, spec = document["metadata"]["name"], document["spec"]
    if document["kind"] == "Job":
        yield from indexed_pods(name, spec["template"]["spec"]["subdomain"], spec)
    elif document["kind"] == "JobSet":
        (job,) = spec["replicatedJobs"]
        yield from indexed_pods(f"{name}-{job['name']}-0", name, job["template"]["spec"])
    elif document["kind"] == "PyTorchJob":
        replicas = spec["pytorchReplicaSpecs"]
        kinds = [(kind, index) for kind in ("Master", "Worker") for index in range(replicas[kind]["replicas"])]
        for rank, (kind, index) in enumerate(kinds):
            pod = replicas[kind]["template"]["spec"]
            (port,) = [port for port in pod["containers"][0]["ports"] if port["name"] == "pytorchjob-port"]
            set_by_operator = {
                "RANK": rank,
                "WORLD_SIZE": len(kinds),
                "MASTER_ADDR": f"{name}-master-0",
                "MASTER_PORT": port["containerPort"],
            }
            yield f"{name}-{kind.lower()}-{index}", pod, set_by_operator


def print_pods(document):
    for host, pod, variables in pods_of(document):
        (container,) = pod["containers"]
        variables |= {variable["name"]: variable["value"] for variable in container.get("env", [])}
        words = [f"{name}={value}" for name, value in variables.items()] + container["command"]
        print(host, shlex.join(["env", *words]))


action, file = sys.argv[1:]
with open(file) as text:
    documents = list(yaml.safe_load_all(text))
for document in documents:
    if action == "pods":
        print_pods(document)
    else:
        CHECKS[document["kind"]](document)
