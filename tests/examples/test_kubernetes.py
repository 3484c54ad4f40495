# SPDX-License-Identifier: Apache-2.0
"""The manifests in examples/kubernetes have the fields that Kubernetes knows, and start what this repository has."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.cli.main import make_parser
from megatron_ext.sync_service.server.config import ServerConfig, read_config
from tests.support.distributed import REPOSITORY

FOLDER = REPOSITORY / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))

# What we rely on of each kind: a type, the allowed values (a tuple), a mapping of keys (those with ? may be left out),
# or a list of one of these. Other keys are errors, so that a misspelled one is found.
METADATA = {"name": str, "labels?": dict, "annotations?": dict}
PORT = {"name": str, "containerPort": int}
PROBE = {
    "tcpSocket?": {"port": str},
    "httpGet?": {"path": str, "port": str},
    "periodSeconds?": int,
    "failureThreshold?": int,
}
CONTAINER = {
    "name": str,
    "image": str,
    "workingDir?": str,
    "command": [str],
    "args": [str],
    "env?": [{"name": str, "value?": str, "valueFrom?": {"fieldRef": {"fieldPath": str}}}],
    "ports?": [PORT],
    "resources?": {"limits?": dict, "requests?": dict},
    "readinessProbe?": PROBE,
    "livenessProbe?": PROBE,
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly?": bool}],
}
VOLUME = {
    "name": str,
    "persistentVolumeClaim?": {"claimName": str},
    "emptyDir?": {"medium?": ("Memory",)},
    "configMap?": {"name": str},
    "secret?": {"secretName": str},
}
POD = {
    "metadata?": {"labels": dict, "annotations?": dict},
    "spec": {"restartPolicy?": ("Never", "OnFailure", "Always"), "containers": [CONTAINER], "volumes?": [VOLUME]},
}
JOB = {
    "spec": {
        "completionMode?": ("Indexed", "NonIndexed"),
        "completions": int,
        "parallelism": int,
        "backoffLimit?": int,
        "template": POD,
    }
}
REPLICAS = {"replicas": int, "restartPolicy": ("OnFailure", "Never", "Always", "ExitCode"), "template": POD}
CLAIM = {
    "metadata": METADATA,
    "spec": {"accessModes": [("ReadWriteOnce", "ReadWriteMany")], "resources": {"requests": {"storage": str}}},
}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "spec": {
            "failurePolicy?": {"maxRestarts": int},
            "replicatedJobs": [{"name": str, "replicas": int, "template": JOB}],
        }
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec": {"runPolicy?": {"backoffLimit": int}, "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS}}
    },
    ("apps/v1", "StatefulSet"): {
        "spec": {
            "serviceName": str,
            "replicas": int,
            "selector": {"matchLabels": dict},
            "template": POD,
            "volumeClaimTemplates": [CLAIM],
        }
    },
    ("v1", "Service"): {"spec": {"selector": dict, "ports": [{"name": str, "port": int, "targetPort": str}]}},
    ("v1", "ConfigMap"): {"data": dict},
}


def problems(value: Any, wanted: Any, where: str) -> list[str]:
    """Return where a value differs from what is wanted."""
    if isinstance(wanted, type):
        fits = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        return [] if fits else [f"{where}: {value!r} is not of type {wanted.__name__}"]
    if isinstance(wanted, tuple):
        return [] if value in wanted else [f"{where}: {value!r} is none of {wanted}"]
    if isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: {value!r} is not a list with entries"]
        return [found for index, one in enumerate(value) for found in problems(one, wanted[0], f"{where}[{index}]")]
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is not a mapping"]
    known = {name.removesuffix("?"): (kind, name.endswith("?")) for name, kind in wanted.items()}
    found = [f"{where}.{name}: unknown" for name in value if name not in known]
    found += [f"{where}.{name}: missing" for name, (_, may_lack) in known.items() if name not in value and not may_lack]
    for name in set(value) & set(known):
        found += problems(value[name], known[name][0], f"{where}.{name}")
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def pods(value: Any) -> list[dict[str, Any]]:
    """Return the specs of all pods in a document."""
    if isinstance(value, list):
        return [pod for one in value for pod in pods(one)]
    if not isinstance(value, dict):
        return []
    here = [value] if "containers" in value else []
    return here + [pod for one in value.values() for pod in pods(one)]


def variables(container: dict[str, Any]) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container.get("env", [])}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_manifest_has_the_fields_of_its_kinds(path: Path):
    for document in documents(path):
        kind = (document.get("apiVersion"), document.get("kind"))
        assert kind in SPECS
        wanted = {"apiVersion": str, "kind": str, "metadata": METADATA, **SPECS[kind]}
        assert problems(document, wanted, str(document["kind"])) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_pod_mounts_is_there_and_what_it_starts_is_ours(path: Path):
    for document in documents(path):
        claims = [claim["metadata"]["name"] for claim in document.get("spec", {}).get("volumeClaimTemplates", [])]
        for pod in pods(document):
            (container,) = pod["containers"]
            mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounted) == {volume["name"] for volume in pod["volumes"]} | set(claims)
            given = variables(container)
            for value in given.values():
                if value is not None and value.startswith("/"):
                    assert any(value == place or value.startswith(f"{place}/") for place in mounted.values()), value
            started = " ".join(container["args"])
            if container["command"] == ["megatron-ext"]:
                make_parser().parse_args(container["args"])
                continue
            (script,) = re.findall(r"\bexec (examples/\S+\.sh)", started)
            text = (REPOSITORY / script).read_text(encoding="utf-8")
            launch = (REPOSITORY / "examples/local_sgd/lib/launch.sh").read_text(encoding="utf-8")
            names = set(given) - set(re.findall(r"\$(\w+)", started)) | set(re.findall(r"(\w+)=\$", started))
            for name in names:
                assert re.search(rf"^#? *[^#]*\b{name}\b", text + launch, re.MULTILINE), f"{script}: {name}"


def test_workers_are_as_many_as_nodes_and_find_the_first_one():
    (job_set,) = documents(FOLDER / "local_sgd_jobset.yaml")
    (workers,) = job_set["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    given = variables(container)
    assert given["NUM_NODES"] == str(job["completions"]) == str(job["parallelism"])
    name = job_set["metadata"]["name"]
    # JobSet: <set>-<job>-<number of the job>-<number of the pod>.<set>
    assert given["MASTER_ADDR"] == f"{name}-{workers['name']}-0-0.{name}"
    assert given["MASTER_PORT"] == str(container["ports"][0]["containerPort"])
    assert given["GPUS_PER_NODE"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    (torch_job,) = documents(FOLDER / "local_sgd_pytorchjob.yaml")
    replicas = torch_job["spec"]["pytorchReplicaSpecs"]
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert variables(container)["NUM_NODES"] == str(replicas["Master"]["replicas"] + replicas["Worker"]["replicas"])


def test_the_server_reads_its_configuration_and_peers_find_it(tmp_path: Path):
    config_map, service, stateful_set = documents(FOLDER / "spes_server.yaml")
    (tmp_path / "server.yaml").write_text(config_map["data"]["server.yaml"])
    config = ServerConfig(**read_config(tmp_path / "server.yaml"))
    config.check()
    pod = stateful_set["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == stateful_set["spec"]["selector"]["matchLabels"]
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    assert config.bind.endswith(f":{ports['grpc']}") and config.status_port == ports["status"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(config.status_port)
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.dir == mounted["state"] and str(config.tls_key).startswith(mounted["secret"])

    (job_set,) = documents(FOLDER / "spes_peers.yaml")
    (peers,) = job_set["spec"]["replicatedJobs"]
    (run,) = config.runs.values()
    assert peers["replicas"] == run.peers
    (container,) = pods(peers)[0]["containers"]
    assert variables(container)["SERVER_ADDR"] == f"{service['metadata']['name']}:{ports['grpc']}"
    share = yaml.safe_load((REPOSITORY / "configs" / "spes_peer.yaml").read_text())["spes_config"]
    assert (share["num_peers"], share["sync_steps"]) == (run.peers, run.sync_steps)


def test_a_misspelled_field_is_found():
    (job_set,) = documents(FOLDER / "spes_peers.yaml")
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["backOffLimit"] = spec.pop("backoffLimit")
    spec["completions"] = "1"
    wanted = {"apiVersion": str, "kind": str, "metadata": METADATA, **SPECS["jobset.x-k8s.io/v1alpha2", "JobSet"]}
    assert sorted(problems(job_set, wanted, "JobSet")) == [
        "JobSet.spec.replicatedJobs[0].template.spec.backOffLimit: unknown",
        "JobSet.spec.replicatedJobs[0].template.spec.completions: '1' is not of type int",
    ]
