"""What happens to the connection between a gateway and a server: cut, swallowed, slow."""

from __future__ import annotations

import pytest

from benchmarks.processes import cluster
from tests.chaos.checks import assert_none_failed, under_load, wait_for
from tests.chaos.proxy import proxies
from tests.chaos.test_lost_replicas import PATIENCE, STOPPED_SECONDS


@pytest.fixture(scope="module")
def linked(minilm, tmp_path_factory):
    """A gateway that reaches its two servers through proxies, and the proxies."""
    block = []

    def through_proxies(tulips):
        block.append(proxies([tulip.port for tulip in tulips]))
        block.append(block[0].__enter__())
        return [proxy.address for proxy in block[1]]

    folder = tmp_path_factory.mktemp("linked")
    try:
        with cluster(minilm, folder, addresses=through_proxies) as stack:
            yield stack, block[1]
    finally:
        block[0].__exit__(None, None, None)


def test_a_stream_is_cut_again_and_again(linked, questions):
    stack, (link, _) = linked
    sent = stack.metric("ivy_chunks_total")

    def event():
        for _ in range(5):
            link.cut()
            wait_for(lambda: link.num_connections, 20)
            stack.wait_for_replicas(2)

    tally = under_load(stack, questions, event, callers=16)
    assert_none_failed(tally)
    retried = stack.metric("ivy_chunk_retries_total")
    assert stack.metric("ivy_chunks_total") - sent <= tally.sent + retried, (
        "something was computed for nobody"
    )


def test_both_streams_are_cut_at_once(linked, questions):
    """There is nowhere else to try: what was in flight may be told to come back, nothing else may happen."""
    stack, links = linked

    def event():
        for link in links:
            link.cut()
        stack.wait_for_replicas(2, 20)

    tally = under_load(stack, questions, event)
    counts = tally.summary()
    assert counts["wrong"] == counts["failed"] == counts["surplus"] == 0, tally.complaints()
    assert counts["right"] >= 20


def test_a_black_hole_is_taken_out(linked, questions):
    stack, (link, _) = linked

    def event():
        link.black_hole = True
        stack.wait_for_replicas(1, STOPPED_SECONDS + PATIENCE)
        link.black_hole = False
        stack.wait_for_replicas(2, 20)

    assert_none_failed(under_load(stack, questions, event))


def test_a_slow_link_stays_and_gets_less(linked, questions):
    stack, (link, _) = linked
    link.delay = 0.3
    try:
        assert_none_failed(under_load(stack, questions, lambda: None, before=2.0))
        assert stack.num_ready() == 2
    finally:
        link.delay = 0.0
