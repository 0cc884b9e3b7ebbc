"""What the page on reliability names is there: every metric is exported, every flag is one."""

from __future__ import annotations

import re
import urllib.request

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")


def test_every_metric_that_is_named_is_exported(pair):
    (tulip, *_) = pair.tulips
    port = tulip.wait_until_ready()["metrics_port"]
    with urllib.request.urlopen(f"http://{tulip.host}:{port}/metrics", timeout=10) as reply:
        exported = reply.read().decode() + pair.get("/metrics")[1]
    named = set(re.findall(r"`((?:ivy|tulip)_[a-z_]+)", PAGE))
    assert len(named) > 15
    assert {name for name in named if f"# TYPE {name} " not in exported} == set()


def test_every_flag_that_is_named_is_one():
    configuration = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE))
    assert len(named) > 15
    assert {flag for flag in named if f"`{flag}`" not in configuration} == set()
