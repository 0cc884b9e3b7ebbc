"""The parts of the exercise that decide: what is a value, what a legend, what a container is told."""

from __future__ import annotations

import json
import math
import os
import signal
import sys

import pytest

from deploy.exercise import prometheus
from deploy.exercise.__main__ import CAUSED
from deploy.exercise.containers import Container, ExerciseError, size_mb
from deploy.exercise.deployment import expect
from deploy.exercise.image import Image
from deploy.exercise.picture import html_page, legend_of, shown
from deploy.exercise.prometheus import Line
from deploy.grafana.panels import ROWS

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a container's user")

PANELS = [panel for row in ROWS for panel in row.panels]


def test_every_panel_is_drawn_with_its_lines():
    line = Line({"route": "/embed<script>"}, ((0.0, 1.0), (10.0, 3.0)))
    page = html_page({(panel.title, legend): [line] for panel in PANELS for legend in panel.queries})
    drawn = sum(len(panel.queries) for panel in PANELS if panel.kind == "timeseries")
    assert page.count("<polyline") == drawn
    assert page.count("class=number") == sum(panel.kind == "stat" for panel in PANELS)
    assert "<script>" not in page


def test_a_panel_without_data_says_so():
    page = html_page({(panel.title, legend): [] for panel in PANELS for legend in panel.queries})
    assert "no data" in page
    assert "<polyline" not in page


def test_what_the_exercise_must_see_are_panels():
    assert set(CAUSED) <= {panel.title for panel in PANELS}


def test_legends_take_their_labels():
    assert legend_of("{{a}}, {{b}}", {"a": "1", "b": "2", "c": "3"}) == "1, 2"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (0.25, "percentunit", "25 %"),
        (3 * 2**20, "bytes", "3 MiB"),
        (12_345.0, "short", "12.3 k"),
        (2.0, "reqps", "2 req/s"),
        (math.nan, "s", "no data"),
    ],
)
def test_values_are_shown_in_their_unit(value, unit, text):
    assert shown(value, unit) == text


def test_series_without_a_finite_value_are_no_data(monkeypatch):
    result = [
        {"metric": {"a": "1"}, "values": [[0, "NaN"], [1, "2.5"], [2, "+Inf"]]},
        {"metric": {"a": "2"}, "values": [[0, "NaN"]]},
    ]
    asked = {}

    def get(self, path, parameters):
        asked.update(parameters)
        return {"result": result}

    monkeypatch.setattr(prometheus.Prometheus, "_get", get)
    lines = prometheus.Prometheus("http://127.0.0.1:1").series("rate(x[$__rate_interval])", 0, 2)
    assert lines == [Line({"a": "1"}, ((1.0, 2.5),))]
    assert asked["query"] == f"rate(x[{prometheus.RATE_WINDOW}])"


def test_a_broken_promise_stops_the_exercise(capsys):
    expect(True, "holds")
    assert capsys.readouterr().out == "ok: holds\n"
    with pytest.raises(ExerciseError, match="breaks"):
        expect(False, "breaks")


@needs_root
def test_a_container_is_its_command_with_its_own_environment_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THIS_MACHINE", "1")
    script = "import json, os; print(json.dumps(dict(os.environ)), flush=True); os.kill(os.getpid(), 15)"
    health = (sys.executable, "-c", "import os; raise SystemExit(int(os.environ['HEALTH']))")
    image = Image(
        tmp_path, {"FROM_IMAGE": "a"}, tmp_path, os.getuid(), (sys.executable, "-c", script), health
    )
    container = Container("c", image, {"HEALTH": "0"}, tmp_path / "log")
    assert container.exit_code(30) == -signal.SIGTERM
    environment = json.loads(container.last_words())
    assert environment.items() >= {"FROM_IMAGE": "a", "HEALTH": "0"}.items()
    assert "SECRET_OF_THIS_MACHINE" not in environment
    assert container.healthy()
    sick = Container("d", image, {"HEALTH": "1"}, tmp_path / "log")
    assert not sick.healthy()
    sick.kill()


@needs_root
def test_a_container_that_ends_before_it_is_healthy_is_reported_with_its_last_words(tmp_path):
    command = (sys.executable, "-c", "raise SystemExit('no model')")
    image = Image(tmp_path, {}, tmp_path, os.getuid(), command, (sys.executable, "-c", "raise SystemExit(1)"))
    container = Container("c", image, {}, tmp_path / "log")
    with pytest.raises(ExerciseError, match="no model"):
        container.until_healthy(30)


def test_sizes_count_files_once(tmp_path):
    (tmp_path / "a").write_bytes(bytes(500_000))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert size_mb(tmp_path) == 0.5
