"""What is made of JUnit files; that nothing pretends to have run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_tests import ROOT, SUITES, Counts, summary

JUNIT = """<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1" time="2.5">
<testcase name="test_a"><properties><property name="comparisons" value="79"/></properties></testcase>
<testcase name="test_b"><failure/></testcase><testcase name="test_c"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def counts(tmp_path: Path) -> Counts:
    (tmp_path / "junit.xml").write_text(JUNIT)
    return Counts.of_junit(tmp_path / "junit.xml")


def test_counts_and_recorded_figures(counts):
    assert counts == Counts(3, 1, 0, 1, 2.5, {"test_a": {"comparisons": 79.0}})
    assert not counts.passed


@pytest.mark.parametrize(
    ("numbers", "passed"), [((3, 0, 0, 1), True), ((3, 0, 0, 3), False), ((3, 0, 1, 0), False)]
)
def test_a_suite_of_which_nothing_ran_did_not_pass(numbers, passed):
    assert Counts(*numbers, seconds=1.0).passed is passed


def test_the_summary_keeps_what_was_not_run(counts):
    earlier = {"suites": {"kernels": {"tests": 5}, "runner": {"tests": 1}}, "other": 1}
    found = summary(earlier, {"runner": counts})
    assert found["other"] == 1
    assert found["suites"]["kernels"] == {"tests": 5}
    assert found["suites"]["runner"]["tests"] == 3


def test_every_file_of_tests_marked_gpu_is_in_one_suite():
    marked = [f for f in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" + "\n" in f.read_text()]
    marked += [f for f in (ROOT / "tests").rglob("test_*.py") if "[pytest.mark.gpu" + "," in f.read_text()]
    named = [ROOT / file for files in SUITES.values() for file in files]
    assert sorted(marked) == sorted(named)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_it_says_so_and_fails():
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_tests"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "no CUDA device" in found.stderr
