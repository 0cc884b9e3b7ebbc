"""The documents: the site builds without a warning, links lead somewhere, what is generated is current."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import configuration
from ivy_gateway.config import GatewayConfig
from tests.conftest import ROOT
from tulip_server.config import ServerConfig

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ENGINE = ROOT / "benchmarks" / "results" / "engine.json"
CAPACITY = (DOCS / "capacity.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\(([^)]+)\)")


def test_the_site_builds_strictly(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        DOCS / "site" / "mkdocs.yml",
    ]
    outcome = subprocess.run([*command, "--site-dir", tmp_path / "site"], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    built = {page.name for page in (tmp_path / "site").glob("*.html")}
    assert built >= {page.with_suffix(".html").name for page in PAGES}
    assert not list((tmp_path / "site").rglob("*.py"))


def test_the_site_loads_nothing_from_elsewhere(tmp_path):
    text = (DOCS / "site" / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert "http" not in text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_configuration_reference_is_current():
    assert configuration.PAGE.read_text() == configuration.page(), "run python -m docs.configuration"


def test_the_configuration_reference_has_every_setting():
    listed = set(re.findall(r"`((?:IVY|TULIP)_\w+)`", configuration.page()))
    assert len({key for key in listed if key.startswith("IVY_")}) == len(GatewayConfig.__slots__)
    assert {key for key in listed if key.startswith("TULIP_")} == {
        f"TULIP_{name.upper()}" for name in ServerConfig.__slots__
    }


def test_settings_that_documents_name_exist():
    """A page that tells of a flag or variable nobody reads is worse than none."""
    known = set(re.findall(r"`((?:IVY|TULIP)_\w+)`|`(--[\w-]+)`", configuration.page()))
    settings = {word for pair in known for word in pair if word}
    for page in PAGES:
        named = set(re.findall(r"\b(?:IVY|TULIP)_[A-Z_]+\b", page.read_text()))
        assert named <= settings, page.name


def test_figures_of_the_capacity_page_are_those_of_the_benchmark():
    steps = {step["shape"]: step for step in json.loads(ENGINE.read_text())["steps"]}
    rows = re.findall(r"^\| (\d+ x \d+) \| ([\d,]+) \| ([\d.]+) ms \| ([\d,]+) \|$", CAPACITY, re.MULTILINE)
    assert len(rows) >= 5
    for shape, tokens, milliseconds, rate in rows:
        measured = steps[shape]
        assert int(tokens.replace(",", "")) == measured["tokens"]
        assert float(milliseconds) == pytest.approx(measured["p50"], rel=0.01)
        assert int(rate.replace(",", "")) == pytest.approx(measured["tokens_per_second"], rel=0.01)
