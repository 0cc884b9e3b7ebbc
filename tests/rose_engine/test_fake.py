"""The engine without a model: rows follow from the ids, and a test says when they arrive."""

from __future__ import annotations

import numpy as np
import pytest

from rose_engine.batch import Batch
from rose_engine.errors import StepError
from rose_engine.fake import FakeEngine, fake_rows
from tests.rose_engine.samples import random_batch, random_sequences, sequence


def test_rows_are_of_unit_length_and_differ():
    rows = fake_rows(random_batch([3, 1, 7, 2]), 16)
    assert rows.shape == (4, 16)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert len(np.unique(rows, axis=0)) == 4


def test_a_row_does_not_depend_on_its_neighbours():
    sequences = random_sequences([3, 1, 7])
    together = fake_rows(Batch.pack(sequences), 8)
    for item, row in zip(sequences, together, strict=True):
        np.testing.assert_array_equal(fake_rows(Batch.pack([item]), 8)[0], row)


def test_order_of_ids_matters():
    rows = fake_rows(Batch.pack([sequence(1, 2), sequence(2, 1)]), 8)
    assert not np.array_equal(rows[0], rows[1])


def test_rows_arrive_at_once_by_default():
    engine = FakeEngine()
    batch = random_batch([2, 3])
    lazy = engine.step(batch)
    assert lazy.ready()
    np.testing.assert_array_equal(lazy.result(), fake_rows(batch, engine.description.dimensions))


def test_manual_steps_end_when_and_how_the_test_says():
    engine = FakeEngine(manual=True)
    batches = [random_batch([2]), random_batch([3], seed=1)]
    first, second = (engine.step(batch) for batch in batches)
    assert [step.batch for step in engine.steps] == batches
    engine.steps[1].fail(StepError("lost"))
    assert (first.ready(), second.ready()) == (False, True)
    with pytest.raises(StepError, match="lost"):
        second.result()
    engine.steps[0].complete()
    np.testing.assert_array_equal(first.result(), fake_rows(batches[0], 8))


def test_stepping_after_close_is_a_bug():
    engine = FakeEngine()
    engine.close()
    with pytest.raises(AssertionError, match="after close"):
        engine.step(random_batch([1]))
