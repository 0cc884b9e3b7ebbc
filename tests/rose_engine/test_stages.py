"""What is logged of a stage, and what the benchmark of starts makes of it."""

from __future__ import annotations

import re

import pytest

from rose_engine.stages import stage


def test_a_stage_that_ends_well_is_logged_and_one_that_fails_leaves_the_last_word_to_the_error(caplog):
    caplog.set_level("INFO")
    with stage("outer"):
        with pytest.raises(ValueError, match="broken"), stage("failing"):
            raise ValueError("broken")
        with stage("inner"):
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"[\d.]+", "N", line) for line in lines] == ["stage inner: N s", "stage outer: N s"]
