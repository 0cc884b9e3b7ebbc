"""The Kubernetes example: published schemas, references that resolve, times that fit the servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from ivy_gateway.config import _SETTINGS, GatewayConfig
from tests.conftest import ROOT
from tests.deploy.exported import exported
from tulip_server.config import ServerConfig
from tulip_server.health import INFERENCE_SERVICE

kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
APPLIED = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((FOLDER / name).read_text())
]
VERSIONS = ("1.30", "1.34")


def named(kind: str, name: str) -> dict:
    (found,) = [d for d in APPLIED if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(tier: str) -> dict:
    return named("Deployment", tier)["spec"]["template"]["spec"]


def container_of(tier: str) -> dict:
    (container,) = pod_of(tier)["containers"]
    return container


def environment_of(tier: str) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container_of(tier)["env"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", APPLIED, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_a_manifest_follows_the_published_schema(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelled_field_would_be_found():
    wrong = json.loads(json.dumps(named("Deployment", "tulip")).replace("readinessProbe", "readynessProbe"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_kustomize_builds_the_whole():
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    built = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    assert len(documents) == len(APPLIED)
    assert {d["metadata"].get("namespace", "bouquet") for d in documents} == {"bouquet"}


@pytest.mark.parametrize("tier", ["gateway", "tulip"])
def test_labels_ports_and_volumes_refer_to_each_other(tier):
    deployment, pod, container = named("Deployment", tier), pod_of(tier), container_of(tier)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container["ports"]}
    service, budget = named("Service", tier), named("PodDisruptionBudget", tier)
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert all(named("PersistentVolumeClaim", claim) for claim in claims)


@pytest.mark.parametrize("tier", ["gateway", "tulip"])
def test_containers_are_confined(tier):
    pod, container = pod_of(tier), container_of(tier)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert (
        f"USER {pod['securityContext']['runAsUser']}:" in (ROOT / "deploy" / tier / "Dockerfile").read_text()
    )
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_every_variable_is_a_setting_that_exists():
    assert environment_of("gateway").keys() <= {setting.key for setting in _SETTINGS.values()}
    assert environment_of("tulip").keys() <= {f"TULIP_{field.upper()}" for field in ServerConfig.__slots__}


def test_gateways_find_the_servers_by_the_headless_services_name():
    service = named("Service", "tulip")
    assert service["spec"]["clusterIP"] == "None"
    (port,) = [port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc"]
    assert environment_of("gateway")["IVY_REPLICAS"] == f"dns:{service['metadata']['name']}:{port}"


def test_a_server_is_ready_while_it_makes_progress():
    container = container_of("tulip")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["service"] == INFERENCE_SERVICE
    startup = container["startupProbe"]
    assert (
        startup["periodSeconds"] * startup["failureThreshold"] >= 300
    )  # a first start measures and compiles


def test_a_gateway_without_servers_is_unready_but_not_started_again():
    container = container_of("gateway")
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["startupProbe"]["httpGet"]["path"] == "/live"


@pytest.mark.parametrize("tier", ["gateway", "tulip"])
def test_pods_get_longer_to_stop_than_they_take_to_finish(tier, tmp_path):
    gateway = GatewayConfig(model=tmp_path, replicas=("dns:tulip:50051",))
    finish = float(environment_of(tier).get("TULIP_DRAIN_SECONDS") or gateway.grace_seconds)
    _, pause = container_of(tier)["lifecycle"]["preStop"]["exec"]["command"]
    assert pod_of(tier)["terminationGracePeriodSeconds"] >= float(pause) + finish + 5


def test_servers_scale_on_a_metric_that_they_export():
    scaler = named("HorizontalPodAutoscaler", "tulip")
    (metric,) = [entry["pods"]["metric"]["name"] for entry in scaler["spec"]["metrics"]]
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]
    assert metric in exported()
    assert rule["name"]["as"] == metric
    assert rule["seriesQuery"].startswith(metric)


def test_scrapes_go_to_ports_that_services_have():
    for monitor in yaml.safe_load_all((FOLDER / "monitoring.yaml").read_text()):
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [
            d for d in APPLIED if d["kind"] == "Service" and labels.items() <= d["metadata"]["labels"].items()
        ]
        assert len(services) == 1
        names = {port["name"] for port in services[0]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names


def test_the_adapters_rule_adds_up_the_lanes():
    """The metric has a series for each lane; the autoscaler must see one number a pod."""
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]
    assert re.match(r"sum by \(<<\.GroupBy>>\)", rule["metricsQuery"])
