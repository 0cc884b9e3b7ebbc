"""The weights' hash moves with content and facts, and with nothing else."""

from __future__ import annotations

import pytest

from rose_engine import fingerprint
from rose_engine.fingerprint import weights_hash


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks and reads a file, without large files."""
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 8)
    monkeypatch.setattr(fingerprint, "_READ_BYTES", 3)


@pytest.fixture
def files(tmp_path):
    contents = {"a": b"0123456789abcdefghij", "b": b"xyz"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in contents]


def test_equal_content_elsewhere_has_the_same_hash(files, tmp_path_factory):
    copies = [tmp_path_factory.mktemp("copy") / file.name for file in files]
    for file, copy in zip(files, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    assert weights_hash(copies, ["mean"]) == weights_hash(files, ["mean"])
    assert len(weights_hash(files, [])) == 16


@pytest.mark.parametrize("at", [0, 7, 8, 19])
def test_every_byte_counts(files, at):
    before = weights_hash(files, ["mean"])
    content = bytearray(files[0].read_bytes())
    content[at] ^= 1
    files[0].write_bytes(content)
    assert weights_hash(files, ["mean"]) != before


def test_facts_and_their_borders_count(files):
    variants = [["mean"], ["cls"], ["mean", "float32"], ["meanfloat32"], []]
    assert len({weights_hash(files, facts) for facts in variants}) == len(variants)


def test_a_byte_that_moves_between_files_counts(files):
    before = weights_hash(files, [])
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(first + second[:1])
    files[1].write_bytes(second[1:])
    assert weights_hash(files, []) != before
