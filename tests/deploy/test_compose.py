"""`compose.yaml` and its override for several GPUs: the published schema, and what the servers rely on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from deploy.compose_gpus import COMPOSE_FILE, override
from ivy_gateway.config import _SETTINGS, GatewayConfig
from tests.conftest import ROOT
from tulip_server.config import ServerConfig

COMPOSE = yaml.safe_load(COMPOSE_FILE.read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "bouquet/" in service["image"]}
VARIABLES = {"BOUQUET_MODELS": "/srv/models", "BOUQUET_MODEL": "my-model"}


def docker_compose(*files: str, profile: str) -> dict[str, dict]:
    """The services of a profile as docker-compose resolves them; a skip where it is not installed."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    options = [word for file in files for word in ("-f", str(file))]
    command = ["docker-compose", *options, "--profile", profile, "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **VARIABLES}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT / "deploy")
    assert outcome.returncode == 0, outcome.stderr
    services = yaml.safe_load(outcome.stdout)["services"]  # its first version lists those of all profiles
    return {name: service for name, service in services.items() if profile in service["profiles"]}


@pytest.fixture
def eight_gpus(tmp_path):
    script = [sys.executable, str(ROOT / "deploy" / "compose_gpus.py"), "8"]
    file = tmp_path / "compose.override.yaml"
    file.write_text(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    return file


def test_both_files_follow_the_published_schema(eight_gpus):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    outcome = subprocess.run([*command, COMPOSE_FILE, eight_gpus], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize(("profile", "servers"), [("gpu", {"tulip-0"}), ("cpu", {"tulip-cpu"})])
def test_each_profile_is_a_whole_stack(profile, servers):
    resolved = docker_compose("compose.yaml", profile=profile)
    ours = {name for name in resolved if name.startswith("tulip")}
    assert ours == servers
    gateways = [name for name in resolved if name.startswith("gateway")]
    assert len(gateways) == 1
    assert set(resolved[gateways[0]]["depends_on"]) == servers
    assert {"prometheus", "grafana"} <= resolved.keys()


def test_eight_gpus_are_eight_servers_that_share_nothing_but_the_model(eight_gpus):
    resolved = docker_compose("compose.yaml", str(eight_gpus), profile="gpu")
    servers = {name: service for name, service in resolved.items() if name.startswith("tulip-")}
    assert sorted(servers) == [f"tulip-{gpu}" for gpu in range(8)]
    assert set(resolved["gateway"]["depends_on"]) == servers.keys()
    for gpu, name in enumerate(sorted(servers)):
        device = servers[name]["deploy"]["resources"]["reservations"]["devices"]
        assert [entry["device_ids"] for entry in device] == [[str(gpu)]]
        assert servers[name]["networks"]["inside"]["aliases"] == ["tulip"]
    caches = [volume for service in servers.values() for volume in service["volumes"] if "/cache" in volume]
    assert len(set(caches)) == 8


def test_the_override_follows_the_first_server():
    assert override(2)["services"]["tulip-1"]["environment"] == OURS["tulip-0"]["environment"]


@pytest.mark.parametrize("number", ["1", "17", "two"])
def test_a_number_of_gpus_that_makes_no_sense_is_refused(number):
    script = [sys.executable, str(ROOT / "deploy" / "compose_gpus.py"), number]
    outcome = subprocess.run(script, capture_output=True, text=True)
    assert (outcome.returncode, outcome.stdout) == (2, "")


@pytest.mark.parametrize("name", OURS)
def test_our_containers_are_confined_and_bounded(name):
    service = OURS[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys()
    models = [volume for volume in service["volumes"] if "/models" in volume]
    assert all(volume.endswith("/models:ro") for volume in models)


def test_servers_reach_no_network_but_their_own():
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    for name, service in OURS.items():
        expected = {"inside", "outside"} if name.startswith("gateway") else {"inside"}
        assert set(service["networks"]) == expected
        assert ("ports" in service) == name.startswith("gateway")


def test_every_variable_is_a_setting_that_exists():
    """An unknown one would stop the server at start."""
    settings = {setting.key for setting in _SETTINGS.values()}
    settings |= {f"TULIP_{field.upper()}" for field in ServerConfig.__slots__}
    for service in OURS.values():
        assert service["environment"].keys() <= settings


def test_containers_get_longer_to_stop_than_they_take_to_finish(tmp_path):
    def seconds(text: str) -> float:
        return float(text.removesuffix("s"))

    gateway = GatewayConfig(model=tmp_path, replicas=("dns:tulip:50051",))
    for name, service in OURS.items():
        environment = service["environment"]
        gateway_needs = gateway.drain_delay_seconds + gateway.grace_seconds
        needed = float(environment.get("TULIP_DRAIN_SECONDS", gateway_needs))
        assert seconds(service["stop_grace_period"]) > needed + 1, name


def test_the_example_environment_sets_every_variable_that_compose_asks_for():
    example = (ROOT / "deploy" / ".env.example").read_text()
    given = set(re.findall(r"^(\w+)=", example, re.MULTILINE))
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE_FILE.read_text()))
    assert {name for name in asked if name.startswith("BOUQUET_")} == given
