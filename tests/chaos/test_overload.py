"""More than the servers can do: what is refused, what is not, who goes first, and what is left behind."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from benchmarks import load
from benchmarks.http_client import NoAnswer
from benchmarks.known_answers import random_ids
from benchmarks.load import Tally, Verdict
from benchmarks.processes import cluster, num_descriptors, resident_bytes
from tests.chaos.checks import asked, assert_none_failed, together, under_load, wait_for

MIB = 1024 * 1024


@pytest.fixture
def singles(answers, numpy_random):
    """Requests of one input of 100 tokens."""
    return itertools.cycle([answers.embed_ids(random_ids(numpy_random, 1, 100)) for _ in range(50)])


def test_three_times_what_the_servers_can_do(start, singles, whole):
    """Some are told when to come back, all others are right, the counters agree, and nothing piles up."""
    seconds = 30.0 if whole else 4.0
    with start("--max-queue-seconds", "0.3", tokens_per_second=5000) as stack:
        assert_none_failed(under_load(stack, singles, lambda: None), 5)
        tally = Tally()

        async def work():
            async with load.connected(stack.base, tally) as client:
                await load.poisson(client, singles, 300.0, seconds, tally)

        before = {status: counted(stack, status) for status in (200, 429)}
        memory = resident_bytes(stack.gateway.pid)
        load.run(work)
        counts = tally.summary()
        assert counts["right"] + counts["refused"] == counts["sent"], tally.complaints()
        assert set(tally.statuses) == {200, 429}
        assert counts["surplus"] == 0
        assert counts["right"] > 10 * seconds, "next to nothing was let in"
        assert all(1 <= int(outcome.retry_after) <= 60 for outcome in tally.of(Verdict.REFUSED))
        assert {status: counted(stack, status) - before[status] for status in before} == tally.statuses
        assert_nothing_is_left(stack)
        assert resident_bytes(stack.gateway.pid) < memory + 30 * MIB


def test_a_request_of_2000_inputs_and_single_ones(pair, answers, numpy_random, singles):
    """Single requests that come after it are answered before it, and it is not forgotten over them."""
    bulk = answers.embed_ids(random_ids(numpy_random, 2000, 60))
    tally, alone = Tally(), Tally()

    async def work():
        async with load.connected(pair.base, alone) as client:
            large = asyncio.create_task(load.ask(client, bulk, alone))
            await asyncio.sleep(0.3)
            async with load.callers(pair.base, singles, 4, tally):
                await large

    load.run(work)
    assert_none_failed(alone, 1)
    assert_none_failed(tally)
    ended = alone.outcomes[0].sent + alone.outcomes[0].seconds
    assert sum(outcome.sent + outcome.seconds < ended for outcome in tally.outcomes) >= 8


@pytest.fixture(scope="module")
def narrow(minilm, tmp_path_factory):
    """A server behind a Unix socket that takes 20 tokens at a time, 50 ms; no bound on what waits."""
    flags = ("--request-timeout", "4", "--max-queue-seconds", "0", "--max-bulk-queue-seconds", "0")
    folder = tmp_path_factory.mktemp("narrow")
    socket = folder / "tulip.socket"
    settings = {
        "replicas": 1,
        "tokens_per_second": 400,
        "server_flags": ("--max-batch-sequences", "1", "--socket", str(socket)),
        "addresses": lambda tulips: [f"unix:{socket}"],
    }
    with cluster(minilm, folder, *flags, **settings) as stack:
        yield stack


def test_first_come_first_served_inside_a_lane(narrow, answers, numpy_random):
    """Nobody is answered a step before somebody who came earlier."""
    questions = [answers.embed_ids(random_ids(numpy_random, 1, 20)) for _ in range(30)]
    tally = Tally()

    async def work():
        async with load.connected(narrow.base, tally) as client, asyncio.TaskGroup() as tasks:
            for question in questions:
                tasks.create_task(load.ask(client, question, tally))
                await asyncio.sleep(0.01)

    load.run(work)
    assert_none_failed(tally, 30)
    answered = [o.sent + o.seconds for o in sorted(tally.outcomes, key=lambda outcome: outcome.sent)]
    # Answers that came while this process slept are read at once, in any order.
    assert all(later > earlier - 0.04 for earlier, later in itertools.pairwise(answered))
    assert answered[-1] - answered[0] > 20 * 0.05


def test_what_nobody_waits_for_costs_nothing(narrow, answers, numpy_random):
    """Requests past their deadline are told so, and their sequences never reach the engine."""
    (tulip,) = narrow.tulips
    before = tulip.metric("tulip_batch_tokens_sum")
    question = answers.embed_ids(random_ids(numpy_random, 5, 20))
    tally = together(narrow, [question] * 60)  # 15 s of work
    counts = tally.summary()
    assert counts["right"] + counts["refused"] == counts["sent"] == 60, tally.complaints()
    assert tally.statuses[503] > 20, tally.statuses
    assert_nothing_is_left(narrow)
    computed = tulip.metric("tulip_batch_tokens_sum") - before
    assert computed < 3000, "of 6000: sequences were computed that nobody waited for"
    assert tulip.metric("tulip_skipped_sequences_total") > 0
    assert_none_failed(asked(narrow, [question]), 1)


def test_clients_that_leave(pair, answers, numpy_random, questions, whole):
    """They hang up in the middle: neighbours are served, and no slot and no file stays taken."""
    count = 10_000 if whole else 300
    question = answers.embed_ids(random_ids(numpy_random, 8, 60))
    files = num_descriptors(pair.gateway.pid)

    async def leave(number):
        async with load.connected(pair.base, Tally()) as client:
            try:
                async with asyncio.timeout(0.001 * (number % 30)):
                    await client.ask("POST", question.path, question.body)
            except (TimeoutError, NoAnswer):
                pass

    async def crowd():
        for first in range(0, count, 20):
            await asyncio.gather(*(leave(number) for number in range(first, first + 20)))

    counts = under_load(pair, questions, lambda: load.run(crowd), callers=2).summary()
    assert counts["right"] + counts["refused"] == counts["sent"], "a crowd may be too much, but nobody fails"
    assert counts["right"] >= 5
    assert_nothing_is_left(pair)
    wait_for(lambda: num_descriptors(pair.gateway.pid) <= files + 4, 10)


def counted(stack, status) -> float:
    return stack.metric("ivy_requests_total", route="/embed", status=str(status))


def assert_nothing_is_left(stack):
    """Nobody asks: nothing is in flight anywhere."""
    wait_for(lambda: stack.metric("te_queue_size") == 0, 10)
    wait_for(lambda: stack.metric("ivy_replica_outstanding_tokens") == 0, 10)
    for tulip in stack.tulips:
        wait_for(lambda tulip=tulip: tulip.metric("tulip_waiting_tokens") == 0, 10)
        wait_for(lambda tulip=tulip: tulip.metric("tulip_batches_in_flight") == 0, 10)
