"""The reference file: what is written is read, and what is no reference file is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from protos.reference import REFERENCE_FILE, BadReference, ReferenceExample, read_reference, write_reference


def example(text="Zürich 🙂\n", length=3, width=4):
    random = np.random.default_rng(length)
    ids = random.integers(0, 1000, length, dtype=np.int32)
    return ReferenceExample(text, ids, random.standard_normal(width).astype(np.float32))


def test_a_folder_without_one_has_no_examples(tmp_path):
    assert read_reference(tmp_path) == ()


def test_examples_come_back_bit_by_bit(tmp_path):
    examples = [example(), example("", length=1)]
    write_reference(tmp_path / REFERENCE_FILE, examples, {"library": "1.0"})
    for got, wanted in zip(read_reference(tmp_path), examples, strict=True):
        assert got.text == wanted.text
        assert (got.token_ids.dtype, got.vector.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(got.token_ids, wanted.token_ids)
        np.testing.assert_array_equal(got.vector, wanted.vector)
    assert json.loads((tmp_path / REFERENCE_FILE).read_text())["made_with"] == {"library": "1.0"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a reference file"),
        ("{", "not a reference file"),
        ('{"format": 2, "examples": []}', "format 2 is unknown"),
        ('{"format": 1, "examples": []}', "no examples"),
        ('{"format": 1, "examples": [{"text": "a", "token_ids": [1]}]}', "vector"),
        ('{"format": 1, "examples": [{"text": 3, "token_ids": [1], "vector": ""}]}', "no string"),
        ('{"format": 1, "examples": [{"text": "a", "token_ids": [1], "vector": "AAA="}]}', "not a reference"),
        ('{"format": 1, "examples": [{"text": "a", "token_ids": [99999999999], "vector": ""}]}', "not a ref"),
    ],
)
def test_what_is_none_is_refused_by_name(tmp_path, content, message):
    (tmp_path / REFERENCE_FILE).write_text(content)
    with pytest.raises(BadReference, match=message) as caught:
        read_reference(tmp_path)
    assert REFERENCE_FILE in str(caught.value)
