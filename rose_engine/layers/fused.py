"""The decoder stack in five launches a layer: qkv, attention, output, gate and up, down; the rest is fused.

The GEMM that writes the residual stores its rows' partial sums of squares too, and the next GEMM turns them
into the row scale: no norm kernel is left. Up to about a thousand tokens every kernel takes part in
programmatic dependent launch; beyond, cuBLAS does the two projections to the model width. The GEMMs come
from an optional toolchain, imported when the path is made.

Shapes: T packed tokens, D model width, N query heads, M key / value heads, H head width, Q = (N + 2M) * H,
V = N * H, I inner width, P partial sums of squares a row, S such sums over all heads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from rose_engine.attention.base import Attend, AttentionSpec, RaggedLayout
from rose_engine.errors import EngineConfigError
from rose_engine.kernels.cute import toolchain
from rose_engine.kernels.cute.config import GemmConfig, JoinedQkv
from rose_engine.kernels.cute.interface import FusedGemms, QkvWeight
from rose_engine.kernels.embed_gather import embed_gather
from rose_engine.kernels.ragged_attention import DeferredNorm, ragged_attention
from rose_engine.kernels.rms_norm import rms_norm, row_sum_of_squares
from rose_engine.layers.decoder import DecoderShape, LayerWeights, StackWeights
from rose_engine.layers.fused_config import H200_EARLY_CONFIGS, ConfigTable, LayerConfig
from rose_engine.staging import DeviceBatch


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """One layer as the fused GEMMs want it: partners side by side. Only qkv and gate-up are copies."""

    qkv: QkvWeight
    output_DV: Tensor
    gate_up_GD: Tensor  # rows alternate gate and up
    down_DI: Tensor


# The fused GEMMs of a stack. The first layer's qkv differs: its row sums come from the embedding, undivided.
PARTS = ("first_qkv", "qkv", "output", "gate_up", "down")


class FusedPath:
    """A `DecoderPath` over fused GEMMs, for one Hopper card and bfloat16.

    `gemms` and `configs` are for measurements and tests; as a rule the toolchain's and the measured ones.
    Raises `EngineConfigError`: no such card or toolchain, or a model that the configurations do not fit.
    """

    def __init__(
        self,
        weights: StackWeights,
        gemms: FusedGemms | None = None,
        configs: ConfigTable = H200_EARLY_CONFIGS,
    ) -> None:
        self._weights = weights
        self._gemms = gemms or _load_gemms(weights, configs)
        self._configs = configs
        self._rotary_PH = interleave_rotary(weights.rotary_PH)
        self._layers = tuple(prepare_layer(layer, weights.shape.attention) for layer in weights.layers)

    def config_for(self, num_tokens: int) -> LayerConfig:
        """The configuration that serves a batch of `num_tokens`."""
        return next(config for most, config in self._configs if num_tokens <= most)

    def with_configs(self, configs: ConfigTable) -> FusedPath:
        """The same path over the same prepared weights with other configurations."""
        other = copy.copy(self)
        other._configs = configs
        return other

    def launch(self, part: str, num_tokens: int) -> None:
        """Run one of the first layer's GEMMs (`PARTS`) over zeros: compiles what was never compiled."""
        weights, layer, config = self._weights, self._layers[0], self.config_for(num_tokens)
        layout = RaggedLayout(weights.embedding_VD.new_zeros(2, dtype=torch.int32), num_tokens, 1, None)
        forward = _Forward(config, weights.shape, self._gemms, layout, no_attention)
        residual_TD = weights.embedding_VD.new_zeros(num_tokens, weights.shape.width)

        def sums_of(producer: GemmConfig | None) -> Tensor:
            tiles = 1 if producer is None else producer.column_tiles(weights.shape.width)
            return residual_TD.new_ones(num_tokens, tiles, dtype=torch.float32)

        if part in ("first_qkv", "qkv"):
            sums_TP = sums_of(config.down if part == "qkv" else None)
            rotary_TH = self._rotary_PH[:1].expand(num_tokens, -1).contiguous()
            forward.project_qkv(layer, residual_TD, sums_TP, rotary_TH)
        elif part == "gate_up":
            forward.activation(layer, residual_TD, sums_of(config.output))
        else:
            weight = layer.output_DV if part == "output" else layer.down_DI
            rows = residual_TD.new_zeros(num_tokens, weight.shape[1])
            forward.add_projection(getattr(config, part), rows, weight, residual_TD)

    def __call__(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        weights, config = self._weights, self.config_for(batch.token_ids_T.shape[0])
        forward = _Forward(config, weights.shape, self._gemms, batch.layout, attend)
        pdl = config.dependent_launches
        residual_TD, sums_TP, rotary_TH = embed_gather(
            batch.token_ids_T, batch.position_ids_T, weights.embedding_VD, self._rotary_PH, pdl=pdl
        )
        for layer in self._layers:
            attended_TV = forward.attention(layer, residual_TD, sums_TP, rotary_TH)
            sums_TP = forward.add_projection(config.output, attended_TV, layer.output_DV, residual_TD)
            activated_TI = forward.activation(layer, residual_TD, sums_TP)
            sums_TP = forward.add_projection(config.down, activated_TI, layer.down_DI, residual_TD)
        return rms_norm(residual_TD, weights.final_norm_D, weights.shape.norm_eps, pdl=pdl)


def no_attention(*_: object) -> Tensor:
    """Stands where no attention is to be done."""
    raise AssertionError("attention was asked for: this is a bug")


def prepare_layer(layer: LayerWeights, spec: AttentionSpec) -> FusedLayer:
    """Reorder once, at load."""
    return FusedLayer(
        qkv=_prepare_qkv(layer, spec),
        output_DV=layer.output_DV,
        gate_up_GD=interleave_halves(layer.gate_up_GD),
        down_DI=layer.down_DI,
    )


def interleave_halves(rows: Tensor) -> Tensor:
    """Rows a1 a2 ... b1 b2 ... to a1 b1 a2 b2 ...: the members of a pair become neighbours."""
    first, second = rows.chunk(2)
    return torch.stack((first, second), dim=1).flatten(0, 1).contiguous()


def interleave_rotary(rotary_PH: Tensor) -> Tensor:
    """A table of rows `H / 2 cosines, H / 2 sines` to one of rows that alternate cos and sin."""
    return interleave_halves(rotary_PH.T).T.contiguous()


def _prepare_qkv(layer: LayerWeights, spec: AttentionSpec) -> QkvWeight:
    """Interleave the rotary halves of every q and k head; q.k stays the same."""
    rotated_heads, H = spec.num_heads + spec.num_kv_heads, spec.head_dim
    heads = layer.qkv_QD.view(-1, H, layer.qkv_QD.shape[1]).unbind()
    rows = [interleave_halves(head) for head in heads[:rotated_heads]] + list(heads[rotated_heads:])
    q_norm_H, k_norm_H = (interleave_halves(norm_H) for norm_H in layer.qk_norm_2H.float())
    ones = torch.ones(spec.num_kv_heads * H, device=q_norm_H.device)
    norms = (q_norm_H.repeat(spec.num_heads), k_norm_H.repeat(spec.num_kv_heads), ones)
    selector = torch.ones(rotated_heads * H, device=ones.device), torch.zeros_like(ones)
    return QkvWeight(
        weight_QD=torch.cat(rows),
        norm_1Q=torch.cat(norms)[None],
        selector_1Q=torch.cat(selector)[None],
        head_dim=H,
        rotated_columns=rotated_heads * H,
    )


def _load_gemms(weights: StackWeights, configs: ConfigTable) -> FusedGemms:
    why = _refusal(weights, configs)
    try:
        if why is None:
            return toolchain.load_gemms()
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        why = str(error)
    raise EngineConfigError(f"the fused path cannot run this model here: {why}")


def _refusal(weights: StackWeights, configs: ConfigTable) -> str | None:
    embedding_VD, head_dim = weights.embedding_VD, weights.shape.attention.head_dim
    if embedding_VD.dtype is not torch.bfloat16:
        return f"it computes in bfloat16, not {embedding_VD.dtype}"
    misfit = (config.qkv.refusal(head_dim) for _, config in configs)
    return toolchain.refusal(embedding_VD.device) or next(filter(None, misfit), None)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """What stays the same from layer to layer of one forward pass, and the parts of a layer."""

    config: LayerConfig
    shape: DecoderShape
    gemms: FusedGemms
    layout: RaggedLayout
    attend: Attend

    def attention(self, layer: FusedLayer, residual_TD: Tensor, sums_TP: Tensor, rotary_TH: Tensor) -> Tensor:
        """Attention's output before its projection, `[T, N * H]`."""
        spec = self.shape.attention
        qkv_TQ, head_sums_TS = self.project_qkv(layer, residual_TD, sums_TP, rotary_TH)
        heads = qkv_TQ.view(len(qkv_TQ), -1, spec.head_dim)
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q_TNH, k_TMH, v_TMH = torch.split(heads, counts, dim=1)
        return self._attend(q_TNH, k_TMH, v_TMH, head_sums_TS).flatten(1)

    def project_qkv(
        self, layer: FusedLayer, residual_TD: Tensor, sums_TP: Tensor, rotary_TH: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Packed q, k and v `[T, Q]`; with a deferred norm the heads' sums of squares too."""
        qkv_TQ = residual_TD.new_empty(len(residual_TD), self.shape.qkv_width)
        head_sums_TS = self._head_sums(qkv_TQ)
        self.gemms.project_qkv(
            self.config.qkv,
            residual_TD,
            sums_TP,
            layer.qkv,
            rotary_TH,
            self.shape.norm_eps,
            qkv_TQ,
            head_sums_TS,
        )
        return qkv_TQ, head_sums_TS

    def _head_sums(self, qkv_TQ: Tensor) -> Tensor | None:
        qkv = self.config.qkv
        if not (isinstance(qkv, JoinedQkv) and qkv.deferred_norm):
            return None
        tiles = qkv.gemm.column_tiles(qkv_TQ.shape[1])
        return qkv_TQ.new_empty(len(qkv_TQ), tiles, dtype=torch.float32)

    def _attend(self, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor, head_sums_TS: Tensor | None) -> Tensor:
        spec, tile = self.shape.attention, self.config.attention
        if tile is None:
            return self.attend(q_TNH, k_TMH, v_TMH, spec)
        return ragged_attention(
            q_TNH,
            k_TMH,
            v_TMH,
            self.layout.cu_lengths,
            self.layout.max_length,
            spec.scale,
            spec.causal,
            tile=tile,
            pdl=self.config.dependent_launches,
            norm=None if head_sums_TS is None else DeferredNorm(head_sums_TS, self.shape.norm_eps),
        )

    def activation(self, layer: FusedLayer, residual_TD: Tensor, sums_TP: Tensor) -> Tensor:
        """The feed-forward block up to its last projection, `[T, I]`."""
        activated_TI = residual_TD.new_empty(len(residual_TD), self.shape.inner_width)
        self.gemms.project_gate_up(
            self.config.gate_up, residual_TD, sums_TP, layer.gate_up_GD, self.shape.norm_eps, activated_TI
        )
        return activated_TI

    def add_projection(
        self, config: GemmConfig | None, rows_TK: Tensor, weight_DK: Tensor, residual_TD: Tensor
    ) -> Tensor:
        """Add a projection to the residual in place; its rows' partial sums of squares, `[T, P]`."""
        if config is None:
            residual_TD.addmm_(rows_TK, weight_DK.T)
            return row_sum_of_squares(residual_TD)[:, None]
        T, D = residual_TD.shape
        sums_TP = residual_TD.new_empty(T, config.column_tiles(D), dtype=torch.float32)
        self.gemms.add_projection(config, rows_TK, weight_DK, residual_TD, sums_TP)
        return sums_TP
