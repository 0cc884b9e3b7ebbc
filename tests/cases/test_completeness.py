"""No case of the shared list is without its test."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_case_has_a_test(shared):
    listed = set(re.findall(r"^### (BC-\d+)", (shared / "cases" / "bug-cases.md").read_text(), re.MULTILINE))
    names = re.findall(r"def test_(bc_\d+)_", "".join(file.read_text() for file in HERE.glob("test_*.py")))
    assert len(listed) > 60
    assert listed <= {name.upper().replace("_", "-") for name in names}


def test_what_is_not_here_names_cases_that_exist(shared):
    listed = set(re.findall(r"BC-\d+", (shared / "cases" / "bug-cases.md").read_text()))
    assert set(re.findall(r"BC-\d+", (HERE / "NOT_HERE.md").read_text())) <= listed
