"""Servers that answer, but wrongly: what comes out is tried elsewhere or refused, never passed on."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.load import Verdict
from tests.chaos.checks import asked, assert_none_failed, under_load, wait_for

FAULTS = ["shape.1", "width.1", "nan.1", "forward.1"]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_server_answers_wrongly(pair, questions, fault):
    """Again and again while many ask: each time the other server answers instead."""

    def event():
        for _ in range(5):
            pair.tulips[0].inject(fault)
            wait_until_taken(pair)

    assert_none_failed(under_load(pair, questions, event, before=0.1, after=0.2))


@pytest.mark.parametrize("fault", FAULTS)
def test_both_servers_answer_wrongly(pair, questions, fault):
    """One request is told, in its own words; the next ones are right."""
    for tulip in pair.tulips:
        tulip.inject(fault)
    spoilt, *others = asked(pair, itertools.islice(questions, 6)).outcomes
    assert spoilt.verdict is Verdict.FAILED
    assert spoilt.status == 424, spoilt.detail
    assert [other.verdict for other in others] == [Verdict.RIGHT] * 5


def wait_until_taken(stack):
    wait_for(lambda: not any(list(tulip.faults.iterdir()) for tulip in stack.tulips), 10)
