"""examples/kuberay.yaml: fields that KubeRay's v1 knows, and memory that adds up."""

from __future__ import annotations

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from stoker.basics.resources import parse_bytes

MANIFEST = Path(__file__).parents[2] / "examples" / "kuberay.yaml"
JOB = {
    "activeDeadlineSeconds", "backoffLimit", "entrypoint", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip
CLUSTER = {"headGroupSpec", "rayVersion", "workerGroupSpecs"}
HEAD = {"rayStartParams", "serviceType", "template"}
WORKERS = {"groupName", "maxReplicas", "minReplicas", "rayStartParams", "replicas", "template"}


def test_fields_are_known_and_memory_holds_the_cache() -> None:
    job = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for found, known in ((job["spec"], JOB), (cluster, CLUSTER), (head, HEAD), (workers, WORKERS)):
        assert set(found) <= known
    assert all(
        isinstance(value, str) for g in (head, workers) for value in g["rayStartParams"].values()
    )

    pod = workers["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
    shared = parse_bytes(volume["emptyDir"]["sizeLimit"] + "B")
    rays = int(workers["rayStartParams"]["object-store-memory"])
    assert parse_bytes("64GiB") + rays < shared
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert shared < parse_bytes(container["resources"]["limits"]["memory"] + "B")

    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = workers["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
