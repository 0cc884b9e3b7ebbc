"""The load generator tells right answers from all others: what it counts is what the reports say."""

from __future__ import annotations

import asyncio
import contextlib
import json

import numpy as np
import pytest

from benchmarks import load
from benchmarks.known_answers import KnownAnswers, mistake
from benchmarks.load import Tally, Verdict
from benchmarks.soak import Findings, Footprint

DIMENSIONS = 8


@pytest.fixture(scope="module")
def answers(minilm) -> KnownAnswers:
    return KnownAnswers(minilm, DIMENSIONS)


@contextlib.asynccontextmanager
async def server(status, body, *, headers=(), own_id=True, times=1):
    """Answers every request so, `times` times; 0: it hangs up."""

    ended = asyncio.Event()

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
                await reader.readexactly(int(fields.get("content-length", 0)))
                request_id = fields["x-request-id"] if own_id else "another"
                lines = [f"HTTP/1.1 {status} X", f"x-request-id: {request_id}", *headers]
                lines += [f"content-length: {len(body)}", "", ""]
                writer.write(("\r\n".join(lines).encode() + body) * times)
                if not times:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    serving = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with serving:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
        await ended.wait()


async def asked(question, *reply, **settings) -> Tally:
    tally = Tally()
    async with server(*reply, **settings) as base, load.connected(base, tally) as client:
        await load.ask(client, question, tally)
        await asyncio.sleep(0.05)
    return tally


def rows(answers, sequences, error=0.0) -> bytes:
    return json.dumps((answers.vectors(sequences) + np.float32(error)).tolist()).encode()


IDS = [[101, 2000, 102], [101, 3000, 3001, 102]]


async def test_right_ones(answers):
    tally = await asked(answers.embed_ids(IDS), 200, rows(answers, IDS))
    assert tally.summary() == {
        "sent": 1, "right": 1, "wrong": 0, "refused": 0, "failed": 0, "surplus": 0,
    }  # fmt: skip
    assert tally.complaints() == []


@pytest.mark.parametrize("spoil", ["value", "order", "row", "width", "nothing"])
async def test_wrong_values(answers, spoil):
    wrong = {
        "value": rows(answers, IDS, error=1e-4),
        "order": rows(answers, IDS[::-1]),
        "row": rows(answers, IDS[:1]),
        "width": json.dumps(answers.vectors(IDS)[:, :-1].tolist()).encode(),
        "nothing": b"null",
    }[spoil]
    tally = await asked(answers.embed_ids(IDS), 200, wrong)
    assert tally.count(Verdict.WRONG) == tally.sent == 1
    assert tally.complaints()


async def test_somebody_elses_answer(answers):
    tally = await asked(answers.embed_ids(IDS), 200, rows(answers, IDS), own_id=False)
    assert tally.count(Verdict.WRONG) == 1


async def test_an_answer_that_comes_twice(answers):
    tally = await asked(answers.embed_ids(IDS), 200, rows(answers, IDS), times=2)
    assert (tally.count(Verdict.RIGHT), tally.surplus) == (1, 1)


async def test_no_answer(answers):
    tally = await asked(answers.embed_ids(IDS), 200, b"", times=0)
    assert tally.statuses == {0: 1}
    assert tally.count(Verdict.FAILED) == 1


@pytest.mark.parametrize(("headers", "verdict"), [(("retry-after: 1",), "refused"), ((), "wrong")])
@pytest.mark.parametrize("status", [429, 503])
async def test_refusals_say_when_to_come_back(answers, status, headers, verdict):
    tally = await asked(answers.embed_ids(IDS), status, b"{}", headers=headers)
    assert tally.count(Verdict(verdict)) == 1


async def test_other_statuses(answers):
    assert (await asked(answers.embed_ids(IDS), 500, b"{}")).count(Verdict.FAILED) == 1
    assert (await asked(mistake("/embed", b"{", 400), 400, b"{}")).count(Verdict.RIGHT) == 1
    assert (await asked(mistake("/embed", b"{", 400), 200, b"[]")).count(Verdict.FAILED) == 1


async def test_a_ranking_must_be_one(answers):
    question = answers.rerank("tea", ["cup", "road", "sea"])
    scores = dict(enumerate((answers.vectors(answers.ids(["cup", "road", "sea"])) @ answers.vectors(
        answers.ids(["tea"]))[0]).tolist()))  # fmt: skip
    best_first = sorted(scores, key=scores.get, reverse=True)
    for order, verdict in (
        (best_first, Verdict.RIGHT),
        (best_first[::-1], Verdict.WRONG),
        (best_first[:2], Verdict.WRONG),
        ([best_first[0], *best_first[:2]], Verdict.WRONG),
    ):
        results = [{"index": index, "relevance_score": scores[index]} for index in order]
        tally = await asked(question, 200, json.dumps({"results": results}).encode())
        assert tally.count(verdict) == 1


def test_what_a_soak_does_not_forgive():
    findings = Findings(
        60.0, before={"gateway": Footprint(100.0, 20)}, after={"gateway": Footprint(120.0, 22)}
    )
    for kind in ("disconnects", "slow clients shown out", "restarts"):
        findings.record.counts[kind] += 1
    refused = load.Outcome(Verdict.REFUSED, 429, 0.0, 0.001, "1", "")
    findings.record.tally("burst of singles").outcomes.append(refused)
    assert findings.violations() == []
    findings.after["gateway"] = Footprint(127.0, 27)
    assert len(findings.violations()) == 2
    for verdict, status in ((Verdict.FAILED, 500), (Verdict.WRONG, 200), (Verdict.REFUSED, 503)):
        tally = findings.record.tally(f"{status}")
        tally.outcomes.append(load.Outcome(verdict, status, 0.0, 0.1, None, "told so"))
    assert len(findings.violations()) == 2 + 2 + 1 + 1  # a failure's status is a finding of its own
