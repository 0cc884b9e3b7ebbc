"""A bias on attention's scores: added by SDPA under every window, refused by all other backends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rose_engine.attention import choose_backend
from rose_engine.attention.base import NO_BIAS, AttentionBackend, AttentionSpec, RaggedLayout, with_bias
from rose_engine.attention.flash import Fa2Backend, Fa3Backend
from rose_engine.attention.flash4 import Fa4Backend
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.attention.triton import TritonBackend

WINDOWS = [(-1, -1), (-1, 0), (3, 2)]
BIASED = AttentionSpec(3, 3, 8, 0.3, biased=True)


@dataclass(frozen=True)
class PairBias:
    """One value for every head and pair of packed tokens, so that none can stand in for another."""

    of_pairs_NTT: Tensor

    def between(self, start: int, count: int, length: int) -> Tensor:
        blocks = [slice(start + i * length, start + (i + 1) * length) for i in range(count)]
        return torch.stack([self.of_pairs_NTT[:, block, block] for block in blocks])


def layout(lengths: tuple[int, ...], *, known: bool) -> RaggedLayout:
    bounds = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32)
    return RaggedLayout(bounds, max(lengths), len(lengths), lengths if known else None)


def written_out(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bias: PairBias, lengths) -> Tensor:
    """Softmax of scaled scores plus bias over the keys of the same sequence that the window shows."""
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead_TT = torch.arange(len(q))[None, :] - torch.arange(len(q))[:, None]
    left, right = spec.window
    visible_TT = sequence_T[:, None] == sequence_T[None, :]
    visible_TT &= (left < 0) | (ahead_TT >= -left)
    visible_TT &= (right < 0) | (ahead_TT <= right)
    scores_NTT = torch.einsum("inh,jnh->nij", q, k) * spec.scale + bias.of_pairs_NTT
    weights_NTT = scores_NTT.masked_fill(~visible_TT, float("-inf")).softmax(-1)
    return torch.einsum("nij,jnh->inh", weights_NTT, v)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on the device"])
@pytest.mark.parametrize("lengths", [(1,), (7,), (4, 4, 1, 9), (1, 1, 6)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_sdpa_adds_a_bias(window: tuple[int, int], lengths: tuple[int, ...], known: bool):
    generator = torch.Generator().manual_seed(3)
    total, spec = sum(lengths), replace(BIASED, window=window)
    q, k, v = torch.randn(3, total, spec.num_heads, spec.head_dim, generator=generator)
    bias = PairBias(torch.randn(spec.num_heads, total, total, generator=generator) * 2)
    attend = with_bias(SdpaBackend().bind(layout(lengths, known=known)), bias)
    assert torch.allclose(attend(q, k, v, spec), written_out(q, k, v, spec, bias, lengths), atol=1e-6)


@pytest.mark.parametrize("kind", [Fa2Backend, Fa3Backend, Fa4Backend, FlashInferBackend, TritonBackend])
def test_other_backends_refuse(kind: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch):
    backend = object.__new__(kind)  # without its library
    backend.kernels = "fa2"  # FlashInfer's
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    spec = replace(BIASED, head_dim=64)
    assert backend.refusal(spec, torch.bfloat16, cuda) == NO_BIAS


def test_auto_falls_back_on_sdpa(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    choice = choose_backend("auto", [replace(BIASED, head_dim=64)], torch.bfloat16, torch.device("cuda", 0))
    assert choice.backend.name == "sdpa"
    assert NO_BIAS in choice.why


def test_a_bias_needs_a_spec_that_says_so():
    bias = PairBias(torch.zeros(3, 2, 2))
    attend = with_bias(SdpaBackend().bind(layout((2,), known=True)), bias)
    heads = torch.zeros(2, 3, 8)
    with pytest.raises(AssertionError, match="biased"):
        attend(heads, heads, heads, replace(BIASED, biased=False))


def test_specs_are_told_apart_by_being_biased_and_not_by_the_bias():
    carrying = replace(BIASED, bias=PairBias(torch.zeros(3, 2, 2)))
    assert carrying == BIASED
    assert hash(carrying) == hash(BIASED)
    assert replace(BIASED, biased=False) != BIASED
