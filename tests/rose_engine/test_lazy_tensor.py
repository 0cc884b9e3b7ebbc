"""The handle: asks without waiting, waits for its own rows, hands them over once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rose_engine.errors import StepError
from rose_engine.lazy_tensor import HostCompletion, LazyTensor, finite_rows

ROWS = np.eye(2, dtype=np.float32)


def test_ready_follows_the_completion():
    completion = HostCompletion()
    lazy = LazyTensor(completion, lambda: ROWS)
    assert not lazy.ready()
    completion.set()
    assert lazy.ready()


def test_rows_are_collected_once_and_kept():
    calls = []
    completion = HostCompletion()
    completion.set()
    lazy = LazyTensor(completion, lambda: calls.append(1) or ROWS)
    assert lazy.result() is lazy.result() is ROWS
    assert len(calls) == 1


def test_result_waits_for_the_completion():
    completion, waiting = HostCompletion(), threading.Event()
    order = []

    def collect():
        order.append("collected")
        return ROWS

    def consume():
        waiting.set()
        LazyTensor(completion, collect).result()

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waiting.wait(10)
    order.append("completed")
    completion.set()
    consumer.join(10)
    assert order == ["completed", "collected"]


def test_an_error_is_raised_every_time():
    def collect():
        raise StepError("no rows")

    completion = HostCompletion()
    completion.set()
    lazy = LazyTensor(completion, collect)
    for _ in range(2):
        with pytest.raises(StepError, match="no rows"):
            lazy.result()


def test_callbacks_run_at_completion_or_at_once_after_it():
    completion, seen = HostCompletion(), []
    lazy = LazyTensor(completion, lambda: ROWS)
    lazy.add_done_callback(seen.append)
    assert seen == []
    completion.set()
    lazy.add_done_callback(seen.append)
    completion.set()
    assert seen == [lazy, lazy]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.array([[1, 2], [np.nan, 0], [0, np.inf], [0, 0]], np.float32), [True, False, False, True]),
        (np.array([[1, 2], [0, 0], [-3, 4]], np.float32), [True, True, True]),
        (np.array([[0, np.nan]], np.float32), [False]),
        (np.array([[1, 2], [-128, 0], [127, -127]], np.int8), [True, False, True]),
        (np.array([[1, 2, -128], [127, -127, 1]], np.int8), [True, True]),
        (np.array([[1, 2, -128], [-128, 0, 1]], np.int8), [True, False]),  # packed bits may be anything
    ],
)
def test_rows_without_an_answer_are_told_apart(rows, expected):
    assert finite_rows(rows, 2).tolist() == expected
