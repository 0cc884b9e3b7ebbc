"""The committed table of supported families is the one that the registry gives."""

from __future__ import annotations

import pytest

from docs import support_table
from rose_engine.attention.base import AttentionSpec
from rose_engine.models.registry import FAMILY_MODULES


def test_the_committed_table_is_up_to_date():
    page = support_table.PAGE.read_text(encoding="utf-8")
    assert page == support_table.updated(page), "run python -m docs.support_table"


def test_a_stale_table_is_told_apart_and_nothing_else_is_touched():
    page = support_table.PAGE.read_text(encoding="utf-8")
    stale = page.replace("`nomic_bert`", "`nomic_ber`", 1)
    assert stale != page
    assert support_table.updated(stale) == page


def test_every_type_is_in_the_table_once():
    families = support_table.supported_families()
    assert sorted(t for family in families for t in family.model_types) == sorted(FAMILY_MODULES)


def test_every_family_has_a_parity_test_against_transformers():
    for family in support_table.supported_families():
        assert (support_table.ROOT / family.parity_test).is_file(), family.module
        assert list(family.reference_classes), family.parity_test


@pytest.mark.parametrize(
    ("window", "biased", "words"),
    [
        ((-1, -1), False, "all"),
        ((-1, -1), True, "all, with bias"),
        ((-1, 0), False, "causal"),
        ((4095, 0), False, "causal, 4096 tokens"),
        ((64, 64), False, "64 before, 64 after"),
    ],
)
def test_windows_in_words(window, biased, words):
    spec = AttentionSpec(2, 2, 8, 8**-0.5, window, biased)
    assert support_table.describe_window(spec) == words
