"""The pre-norm gated decoder stack: weights, ways to run them, and the plan that picks one by token count.

A path runs the whole stack, because the best ones hand results from layer to layer in forms of their own. All
paths compute the same function from the same weights; they differ in launches and memory traffic. Knows no
attention backend (`attend` comes with each call), no family, no checkpoint names.

Shapes: T packed tokens, D model width, N query heads, M key / value heads, H head width, Q = (N + 2M) * H,
I inner width, V vocabulary entries, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rose_engine.attention.base import Attend, AttentionSpec
from rose_engine.errors import EngineConfigError
from rose_engine.kernels.embed_gather import embed_gather
from rose_engine.kernels.qk_norm_rotary import qk_norm_rotary
from rose_engine.kernels.rms_norm import add_rms_norm, rms_norm
from rose_engine.kernels.silu_mul import silu_mul
from rose_engine.layers.gated import GatedFeedForward
from rose_engine.layers.norm import RMSNorm
from rose_engine.layers.rotary import RotarySpec
from rose_engine.staging import DeviceBatch


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers of a decoder stack."""

    width: int  # D
    inner_width: int  # I
    num_layers: int
    vocabulary_size: int  # V
    attention: AttentionSpec
    rotary: RotarySpec
    norm_eps: float

    @property
    def qkv_width(self) -> int:
        """Q."""
        return (self.attention.num_heads + 2 * self.attention.num_kv_heads) * self.attention.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's matrices. Each RMSNorm's weight is already folded into the matrix that follows the norm."""

    qkv_QD: Tensor  # query heads, key heads, value heads
    qk_norm_2H: Tensor  # norm weight of the query heads, then of the key heads
    output_DV: Tensor  # [D, N * H]
    gate_up_GD: Tensor  # [2I, D]: gates, then ups
    down_DI: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StackWeights:
    """Everything a path needs, on the device."""

    shape: DecoderShape
    embedding_VD: Tensor
    rotary_PH: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_D: Tensor


class DecoderPath(Protocol):
    """One way to run a decoder stack. Made from `StackWeights`; what it prepares from them it owns."""

    def __call__(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        ...


class PlainPath:
    """Matrix products by cuBLAS and one fused kernel for everything between two of them.

    The best path without fused matrix products from about a thousand tokens on, and the reference.
    """

    def __init__(self, weights: StackWeights) -> None:
        self._weights = weights

    def __call__(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        weights, eps = self._weights, self._weights.shape.norm_eps
        residual_TD, rotary_TH = _embed(weights, batch)
        normalised_TD = rms_norm(residual_TD, None, eps)
        for layer, next_norm_D in zip(weights.layers, _next_norms(weights), strict=True):
            qkv_TQ = functional.linear(normalised_TD, layer.qkv_QD)
            _norm_and_rotate(weights.shape, layer, qkv_TQ, rotary_TH)
            attended_TV = _attend(weights.shape, qkv_TQ, attend)
            update_TD = functional.linear(attended_TV, layer.output_DV)
            normalised_TD = add_rms_norm(update_TD, residual_TD, None, eps)
            activated_TI = silu_mul(functional.linear(normalised_TD, layer.gate_up_GD))
            update_TD = functional.linear(activated_TI, layer.down_DI)
            normalised_TD = add_rms_norm(update_TD, residual_TD, next_norm_D, eps)
        return normalised_TD


class FoldedPath:
    """As `PlainPath`, without norm kernels: two kernels and four matrix products a layer, besides attention.

    Matrix products read the residual as it is, cuBLAS adds their results to it in place (beta = 1), and the
    rotary and SiLU kernels apply each row's inverse root mean square. Fewer launches, heavier kernels: worth
    it up to some hundred tokens.
    """

    def __init__(self, weights: StackWeights) -> None:
        if weights.embedding_VD.dtype == torch.float16:
            raise EngineConfigError("the folded path's products of rows without norm overflow float16")
        self._weights = weights

    def __call__(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        weights, eps = self._weights, self._weights.shape.norm_eps
        residual_TD, rotary_TH = _embed(weights, batch)
        for layer in weights.layers:
            qkv_TQ = functional.linear(residual_TD, layer.qkv_QD)
            _norm_and_rotate(weights.shape, layer, qkv_TQ, rotary_TH, residual_TD)
            residual_TD.addmm_(_attend(weights.shape, qkv_TQ, attend), layer.output_DV.t())
            gate_up_TG = functional.linear(residual_TD, layer.gate_up_GD)
            residual_TD.addmm_(silu_mul(gate_up_TG, residual_TD, eps), layer.down_DI.t())
        return rms_norm(residual_TD, weights.final_norm_D, eps)


def _embed(weights: StackWeights, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
    """The residual `[T, D]` before the first layer, and each token's rotary row `[T, H]`."""
    residual_TD, _, rotary_TH = embed_gather(
        batch.token_ids_T, batch.position_ids_T, weights.embedding_VD, weights.rotary_PH
    )
    return residual_TD, rotary_TH


def _next_norms(weights: StackWeights) -> tuple[Tensor | None, ...]:
    """The norm weight after each layer: none (it is folded), and the final norm's after the last."""
    return (*[None] * (len(weights.layers) - 1), weights.final_norm_D)


def _norm_and_rotate(
    shape: DecoderShape,
    layer: LayerWeights,
    qkv_TQ: Tensor,
    rotary_TH: Tensor,
    residual_TD: Tensor | None = None,
) -> None:
    spec = shape.attention
    qk_norm_rotary(
        qkv_TQ, layer.qk_norm_2H, rotary_TH, spec.num_heads, spec.num_kv_heads, shape.norm_eps, residual_TD
    )


def _attend(shape: DecoderShape, qkv_TQ: Tensor, attend: Attend) -> Tensor:
    """Attention on packed rows, `[T, N * H]`."""
    spec = shape.attention
    heads = qkv_TQ.view(len(qkv_TQ), -1, spec.head_dim)
    q_TNH, k_TMH, v_TMH = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    return attend(q_TNH, k_TMH, v_TMH, spec).flatten(1)


# name -> "module:Class"; the class takes StackWeights and is a DecoderPath
PATHS: dict[str, str] = {
    "plain": "rose_engine.layers.decoder:PlainPath",
    "folded": "rose_engine.layers.decoder:FoldedPath",
    "fused": "rose_engine.layers.fused:FusedPath",
}


def load_path(name: str, weights: StackWeights) -> DecoderPath:
    """The path called `name`, ready to run.

    Raises `EngineConfigError`: unknown, its library cannot be imported, or it cannot run these weights.
    """
    if name not in PATHS:
        raise EngineConfigError(f"decoder path {name!r} is unknown; known are {', '.join(PATHS)}")
    module, _, attribute = PATHS[name].partition(":")
    try:
        factory: Callable[[StackWeights], DecoderPath] = getattr(import_module(module), attribute)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        raise EngineConfigError(f"decoder path {name!r} cannot be loaded: {error}") from error
    return factory(weights)


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """Which path runs a batch, by its token count; found by measuring, per model and card."""

    up_to: tuple[tuple[int, str], ...] = ()  # (largest token count, path), counts ascending
    above: str = "plain"

    def __post_init__(self) -> None:
        bounds = [bound for bound, _ in self.up_to]
        assert all(low < high for low, high in pairwise(bounds)), f"up_to: {bounds} must ascend"

    @property
    def paths(self) -> frozenset[str]:
        """Every path that some batch takes."""
        return frozenset(path for _, path in self.up_to) | {self.above}

    def path_for(self, num_tokens: int) -> str:
        """The path for a batch of `num_tokens`."""
        return next((path for bound, path in self.up_to if num_tokens <= bound), self.above)


# A Qwen3-0.6B on an H200, folded against plain: 13 % faster at 128 tokens, 6 % at 512, slower at 12,800.
UNMEASURED_CUDA_PLAN = DecoderPlan(up_to=((1024, "folded"),))


def unmeasured_plan(dtype: torch.dtype, device: torch.device) -> DecoderPlan:
    """The plan until someone has measured a better one."""
    folds = device.type == "cuda" and dtype != torch.float16
    return UNMEASURED_CUDA_PLAN if folds else DecoderPlan()


class HeadNorms(nn.Module):
    """RMSNorm weights of query and key heads, one after the other, `[2H]`."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * head_dim))


class DecoderAttention(nn.Module):
    """The attention block's parameters."""

    def __init__(self, width: int, qkv_width: int, spec: AttentionSpec) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, qkv_width, bias=False)
        self.qk_norm = HeadNorms(spec.head_dim)
        self.output = nn.Linear(spec.num_heads * spec.head_dim, width, bias=False)


class DecoderLayer(nn.Module):
    """One block's parameters, under the names that checkpoints are loaded by."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, shape.norm_eps)
        self.attention = DecoderAttention(shape.width, shape.qkv_width, shape.attention)
        self.feed_forward_norm = RMSNorm(shape.width, shape.norm_eps)
        self.feed_forward = GatedFeedForward(shape.width, shape.inner_width)

    def folded(self) -> LayerWeights:
        """The matrices, with the norms' weights folded into them in place: nothing is stored twice."""
        qkv_QD, gate_up_GD = self.attention.qkv.weight, self.feed_forward.gate_up.weight
        self.attention_norm.fold_into(qkv_QD)
        self.feed_forward_norm.fold_into(gate_up_GD)
        return LayerWeights(
            qkv_QD=qkv_QD,
            qk_norm_2H=self.attention.qk_norm.weight.view(2, -1),
            output_DV=self.attention.output.weight,
            gate_up_GD=gate_up_GD,
            down_DI=self.feed_forward.down.weight,
        )


class DecoderStack(nn.Module):
    """Embedding, layers, final norm; runs each batch by the path that its plan names."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary_size, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self._weights: StackWeights | None = None
        self._plan = DecoderPlan()
        self._paths: dict[str, DecoderPath] = {}

    def fill_buffers(self, device: torch.device) -> None:
        """Fold the loaded weights, compute the rotary table, and adopt the plan for this dtype and device."""
        dtype = self.tokens.weight.dtype
        self._weights = StackWeights(
            shape=self.shape,
            embedding_VD=self.tokens.weight,
            rotary_PH=self.shape.rotary.table(dtype, device),
            layers=tuple(layer.folded() for layer in cast("Iterable[DecoderLayer]", self.layers)),
            final_norm_D=self.norm.weight,
        )
        self.adopt(unmeasured_plan(dtype, device))

    @property
    def plan(self) -> DecoderPlan:
        """The plan in use."""
        return self._plan

    def adopt(self, plan: DecoderPlan) -> None:
        """Run by `plan` from now on: make the paths it needs, drop those it does not.

        Raises `EngineConfigError`, and changes nothing, when one of its paths cannot be had.
        """
        assert self._weights is not None, "a plan needs loaded weights"
        kept = {name: path for name, path in self._paths.items() if name in plan.paths}
        made = {name: load_path(name, self._weights) for name in sorted(plan.paths - kept.keys())}
        self._plan, self._paths = plan, kept | made

    def forward(self, batch: DeviceBatch, attend: Attend) -> Tensor:
        """Hidden states `[T, D]` of the last layer, after the final norm."""
        path = self._paths[self._plan.path_for(batch.token_ids_T.shape[0])]
        return path(batch, attend)
