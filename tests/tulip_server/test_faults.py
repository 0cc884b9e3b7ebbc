"""The hook that tests of other tiers use: each file makes exactly its own fault, once."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from rose_engine.fake import fake_rows
from rose_engine.fixed_rate import FixedRateEngine
from tests.tulip_server.conftest import expected_rows, infer_request, rows_of, serving
from tests.tulip_server.test_service import A, B
from tulip_server import faults as faults_module
from tulip_server.faults import FOLDER_VARIABLE, Faults, InjectedFault


@pytest.fixture
def faults(tmp_path) -> Faults:
    return Faults(tmp_path)


def test_without_the_variable_there_are_none(tmp_path):
    assert Faults.from_environment({}) is None
    assert Faults.from_environment({FOLDER_VARIABLE: ""}) is None
    assert Faults.from_environment({FOLDER_VARIABLE: str(tmp_path)}) == Faults(tmp_path)


def test_a_forward_pass_fails_once_for_each_file(faults):
    for number in range(2):
        (faults.folder / f"forward.{number}").touch()
    for _ in range(2):
        with pytest.raises(InjectedFault):
            faults.in_forward()
    faults.in_forward()


def test_a_forward_pass_hangs_until_it_is_released(faults):
    (faults.folder / "hang.1").touch()
    thread = threading.Thread(target=faults.in_forward)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    (faults.folder / "hang-release").touch()
    thread.join(10)
    assert not thread.is_alive()


def test_a_hang_ends_by_itself(faults, monkeypatch):
    monkeypatch.setattr(faults_module, "_LONGEST_HANG", 0.1)
    (faults.folder / "hang.1").touch()
    faults.in_forward()


def test_every_forward_pass_is_slow_while_the_file_is_there(faults):
    file = faults.folder / "slow.0.05"
    file.touch()
    begin = time.monotonic()
    for _ in range(3):
        faults.in_forward()
    assert time.monotonic() - begin >= 0.15
    assert file.exists()


@pytest.mark.parametrize(("name", "shape"), [("shape.1", (1, 8)), ("width.1", (2, 7))])
async def test_rows_of_a_wrong_shape_are_sent_once(faults, monkeypatch, name, shape):
    monkeypatch.setenv(FOLDER_VARIABLE, str(faults.folder))
    (faults.folder / name).touch()
    async with serving(FixedRateEngine(1e9)) as running:
        assert rows_of(await running.stub.Infer(infer_request(A, B))).shape == shape
        reply = await running.stub.Infer(infer_request(A, B))
        np.testing.assert_array_equal(rows_of(reply), expected_rows(A, B))


async def test_the_engine_of_fixed_rate_takes_its_time_and_gives_known_rows():
    engine = FixedRateEngine(tokens_per_second=100.0, overhead_seconds=0.02)
    async with serving(engine, max_batch_tokens=4, depth=2) as running:
        begin = time.monotonic()
        replies = await asyncio.gather(*(running.stub.Infer(infer_request(s)) for s in (A, B)))
        seconds = time.monotonic() - begin
    for reply, sequence in zip(replies, (A, B), strict=True):
        np.testing.assert_array_equal(rows_of(reply), expected_rows(sequence))
    assert seconds >= 0.1  # eight tokens, in one batch or in two that do not overlap
    assert engine.step_seconds(4) == pytest.approx(0.06)


async def test_what_computing_raises_fails_its_step_alone():
    failures = [ZeroDivisionError()]

    def compute(batch, dimensions):
        if failures:
            raise failures.pop()
        return fake_rows(batch, dimensions)

    async with serving(FixedRateEngine(1e9, compute=compute)) as running:
        with pytest.raises(Exception, match="the step failed"):
            await running.stub.Infer(infer_request(A))
        np.testing.assert_array_equal(rows_of(await running.stub.Infer(infer_request(B))), expected_rows(B))
