"""The dashboard and the alerts ask for nothing that the code does not export; the JSON is current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from deploy.grafana.dashboard import FILE, dashboard
from deploy.grafana.panels import ROWS
from tests.conftest import ROOT
from tests.deploy.exported import (
    SCRAPED_LABELS,
    engine_outcomes,
    exported,
    groupings_in,
    matchers_in,
    names_in,
)

ALERTS_FILE = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ALERTS = [rule for group in yaml.safe_load(ALERTS_FILE.read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for row in ROWS for panel in row.panels]
QUERIES = [
    *((panel.title, query) for panel in PANELS for query in panel.queries.values()),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]
EXPORTED = exported()


def test_the_committed_dashboard_is_what_the_panels_say():
    assert json.loads(FILE.read_text()) == dashboard(), "run python -m deploy.grafana.dashboard"


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_reads_only_what_is_exported(title, query):
    names = names_in(query)
    assert names or "up{" in query
    assert names <= EXPORTED.keys(), names - EXPORTED.keys()
    carried = SCRAPED_LABELS.union(*(EXPORTED[name] for name in names))
    assert groupings_in(query) <= carried
    for metric, label, _ in matchers_in(query):
        assert label in EXPORTED[metric] | SCRAPED_LABELS, f"{metric} has no label {label}"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_legend_names_labels_that_the_query_keeps(panel):
    for legend, query in panel.queries.items():
        wanted = set(re.findall(r"{{(\w+)}}", legend))
        kept = groupings_in(query) | set().union(
            *(EXPORTED[name] for name in names_in(query)), SCRAPED_LABELS
        )
        assert wanted <= (groupings_in(query) or kept)


def test_outcomes_of_steps_are_those_that_the_engine_counts():
    patterns = [value for _, query in QUERIES for _, label, value in matchers_in(query) if label == "outcome"]
    asked = {word for pattern in patterns for word in pattern.split("|")}
    assert asked
    assert asked <= engine_outcomes()


def test_the_dashboard_covers_what_operators_ask_for():
    shown = set().union(*(names_in(query) for panel in PANELS for query in panel.queries.values()))
    assert shown >= {
        "ivy_phase_seconds_bucket",
        "ivy_queue_tokens",
        "tulip_waiting_tokens",
        "tulip_batch_tokens_bucket",
        "tulip_engine_steps_total",
        "tulip_graph_bytes",
        "ivy_overload_refusals_total",
        "ivy_truncated_inputs_total",
        "ivy_replica_outstanding_tokens",
        "ivy_replica_state",
    }


def test_panels_do_not_overlap_and_stay_on_the_grid():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_says_how_bad_it_is_and_has_a_runbook():
    sections = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    assert [section for section in sections if section in names] == names, "one section an alert, in order"
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_every_alert_is_tried_on_made_up_series():
    """`promtool test rules` runs them (make deploy-check): here, that none is left out."""
    tried = yaml.safe_load((ALERTS_FILE.parent / "alerts_test.yaml").read_text())["tests"]
    names = {rule["alert"] for rule in ALERTS}
    assert {case["alertname"] for case in tried[0]["alert_rule_test"]} == names
    fired = tried[1]["promql_expr_test"][0]["exp_samples"]
    assert {re.search('"(.+)"', sample["labels"])[1] for sample in fired} == names
    series = {re.match(r"\w+", entry["series"])[0] for case in tried for entry in case["input_series"]}
    assert series - {"up"} <= EXPORTED.keys()


def test_provisioning_finds_the_dashboard_where_compose_mounts_it():
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    provider = yaml.safe_load((folder / "dashboards" / "bouquet.yaml").read_text())["providers"][0]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert Path(mounts["./grafana/dashboard.json"]).parent == Path(provider["options"]["path"])
    source = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
