"""What the command compiles for, and what it says where there is nothing to do or nothing to do it with."""

from __future__ import annotations

import json

import pytest

from benchmarks.random_folders import SHAPES
from rose_engine import compile_ahead
from rose_engine.build_process import BuildReport
from rose_engine.compile_ahead import main
from rose_engine.kernels import launch
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.fused_build import GemmWidths


@pytest.fixture
def folder(tmp_path):
    """A folder without weights, of the given shape or with some of its settings changed."""

    def write(shape: str, **changed: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**SHAPES[shape].config, **changed}))
        return str(tmp_path)

    return write


@pytest.fixture
def built(monkeypatch):
    """The widths that were compiled for, by module; the toolchain is there."""
    asked: list[tuple[str, GemmWidths]] = []

    class FakeProcess:
        def __init__(self, command: list[str]) -> None:
            module, widths = command[command.index("-m") + 1 :][:2]
            asked.append((module, GemmWidths(**json.loads(widths))))

        def report(self) -> BuildReport:
            return BuildReport({"qkv": 1.0}, FAILURES)

    monkeypatch.setattr(toolchain, "unusable", lambda: None)
    monkeypatch.setattr(compile_ahead, "BuildProcess", FakeProcess)
    pytest.importorskip("triton")
    FAILURES.clear()
    return asked


FAILURES: dict[str, str] = {}
QWEN = GemmWidths(1024, 3072, 16, 8, 128, 1e-6)


def test_a_decoder_is_compiled_for_by_its_widths(folder, built, capsys):
    assert main([folder("qwen3-0.6b")]) == 0
    assert built == [("rose_engine.triton_ahead", QWEN), ("rose_engine.layers.fused_build", QWEN)]
    said = capsys.readouterr().err
    assert "GEMMs: 1 compiled" in said
    assert "Triton kernels: 1 compiled" in said


def test_a_failure_is_named_and_is_the_exit_status(folder, built, capsys):
    FAILURES["qkv 64x64"] = "no room"
    assert main([folder("qwen3-0.6b")]) == 1
    assert "GEMMs: qkv 64x64: no room" in capsys.readouterr().err


def test_a_model_without_a_decoder_is_no_failure(folder, built, capsys):
    assert main([folder("minilm")]) == 0
    assert not built
    assert "no decoder stack" in capsys.readouterr().err


def test_heads_that_the_fused_path_does_not_take_are_no_failure(folder, built, capsys):
    assert main([folder("qwen3-0.6b", head_dim=256)]) == 0
    assert [module for module, _ in built] == ["rose_engine.triton_ahead"]
    assert "heads of 256" in capsys.readouterr().err


def test_without_the_toolchains_it_says_what_is_missing(folder, built, monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "unusable", lambda: "needs quack")
    monkeypatch.setattr(launch, "triton", None)
    assert main([folder("qwen3-0.6b")]) == 1
    assert not built
    said = capsys.readouterr().err
    assert "GEMMs: needs quack" in said
    assert "Triton is not installed" in said


def test_a_folder_that_is_no_model_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path / "config.json") in capsys.readouterr().err
