"""A decoder stack with random weights in the Qwen3-0.6B shape, and batches for it: no checkpoint needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from rose_engine.attention.base import AttentionSpec, RaggedLayout
from rose_engine.layers.decoder import DecoderShape, LayerWeights, StackWeights
from rose_engine.layers.rotary import RotarySpec
from rose_engine.staging import DeviceBatch

QWEN3_06B = DecoderShape(
    width=1024,
    inner_width=3072,
    num_layers=28,
    vocabulary_size=151_669,
    attention=AttentionSpec(16, 8, 128, 128**-0.5, (-1, 0)),
    rotary=RotarySpec(128, 1e6, 8192),
    norm_eps=1e-6,
)
CUDA = torch.device("cuda")


def random_stack(num_layers: int = 28, vocabulary_size: int = 151_669, seed: int = 0) -> StackWeights:
    """bfloat16 weights on the CUDA device, at the scale of a model that was just initialised."""
    shape = dataclasses.replace(QWEN3_06B, num_layers=num_layers, vocabulary_size=vocabulary_size)
    generator = torch.Generator(CUDA).manual_seed(seed)
    return StackWeights(
        shape=shape,
        embedding_VD=_random(generator, vocabulary_size, shape.width),
        rotary_PH=shape.rotary.table(torch.bfloat16, CUDA),
        layers=tuple(_random_layer(generator, shape) for _ in range(num_layers)),
        final_norm_D=_random_norm(generator, shape.width),
    )


def in_float32(weights: StackWeights) -> StackWeights:
    """The same weights, for computing without rounding in between."""
    layers = tuple(
        LayerWeights(*(getattr(layer, field.name).float() for field in dataclasses.fields(layer)))
        for layer in weights.layers
    )
    return StackWeights(
        weights.shape,
        weights.embedding_VD.float(),
        weights.rotary_PH.float(),
        layers,
        weights.final_norm_D.float(),
    )


def random_batch(lengths: Sequence[int], vocabulary_size: int, seed: int = 0) -> DeviceBatch:
    """Sequences of `lengths` with random tokens, as a captured graph sees them."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    ids_T = torch.randint(0, vocabulary_size, (sum(lengths),), device=CUDA, generator=generator)
    positions_T = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]).to(CUDA)
    cu_lengths = torch.tensor([0, *lengths]).cumsum(0).to(CUDA, torch.int32)
    layout = RaggedLayout(cu_lengths, max(lengths), len(lengths), None)
    return DeviceBatch(ids_T.to(torch.int32), positions_T, None, layout)


def _random_layer(generator: torch.Generator, shape: DecoderShape) -> LayerWeights:
    spec, width, inner = shape.attention, shape.width, shape.inner_width
    return LayerWeights(
        qkv_QD=_random(generator, shape.qkv_width, width),
        qk_norm_2H=_random_norm(generator, 2, spec.head_dim),
        output_DV=_random(generator, width, spec.num_heads * spec.head_dim),
        gate_up_GD=_random(generator, 2 * inner, width),
        down_DI=_random(generator, width, inner),
    )


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(shape, device=CUDA, generator=generator) * 0.02).to(torch.bfloat16)


def _random_norm(generator: torch.Generator, *shape: int) -> Tensor:
    return (1 + 0.1 * torch.randn(shape, device=CUDA, generator=generator)).to(torch.bfloat16)
