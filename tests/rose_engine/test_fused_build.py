"""What is compiled ahead is what a forward pass launches."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rose_engine.build_process import BuildProcess
from rose_engine.kernels.cute import reference, toolchain
from rose_engine.kernels.ragged_attention import ragged_attention
from rose_engine.layers import fused_build
from rose_engine.layers.fused import PARTS, FusedPath
from rose_engine.layers.fused_build import GemmBuilds, GemmWidths
from tests.rose_engine.test_fused_layout import CONFIGS, LENGTHS, SHAPE, packed, random_stack

CPU = torch.device("cpu")


class Recording:
    """The reference GEMMs, noting what a compiled one would depend on."""

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def project_qkv(self, config, residual_TD, sums_TP, weight, rotary_TH, eps, out_TQ, head_sums_TS=None):
        self.seen.add(("qkv", config, sums_TP.shape[1], weight.weight_QD.shape))
        reference.project_qkv(config, residual_TD, sums_TP, weight, rotary_TH, eps, out_TQ, head_sums_TS)

    def project_gate_up(self, config, residual_TD, sums_TP, weight_GD, eps, out_TI):
        self.seen.add(("gate_up", config, sums_TP.shape[1], weight_GD.shape))
        reference.project_gate_up(config, residual_TD, sums_TP, weight_GD, eps, out_TI)

    def add_projection(self, config, rows_TK, weight_DK, residual_TD, sums_TP):
        self.seen.add(("add", config, rows_TK.shape[1], weight_DK.shape))
        reference.add_projection(config, rows_TK, weight_DK, residual_TD, sums_TP)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_are_what_a_forward_pass_launches(name):
    table, batch = ((1 << 31, CONFIGS[name]),), packed(LENGTHS)

    def attend(q, k, v, spec):
        layout = batch.layout
        return ragged_attention(q, k, v, layout.cu_lengths, layout.max_length, spec.scale, spec.causal)

    launched, forward = Recording(), Recording()
    path = FusedPath(random_stack(), launched, table)
    for part in PARTS:
        if CONFIGS[name].launches(part):
            path.launch(part, 8)
    FusedPath(random_stack(), forward, table)(batch, attend)
    assert launched.seen == forward.seen


def test_the_stand_in_has_the_widths_of_the_stack():
    stack = GemmWidths.of(SHAPE).stack(CPU)
    real = random_stack()
    for name in ("qkv_QD", "qk_norm_2H", "output_DV", "gate_up_GD", "down_DI"):
        assert getattr(stack.layers[0], name).shape == getattr(real.layers[0], name).shape


WIDTHS = GemmWidths.of(SHAPE)


@pytest.fixture
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def builds(monkeypatch, cache_folder, caplog):
    """`GemmBuilds` as on a Hopper card, with a script in place of the process that compiles."""
    caplog.set_level("INFO")
    monkeypatch.setattr(toolchain, "refusal", lambda device: None)

    def begin(script: str, shape=SHAPE) -> GemmBuilds:
        monkeypatch.setattr(fused_build, "build_command", lambda widths: [sys.executable, "-c", script])
        return GemmBuilds(shape, CPU)

    return begin


def reporting(**report: object) -> str:
    return f"print('a word of the toolchain'); print({json.dumps(json.dumps(report))})"


def test_a_build_is_awaited_once_and_its_report_logged(builds, caplog):
    begun = builds(reporting(seconds={"qkv": 1.5}, failures={"down": "no room"}))
    begun.wait()
    assert "GEMMs: 1 compiled" in caplog.text
    assert "GEMMs: not compiled ahead: down: no room" in caplog.text
    begun.wait()
    assert caplog.text.count("1 compiled") == 1


def test_nothing_is_started_when_an_earlier_start_has_compiled_everything(builds, caplog):
    WIDTHS.marker.touch()
    builds(reporting(failures={"qkv": "it must not run"})).wait()
    assert "it must not run" not in caplog.text
    builds(reporting(failures={"qkv": "of another width"}), dataclasses.replace(SHAPE, width=128)).wait()
    assert "of another width" in caplog.text


def test_heads_that_the_configurations_do_not_fit_are_not_compiled_for(builds, caplog):
    assert WIDTHS.misfit is None
    wide = dataclasses.replace(SHAPE, attention=dataclasses.replace(SHAPE.attention, head_dim=256))
    assert "heads of 256" in (GemmWidths.of(wide).misfit or "")
    builds(reporting(failures={"qkv": "it must not run"}), wide).wait()
    assert "it must not run" not in caplog.text


def test_without_the_toolchain_nothing_is_started(monkeypatch):
    monkeypatch.setattr(fused_build, "build_command", lambda _: pytest.fail("it must not run"))
    GemmBuilds(SHAPE, CPU).wait()


FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class FakeToolchain:
    """Stands for the module `gemms`: one object for each launch, compiled by making a file."""

    def __init__(self, folder: Path, broken: str | None) -> None:
        self.folder, self.broken = folder, broken

    def objects_of(self, run):
        recording = Recording()
        run(recording)
        return [FakeCall(self, number) for number in range(len(recording.seen))]


@dataclasses.dataclass
class FakeCall:
    toolchain: FakeToolchain
    number: int

    def __str__(self) -> str:
        return f"gemm {self.number}"

    def compile(self) -> None:
        if str(self) == self.toolchain.broken:
            raise ValueError("no compiler")
        (self.toolchain.folder / str(self)).touch()


@FORKS
@pytest.mark.parametrize("broken", [None, "gemm 3"])
def test_a_build_sets_the_marker_when_everything_is_compiled(monkeypatch, cache_folder, broken):
    monkeypatch.setattr(toolchain, "compile_without_device", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(toolchain, "gemms_module", lambda: FakeToolchain(cache_folder, broken))
    report = fused_build.build(WIDTHS)
    assert {file.name for file in cache_folder.glob("gemm *")} == set(report.seconds)
    assert report.failures == ({} if broken is None else {broken: "ValueError: no compiler"})
    assert WIDTHS.marker.exists() is (broken is None)


LOOKED_UP = """
import json, sys
import torch
from rose_engine.kernels.cute import toolchain
from rose_engine.layers.fused import FusedPath
from rose_engine.layers.fused_build import GemmWidths, _launch_all
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # a process with a card, as far as keys go
stack = GemmWidths(**json.loads(sys.argv[1])).stack(torch.device("cpu"))
for call in toolchain.gemms_module().objects_of(lambda noting: _launch_all(FusedPath(stack, noting))):
    call.compile()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.skipif(toolchain.unusable() is not None, reason="needs the toolchain, though no card")
def test_what_is_compiled_without_a_device_is_what_a_process_with_one_looks_up(cache_folder):
    built = BuildProcess(fused_build.build_command(WIDTHS)).report()
    assert (built.failures, len(built.seconds)) == ({}, 11)
    objects = set(cache_folder.rglob("*.o"))
    assert len(objects) == 11
    command = [sys.executable, "-c", LOOKED_UP, json.dumps(dataclasses.asdict(WIDTHS))]
    looked_up = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert set(cache_folder.rglob("*.o")) == objects
    assert looked_up.splitlines()[-1] == "[]", "nothing that takes longer than all the rest is imported"
