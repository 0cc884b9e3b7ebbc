"""A Qwen3-0.6B-shaped encoder with seeded random weights, and the same function in plain float32.

The reference shares no code with the engine but the parameters, taken before anything is folded into them.
T tokens of one sequence, D width, N query heads, M key / value heads, H head width, I inner width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.random_folders import SHAPES
from rose_engine.checkpoint import OwnsBuffers
from rose_engine.heads.embedding import EmbeddingHead
from rose_engine.models.base import Model
from rose_engine.models.registry import find_family
from rose_engine.module_chain import ModuleChain
from rose_engine.settings_file import SettingsFile

QWEN3_0_6B = SHAPES["qwen3-0.6b"].config


@dataclass(frozen=True, slots=True)
class RandomQwen3:
    """The engine's model, and the reference over the same weights."""

    model: Model
    reference: Reference


def random_qwen3(
    device: torch.device, dtype: torch.dtype, config: Mapping[str, Any] = QWEN3_0_6B, seed: int = 0
) -> RandomQwen3:
    """Build both; last-token pooling, unit length."""
    settings = SettingsFile(Path("random-qwen3") / "config.json", config)
    family = find_family("qwen3")
    facts = family.facts(settings)
    with torch.device("meta"):
        trunk = family.build(settings, facts)
    _fill(trunk, device, dtype, seed)
    weights = {name: p.detach().clone() for name, p in trunk.named_parameters()}
    for module in trunk.modules():
        if isinstance(module, OwnsBuffers):
            module.fill_buffers(device)
    head = EmbeddingHead(ModuleChain(pooling=("lasttoken",), normalize=True))
    return RandomQwen3(Model(trunk.eval(), head, facts), Reference(weights, dict(config)))


@torch.no_grad()
def _fill(trunk: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for part in trunk.modules():
        for name, parameter in part.named_parameters(recurse=False):
            values = torch.randn(parameter.shape, generator=generator, device=device)
            values = 1 + 0.1 * values if parameter.ndim == 1 else 0.02 * values
            part.register_parameter(name, nn.Parameter(values.to(dtype), requires_grad=False))


@dataclass(frozen=True, slots=True)
class Reference:
    """One sequence after the other, float32, every step written out."""

    weights: Mapping[str, Tensor]
    config: dict[str, Any]

    @torch.inference_mode()
    def rows(self, sequences: Sequence[Tensor]) -> Tensor:
        """Unit rows `[B, D]` of sequences of token ids `[length]`."""
        tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        try:
            return torch.stack([self._row(ids) for ids in sequences])
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32

    def _row(self, ids_T: Tensor) -> Tensor:
        x_TD = F.embedding(ids_T.long(), self.weights["decoder.tokens.weight"]).float()
        rotation = self._rotation(len(ids_T), x_TD.device)
        for index in range(self.config["num_hidden_layers"]):
            x_TD = self._layer(x_TD, f"decoder.layers.{index}.", rotation)
        return F.normalize(self._norm(x_TD[-1], self._weight("decoder.norm.weight")), dim=-1)

    def _layer(self, x_TD: Tensor, layer: str, rotation: tuple[Tensor, Tensor]) -> Tensor:
        h_TD = self._norm(x_TD, self._weight(layer + "attention_norm.weight"))
        x_TD = x_TD + self._attention(h_TD, layer + "attention.", rotation)
        h_TD = self._norm(x_TD, self._weight(layer + "feed_forward_norm.weight"))
        gate_TI, up_TI = (h_TD @ self._weight(layer + "feed_forward.gate_up.weight").T).chunk(2, dim=-1)
        return x_TD + (F.silu(gate_TI) * up_TI) @ self._weight(layer + "feed_forward.down.weight").T

    def _attention(self, h_TD: Tensor, block: str, rotation: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        N, M, H = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        qkv_THN = (h_TD @ self._weight(block + "qkv.weight").T).view(len(h_TD), -1, H)
        q_TNH, k_TMH, v_TMH = qkv_THN.split([N, M, M], dim=1)
        q_norm_H, k_norm_H = self._weight(block + "qk_norm.weight").chunk(2)
        q_NTH = _rotate(self._norm(q_TNH, q_norm_H).transpose(0, 1), rotation)
        k_NTH = _rotate(self._norm(k_TMH, k_norm_H).transpose(0, 1), rotation).repeat_interleave(N // M, 0)
        v_NTH = v_TMH.transpose(0, 1).repeat_interleave(N // M, 0)
        scores_NTT = q_NTH @ k_NTH.mT * H**-0.5
        future_TT = torch.ones(scores_NTT.shape[1:], dtype=torch.bool, device=h_TD.device).triu(1)
        weights_NTT = scores_NTT.masked_fill(future_TT, float("-inf")).softmax(-1)
        return (weights_NTT @ v_NTH).transpose(0, 1).flatten(1) @ self._weight(block + "output.weight").T

    def _rotation(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        H = self.config["head_dim"]
        rates = self.config["rope_theta"] ** -(torch.arange(0, H, 2, device=device) / H)
        angles = torch.outer(torch.arange(length, device=device), rates).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].float()


def _rotate(x_NTH: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos_TH, sin_TH = rotation
    first, second = x_NTH.chunk(2, dim=-1)
    return x_NTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time a forward pass can take: arithmetic or weights, whichever is slower."""

    flops_per_second: float = 790e12  # dense bf16 seen on an H200 with random data
    bytes_per_second: float = 4.3e12  # device copy seen there

    def seconds(self, lengths: Sequence[int], config: Mapping[str, Any] = QWEN3_0_6B) -> float:
        """For sequences of `lengths`, causal, bf16 weights read once."""
        D, inner, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        N, M = config["num_attention_heads"], config["num_key_value_heads"]
        layers = config["num_hidden_layers"]
        parameters = layers * (D * (N + 2 * M) * H + N * H * D + 3 * D * inner)
        attention = 2 * layers * N * H * sum(length * length for length in lengths)
        flops = 2 * parameters * sum(lengths) + attention
        return max(flops / self.flops_per_second, 2 * parameters / self.bytes_per_second)
