"""The GEMMs of a decoder layer on the device: `interface.FusedGemms` as functions, one or two launches each.

Importing this module imports the CuTe DSL (`toolchain.load_gemms` does). A configuration is compiled on first
use, about a second, for any number of tokens; the object is kept on disk.
"""

from __future__ import annotations

from torch import Tensor

from rose_engine.kernels.cute.config import GemmConfig, JoinedQkv, SplitQkv
from rose_engine.kernels.cute.early import HopperEpilogue, attributes
from rose_engine.kernels.cute.epilogues import layer_epilogues, residual_epilogue
from rose_engine.kernels.cute.interface import QkvWeight


def project_qkv(
    config: JoinedQkv | SplitQkv,
    residual_TD: Tensor,
    sums_TP: Tensor,
    weight: QkvWeight,
    rotary_TH: Tensor,
    eps: float,
    out_TQ: Tensor,
    head_sums_TS: Tensor | None = None,
) -> None:
    """See `FusedGemms.project_qkv`."""
    if isinstance(config, SplitQkv):
        _project_split(config, residual_TD, sums_TP, weight, rotary_TH, eps, out_TQ)
        return
    epilogues = layer_epilogues(residual_TD.shape[1], eps)
    operands: dict[str, Tensor | int] = {
        "rotary": rotary_TH,
        "norm": weight.norm_1Q,
        "selector": weight.selector_1Q,
        "row_scale": sums_TP,
    }
    if config.deferred_norm:
        assert head_sums_TS is not None, "a deferred norm needs room for the heads' sums"
        operands["head_sums"] = head_sums_TS[None]
        _run(epilogues.qkv_deferred, config.gemm, residual_TD, weight.weight_QD, out_TQ, **operands)
    else:
        operands["head_scale"] = weight.head_dim
        _run(epilogues.qkv, config.gemm, residual_TD, weight.weight_QD, out_TQ, **operands)


def _project_split(
    config: SplitQkv,
    residual_TD: Tensor,
    sums_TP: Tensor,
    weight: QkvWeight,
    rotary_TH: Tensor,
    eps: float,
    out_TQ: Tensor,
) -> None:
    epilogues, split = layer_epilogues(residual_TD.shape[1], eps), weight.rotated_columns
    _run(
        epilogues.queries_keys,
        config.queries_keys,
        residual_TD,
        weight.weight_QD[:split],
        out_TQ[:, :split],
        rotary=rotary_TH,
        head_scale=weight.head_dim,
        norm=weight.norm_1Q[:, :split],
    )
    values_TV = out_TQ[:, split:]
    _run(epilogues.values, config.values, residual_TD, weight.weight_QD[split:], values_TV, row_scale=sums_TP)


def project_gate_up(
    config: GemmConfig, residual_TD: Tensor, sums_TP: Tensor, weight_GD: Tensor, eps: float, out_TI: Tensor
) -> None:
    """See `FusedGemms.project_gate_up`."""
    epilogue = layer_epilogues(residual_TD.shape[1], eps).gate_up
    _run(epilogue, config, residual_TD, weight_GD, None, activation=out_TI[None], row_scale=sums_TP)


def add_projection(
    config: GemmConfig, rows_TK: Tensor, weight_DK: Tensor, residual_TD: Tensor, sums_TP: Tensor
) -> None:
    """See `FusedGemms.add_projection`."""
    operands = {"residual": residual_TD[None], "sums": sums_TP[None]}
    _run(residual_epilogue(), config, rows_TK, weight_DK, residual_TD, **operands)


def _run(
    epilogue: HopperEpilogue,
    config: GemmConfig,
    rows_TK: Tensor,
    weight_NK: Tensor,
    out_TN: Tensor | None,
    **operands: Tensor | int,
) -> None:
    epilogue.gemm(
        rows_TK[None],
        weight_NK.t()[None],
        None if out_TN is None else out_TN[None],
        epi_args=operands,
        tile_M=config.tile_m,
        tile_N=config.tile_n,
        tile_K=config.tile_k,
        cluster_M=config.cluster_m,
        cluster_N=config.cluster_n,
        pingpong=config.pingpong,
        persistent=not config.early,  # an early kernel prepares the one tile that its block index names
        b_kn=True,
        post_init_attrs=attributes(config.early),
    )
