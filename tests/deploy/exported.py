"""What both tiers export, read from their code, and what a query asks for, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from ivy_gateway import metrics as gateway_metrics
from rose_engine.step_counters import StepCounters
from tulip_server import metrics as server_metrics

SCRAPED_LABELS = frozenset({"job", "instance"})  # added by Prometheus
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_OUR_NAMES = re.compile(r"\b(?:ivy|tulip|te)_[a-z_]+\b")
_SELECTOR = re.compile(r"\b((?:ivy|tulip|te)_[a-z_]+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def exported() -> dict[str, frozenset[str]]:
    """Every sample name that Prometheus sees, with the labels its series carry."""
    names: dict[str, frozenset[str]] = {}
    for registry in (gateway_metrics._REGISTRY, server_metrics.REGISTRY):
        for metric in _wrappers(registry):
            for suffix in _SUFFIXES[metric._type]:
                bucket = {"le"} if suffix == "_bucket" else set()
                names[metric._name + suffix] = frozenset(metric._labelnames) | bucket
    return names | dict(_read_when_asked())


def engine_outcomes() -> frozenset[str]:
    """The values of `outcome` of `tulip_engine_steps_total`."""
    return frozenset(field.name for field in fields(StepCounters)) - {"num_bytes"}


def names_in(query: str) -> set[str]:
    """Our metrics that a query reads."""
    return set(_OUR_NAMES.findall(query))


def matchers_in(query: str) -> Iterator[tuple[str, str, str]]:
    """`(metric, label, value or pattern)` of every matcher in a query."""
    for metric, inside in _SELECTOR.findall(query):
        for label, value in _MATCHER.findall(inside):
            yield metric, label, value


def groupings_in(query: str) -> set[str]:
    """The labels that a query groups or joins by."""
    return {label.strip() for inside in _GROUPING.findall(query) for label in inside.split(",")}


def _wrappers(registry: CollectorRegistry) -> Iterator[MetricWrapperBase]:
    return (metric for metric in registry._collector_to_names if isinstance(metric, MetricWrapperBase))


def _read_when_asked() -> Iterator[tuple[str, frozenset[str]]]:
    """What the server's own collectors give, from a state with something in every lane."""
    lanes = {"interactive": 0, "bulk": 0}
    state = server_metrics.ServerState(lanes, lanes, 0, 0.0, False, False, 0)
    with server_metrics.observed(lambda: state, StepCounters):
        for family in server_metrics.REGISTRY.collect():
            for sample in family.samples:
                yield sample.name, frozenset(sample.labels)
