"""What is compiled ahead is what a forward pass launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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


@pytest.fixture
def toolchain_there(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "refusal", lambda device: None)
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))


def test_every_part_is_compiled_once_and_remembered(monkeypatch, toolchain_there):
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(fused_build, "_run", lambda widths, parts: ran.extend(parts))
    GemmBuilds(SHAPE, CPU).wait()
    assert {tokens for _, tokens in ran} == {128, 1024, 2048}
    assert len(ran) == len(set(ran)) == 13  # cuBLAS does two of the last class's five
    GemmBuilds(SHAPE, CPU).wait()
    assert len(ran) == 13
    GemmBuilds(dataclasses.replace(SHAPE, width=128), CPU).wait()
    assert len(ran) == 26


def test_a_failure_is_reported_and_tried_again(monkeypatch, caplog, toolchain_there):
    monkeypatch.setattr(fused_build, "_run", lambda widths, parts: f"{parts[0][0]}: no compiler")
    GemmBuilds(SHAPE, CPU).wait()
    assert "first_qkv: no compiler" in caplog.text
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(fused_build, "_run", lambda widths, parts: ran.extend(parts))
    GemmBuilds(SHAPE, CPU).wait()
    assert len(ran) == 13


def test_without_the_toolchain_nothing_is_started(monkeypatch):
    monkeypatch.setattr(fused_build, "_run", lambda *_: pytest.fail("it must not run"))
    GemmBuilds(SHAPE, CPU).wait()


def test_a_process_that_fails_is_one_line(toolchain_there):
    why = fused_build._run(GemmWidths.of(SHAPE), [("qkv", 8)])
    assert why is not None
    assert why.startswith("qkv:8: ")
