"""The fused path on the device against plain torch, for one kind of early start.

    python -m tests.gpu.fused_comparisons {none,release,weights,epilogue,all,tuned}

A process of its own, because a kernel that hangs cannot be ended otherwise: it ends itself, with a traceback,
when a comparison takes too long. Prints one JSON line a comparison as soon as it is made.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.decoder_stack import CUDA, in_float32, random_batch, random_stack
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.attention.triton import TritonBackend
from rose_engine.kernels.cute import reference, toolchain
from rose_engine.kernels.cute.config import Early, GemmConfig, JoinedQkv
from rose_engine.kernels.cute.interface import FusedGemms
from rose_engine.layers.decoder import PlainPath, StackWeights
from rose_engine.layers.fused import FusedLayer, FusedPath, interleave_rotary, prepare_layer
from rose_engine.layers.fused_config import H200_CONFIGS, H200_EARLY_CONFIGS, LayerConfig

STARTS = {
    "none": Early.NONE,
    "release": Early.RELEASE,
    "weights": Early.RELEASE | Early.WEIGHTS,
    "epilogue": Early.RELEASE | Early.EPILOGUE,
    "all": Early.ALL,
    "tuned": None,  # each GEMM as H200_EARLY_CONFIGS has it
}
HANG_SECONDS = 60  # compiling one or two GEMMs included
TOKENS = ((1, 7, 64, 127, 128), (129, 300, 512, 1000), (2560, 4100))  # for each class of H200_CONFIGS
SEQUENCES = (([32], [128], [7, 64, 1, 30]), ([512], [300, 7, 1, 128]), ([512] * 5, [4096, 3]))
REFERENCE_CONFIG = LayerConfig(JoinedQkv(GemmConfig(64, 128)), None, None, GemmConfig(64, 64), None)
OP_ERROR, SUMS_ERROR, STACK_ERROR = 0.004, 0.001, 0.02  # measured on this shape: 0.0019, none, 0.01


@dataclass(frozen=True)
class Comparison:
    """One number that must not exceed its limit."""

    name: str
    error: float
    limit: float


def main() -> None:
    weights, gemms = random_stack(num_layers=4, vocabulary_size=1000), toolchain.load_gemms()
    for number, config in configs_starting(STARTS[sys.argv[1]]):
        for tokens in TOKENS[number]:
            report(compare_gemms(gemms, config, weights, tokens))
        for lengths in SEQUENCES[number]:
            report(compare_stacks(config, weights, lengths))


def configs_starting(start: Early | None) -> Iterator[tuple[int, LayerConfig]]:
    """The classes in which something starts as asked, with their numbers."""
    for number, ((_, stock), (_, tuned)) in enumerate(zip(H200_CONFIGS, H200_EARLY_CONFIGS, strict=True)):
        config = tuned if start is None else stock.starting(start)
        if start is Early.NONE or config != stock:
            yield number, config


def report(comparisons: Iterator[Comparison]) -> None:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    for comparison in comparisons:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        print(json.dumps(dataclasses.asdict(comparison)), flush=True)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def compare_gemms(
    gemms: FusedGemms, config: LayerConfig, weights: StackWeights, tokens: int
) -> Iterator[Comparison]:
    layer = prepare_layer(weights.layers[0], weights.shape.attention)
    yield from compare_qkv(gemms, config, weights, layer, tokens)
    yield from compare_gate_up(gemms, config, layer, tokens)
    for name, gemm, weight in (
        ("output", config.output, layer.output_DV),
        ("down", config.down, layer.down_DI),
    ):
        if gemm is not None:
            yield from compare_projection(gemms, name, gemm, weight, tokens)


def compare_qkv(
    gemms: FusedGemms, config: LayerConfig, weights: StackWeights, layer: FusedLayer, tokens: int
) -> Iterator[Comparison]:
    eps, width = weights.shape.norm_eps, weights.shape.qkv_width
    rows_TD, sums_TP = random_rows(tokens, weights.shape.width, partials=_partials(config))
    rotary_TH = interleave_rotary(weights.rotary_PH)[torch.arange(tokens, device=CUDA) % 512].contiguous()
    got_TQ, expected_TQ = poison(tokens, width), poison(tokens, width, torch.float32)
    got_sums, expected_sums = head_sums(config, tokens, width), head_sums(config, tokens, width)
    for functions, out_TQ, sums_TS in ((gemms, got_TQ, got_sums), (reference, expected_TQ, expected_sums)):
        functions.project_qkv(config.qkv, rows_TD, sums_TP, layer.qkv, rotary_TH, eps, out_TQ, sums_TS)
    yield Comparison(f"qkv {config.qkv}, {tokens} tokens", relative_error(got_TQ, expected_TQ), OP_ERROR)
    if got_sums is not None and expected_sums is not None:
        error = relative_error(got_sums, expected_sums)
        yield Comparison(f"head sums {config.qkv}, {tokens} tokens", error, SUMS_ERROR)


def compare_gate_up(
    gemms: FusedGemms, config: LayerConfig, layer: FusedLayer, tokens: int
) -> Iterator[Comparison]:
    rows_TD, sums_TP = random_rows(tokens, layer.gate_up_GD.shape[1], partials=_partials(config))
    inner = layer.down_DI.shape[1]
    got_TI, expected_TI = poison(tokens, inner), poison(tokens, inner, torch.float32)
    for functions, out_TI in ((gemms, got_TI), (reference, expected_TI)):
        functions.project_gate_up(config.gate_up, rows_TD, sums_TP, layer.gate_up_GD, 1e-6, out_TI)
    error = relative_error(got_TI, expected_TI)
    yield Comparison(f"gate_up {config.gate_up}, {tokens} tokens", error, OP_ERROR)


def compare_projection(
    gemms: FusedGemms, name: str, config: GemmConfig, weight_DK: Tensor, tokens: int
) -> Iterator[Comparison]:
    width, inner = weight_DK.shape
    rows_TK, _ = random_rows(tokens, inner)
    residual_TD, _ = random_rows(tokens, width)
    expected_TD = residual_TD.float()
    got_sums, expected_sums = (poison(tokens, config.column_tiles(width), torch.float32) for _ in range(2))
    gemms.add_projection(config, rows_TK, weight_DK, residual_TD, got_sums)
    reference.add_projection(config, rows_TK, weight_DK, expected_TD, expected_sums)
    error = relative_error(residual_TD, expected_TD)
    yield Comparison(f"{name} {config}, {tokens} tokens", error, OP_ERROR)
    error = relative_error(got_sums, expected_sums)
    yield Comparison(f"{name} sums {config}, {tokens} tokens", error, SUMS_ERROR)


def compare_stacks(config: LayerConfig, weights: StackWeights, lengths: list[int]) -> Iterator[Comparison]:
    """The whole stack against float32 and against the plain path; again from a graph, with other tokens."""
    table = ((1 << 31, config),)
    paths = FusedPath(weights, configs=table), PlainPath(weights)
    exact = FusedPath(in_float32(weights), reference, ((1 << 31, REFERENCE_CONFIG),))
    batch, other = (random_batch(lengths, weights.shape.vocabulary_size, seed) for seed in (1, 2))
    attend = TritonBackend().bind(batch.layout)
    exact_TD, other_TD = (exact(b, exact_attention(b, lengths)) for b in (batch, other))
    for name, path in zip(("fused", "plain"), paths, strict=True):
        yield Comparison(
            f"{name} stack {lengths}", relative_error(path(batch, attend), exact_TD), STACK_ERROR
        )
    graph, hidden_TD = captured(paths[0], batch, attend)
    batch.token_ids_T.copy_(other.token_ids_T)
    graph.replay()
    first_TD = hidden_TD.clone()
    yield Comparison(f"fused stack {lengths}, replayed", relative_error(first_TD, other_TD), STACK_ERROR)
    for _ in range(20):
        graph.replay()
    yield Comparison(f"fused stack {lengths}, repeated", relative_error(hidden_TD, first_TD), 0.0)


def exact_attention(batch, lengths):
    return SdpaBackend().bind(dataclasses.replace(batch.layout, lengths=tuple(lengths)))


def captured(path, batch, attend):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        path(batch, attend)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden_TD = path(batch, attend)
    return graph, hidden_TD


def random_rows(tokens: int, width: int, partials: int = 1) -> tuple[Tensor, Tensor]:
    """Rows and their sums of squares, spread over `partials` columns."""
    rows_TD = torch.randn(tokens, width, device=CUDA).to(torch.bfloat16)
    share = torch.rand(tokens, partials, device=CUDA) + 0.1
    sums_T1 = rows_TD.float().square().sum(1, keepdim=True)
    return rows_TD, (share / share.sum(1, keepdim=True) * sums_T1).contiguous()


def poison(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((tokens, width), float("nan"), dtype=dtype, device=CUDA)


def head_sums(config: LayerConfig, tokens: int, width: int) -> Tensor | None:
    if not (isinstance(config.qkv, JoinedQkv) and config.qkv.deferred_norm):
        return None
    return poison(tokens, config.qkv.gemm.column_tiles(width), torch.float32)


def _partials(config: LayerConfig) -> int:
    """Partial sums as the layer's own projections make them."""
    return 1 if config.down is None else config.down.column_tiles(1024)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
