"""Chunks: every input once, in order, within bounds, evenly; rows come back in the job's order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ivy_gateway.chunking import merge, split
from ivy_gateway.jobs import EncodedInput

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=80)


def inputs_of(lengths):
    return [EncodedInput(i, np.zeros(n, np.int32), None, False) for i, n in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 40), st.integers(1, 8))
def test_every_input_once_in_order_and_within_bounds(lengths, max_tokens, max_inputs, parts):
    chunks = split(inputs_of(lengths), max_tokens, max_inputs, parts)
    assert [item.index for chunk in chunks for item in chunk.inputs] == list(range(len(lengths)))
    for chunk in chunks:
        assert 1 <= len(chunk.inputs) <= max_inputs
        assert chunk.num_tokens <= max_tokens or len(chunk.inputs) == 1


@given(LENGTHS, st.integers(1, 8))
def test_parts_are_as_even_as_whole_inputs_allow(lengths, parts):
    chunks = split(inputs_of(lengths), sum(lengths), len(lengths), parts)
    share = sum(lengths) / min(parts, len(lengths))
    assert max(chunk.num_tokens for chunk in chunks) <= share + max(lengths)
    assert len(chunks) <= parts


def test_equal_inputs_are_spread_exactly():
    chunks = split(inputs_of([10] * 12), max_tokens=10_000, max_inputs=256, parts=4)
    assert [len(chunk.inputs) for chunk in chunks] == [3, 3, 3, 3]


def test_no_small_rest_is_left_behind():
    chunks = split(inputs_of([10] * 110), max_tokens=1000, max_inputs=256)
    assert [chunk.num_tokens for chunk in chunks] == [550, 550]


def test_an_input_over_the_budget_travels_alone():
    chunks = split(inputs_of([5, 900, 5]), max_tokens=100, max_inputs=256)
    assert [[item.num_tokens for item in chunk.inputs] for chunk in chunks] == [[5], [900], [5]]


def test_nothing_gives_no_chunk():
    assert split([], 100, 10) == []


@given(LENGTHS, st.integers(1, 2000), st.randoms())
def test_rows_come_back_in_job_order(lengths, max_tokens, random):
    chunks = split(inputs_of(lengths), max_tokens, 256)
    answered = list(chunks)
    random.shuffle(answered)
    rows = [np.array([[item.index, item.num_tokens] for item in chunk.inputs]) for chunk in answered]
    np.testing.assert_array_equal(merge(rows, answered), list(enumerate(lengths)))


def test_merging_keeps_the_dtype():
    chunks = split(inputs_of([1, 1]), 1, 1)
    assert merge([np.ones((1, 3), np.int8)] * 2, chunks).dtype == np.int8
