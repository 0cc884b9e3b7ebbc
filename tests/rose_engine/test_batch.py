"""Packing sequences and knowing where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_engine.batch import Batch, PackedLayout
from tests.rose_engine.samples import random_sequences, sequence


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_every_sequence_can_be_cut_out_again(lengths):
    sequences = random_sequences(lengths)
    batch = Batch.pack(sequences)
    bounds = batch.layout.cu_lengths
    assert (batch.num_sequences, batch.num_tokens) == (len(lengths), sum(lengths))
    assert batch.layout.max_length == max(lengths)
    np.testing.assert_array_equal(batch.layout.lengths, lengths)
    for i, item in enumerate(sequences):
        span = slice(bounds[i], bounds[i + 1])
        np.testing.assert_array_equal(batch.token_ids_T[span], item.token_ids)
        np.testing.assert_array_equal(batch.position_ids_T[span], np.arange(item.num_tokens))


def test_arrays_are_int32():
    batch = Batch.pack([sequence(1, 2, segments=[0, 1]), sequence(3)])
    for array in (batch.token_ids_T, batch.position_ids_T, batch.segment_ids_T, batch.layout.cu_lengths):
        assert array.dtype == np.int32


def test_sequences_without_segments_are_in_the_first():
    batch = Batch.pack([sequence(1, 2, segments=[0, 1]), sequence(3, 4)])
    np.testing.assert_array_equal(batch.segment_ids_T, [0, 1, 0, 0])


def test_no_segments_at_all_stay_absent():
    assert Batch.pack([sequence(1), sequence(2)]).segment_ids_T is None


@pytest.mark.parametrize("segments", [None, [0, 1, 1]])
def test_one_alone_is_packed_as_it_is_among_others(segments):
    item = sequence(7, 8, 9, segments=segments)
    alone, among = Batch.pack([item]), Batch.pack([item, item])
    assert (alone.num_sequences, alone.num_tokens, alone.num_rows) == (1, 3, 1)
    assert alone.layout.max_length == among.layout.max_length == 3
    np.testing.assert_array_equal(alone.layout.cu_lengths, among.layout.cu_lengths[:2])
    assert (alone.segment_ids_T is None) == (among.segment_ids_T is None)
    for name in ("token_ids_T", "position_ids_T", "segment_ids_T"):
        if (values_T := getattr(alone, name)) is not None:
            np.testing.assert_array_equal(values_T, getattr(among, name)[:3])
            assert values_T.dtype == np.int32


def test_zero_lengths_take_no_room():
    layout = PackedLayout.of(np.array([2, 0, 3], np.int32))
    np.testing.assert_array_equal(layout.cu_lengths, [0, 2, 2, 5])
    np.testing.assert_array_equal(layout.positions(), [0, 1, 0, 1, 2])


def test_an_empty_batch_is_a_bug():
    with pytest.raises(AssertionError, match="empty batch"):
        Batch.pack([])
