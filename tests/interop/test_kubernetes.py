"""examples/kubernetes/: each pod's environment, as Kubernetes makes it from the manifests, is that of its rank."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import yaml
from user_programs import PREFIX, ROOT

MANIFESTS = ROOT / "examples" / "kubernetes"
LABELS = {"jobset.sigs.k8s.io/restart-attempt": "3"}


def jobs_and_service(manifest: str) -> tuple[dict[str, Any], str, str]:
    """The specification of the Job, its name and that of the service."""
    documents = list(yaml.safe_load_all((MANIFESTS / manifest).read_text()))
    by_kind = {document["kind"]: document for document in documents}
    if "JobSet" in by_kind:  # the controller names its jobs SET-REPLICATED-REPLICA and its service like itself
        jobs = by_kind["JobSet"]
        (replicated,) = jobs["spec"]["replicatedJobs"]
        assert replicated["replicas"] == 1, "JOB_COMPLETION_INDEX counts within a job"
        name = jobs["metadata"]["name"]
        return replicated["template"]["spec"], f"{name}-{replicated['name']}-0", name
    job, service = by_kind["Job"], by_kind["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return job["spec"], job["metadata"]["name"], service["metadata"]["name"]


def environment_of(variable: dict[str, Any], index: int) -> str:
    """What Kubernetes puts into a variable of a container."""
    if "value" in variable:
        assert isinstance(variable["value"], str), "Kubernetes takes only strings"
        return str(variable["value"])
    source = variable["valueFrom"]
    if "secretKeyRef" in source:
        return "5a" * 32
    path = source["fieldRef"]["fieldPath"]
    known = {"status.podIP": f"10.0.0.{index + 1}", **{f"metadata.labels['{key}']": LABELS[key] for key in LABELS}}
    return known[path]


@pytest.mark.parametrize(("manifest", "epoch"), [("job.yaml", 0), ("jobset.yaml", 3)])
def test_a_pod_is_the_rank_of_its_index(manifest: str, epoch: int) -> None:
    job, name, service = jobs_and_service(manifest)
    ranks = job["completions"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == ranks, "all ranks run at a time"
    (container,) = job["template"]["spec"]["containers"]
    found = []
    for index in (0, ranks - 1):
        variables = {one["name"]: environment_of(one, index) for one in container["env"]}
        done = subprocess.run(
            [PREFIX / "bin" / "tessera", "env", "--json"],
            env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index), **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert [(facts["launcher"], facts["rank"], facts["world_size"]) for facts in found] == [
        ("Kubernetes", 0, ranks),
        ("Kubernetes", ranks - 1, ranks),
    ]
    for facts in found:
        assert facts["store"].startswith(f"served by rank 0, at tcp://{name}-0.{service}:29501 or"), facts
        assert facts["epoch"] == epoch
        assert facts["token"] == "TESSERA_TOKEN"
        assert "unknown" in facts["local_world_size"]
    assert found[0]["job_id"] == found[1]["job_id"] != ""


def test_the_manifests_differ_in_nothing_that_a_rank_reads() -> None:
    """But in where rank 0 is, and in the epoch, which a Job does not count."""
    containers = []
    for manifest in ("job.yaml", "jobset.yaml"):
        (container,) = jobs_and_service(manifest)[0]["template"]["spec"]["containers"]
        own = ("MASTER_ADDR", "TESSERA_EPOCH")
        container["env"] = [one for one in container["env"] if one["name"] not in own]
        containers.append(container)
    assert containers[0] == containers[1]
