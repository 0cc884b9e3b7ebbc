"""The reference backend against softmax written out, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from rose_engine import attention
from rose_engine.attention import choose_backend, load_backend
from rose_engine.attention.base import AttentionSpec
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.errors import EngineConfigError
from tests.rose_engine.samples import ragged, spans

CPU = torch.device("cpu")
WINDOWS = {
    "causal": (-1, 0),
    "full": (-1, -1),
    "local": (3, 3),
    "local-causal": (4, 0),
    "local-ahead": (0, 2),
    "ahead": (-1, 2),
}
LENGTHS = {
    "odd": [7, 13, 3],
    "one-token": [1, 1, 5, 1],
    "zero-length": [0, 4, 0, 0, 9, 0],
    "runs": [6, 6, 6, 2, 2, 6],
    "single": [31],
}


def spec_of(heads, kv_heads, window):
    return AttentionSpec(heads, kv_heads, head_dim=8, scale=0.3, window=window)


def random_qkv(spec, num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(num_tokens, n, spec.head_dim, generator=generator) for n in heads]


def sees(query, key, window):
    left, right = window
    return (left < 0 or query - key <= left) and (right < 0 or key - query <= right)


def naive(q_LNH, k_LMH, v_LMH, spec):
    """Softmax over what each token sees, in float64, one query head at a time."""
    length, group = len(q_LNH), spec.num_heads // spec.num_kv_heads
    visible = torch.tensor([[sees(i, j, spec.window) for j in range(length)] for i in range(length)])
    out = torch.empty(q_LNH.shape, dtype=torch.float64)
    for head in range(spec.num_heads):
        q, k, v = (
            x.double()[:, n] for x, n in ((q_LNH, head), (k_LMH, head // group), (v_LMH, head // group))
        )
        scores = (q @ k.T * spec.scale).masked_fill(~visible, float("-inf"))
        out[:, head] = scores.softmax(1) @ v
    return out.float()


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_equals_softmax_written_out(window, kv_heads, lengths, in_graph):
    spec = spec_of(4, kv_heads, window)
    q, k, v = random_qkv(spec, sum(lengths))
    out = SdpaBackend().bind(ragged(lengths, in_graph))(q, k, v, spec)
    assert out.shape == q.shape
    for span in spans(lengths):
        if span.stop > span.start:
            torch.testing.assert_close(
                out[span], naive(q[span], k[span], v[span], spec), atol=2e-6, rtol=1e-5
            )


def test_views_of_a_fused_projection_give_the_same():
    spec, lengths = spec_of(4, 4, (-1, -1)), [5, 5, 3]
    fused = torch.randn(sum(lengths), 3, 4, 8, generator=torch.Generator().manual_seed(1))
    attend = SdpaBackend().bind(ragged(lengths))
    apart = [part.contiguous() for part in fused.unbind(1)]
    torch.testing.assert_close(attend(*fused.unbind(1), spec), attend(*apart, spec))


def test_spare_tokens_never_reach_a_sequence():
    spec, lengths = spec_of(2, 2, (-1, -1)), [4, 0, 3]
    q, k, v = random_qkv(spec, 7)
    expected = SdpaBackend().bind(ragged(lengths))(q, k, v, spec)
    with_spare = [torch.cat([x, torch.full((5, 2, 8), 1e3)]) for x in (q, k, v)]
    for in_graph in (False, True):
        out = SdpaBackend().bind(ragged(lengths, in_graph))(*with_spare, spec)
        torch.testing.assert_close(out[:7], expected)


def test_unknown_backend_lists_what_is_known():
    with pytest.raises(EngineConfigError, match=r"'flesh' is unknown; known are auto, sdpa"):
        load_backend("flesh")


def test_a_library_that_is_absent_is_a_plain_error(monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "absent", "no_such_library_at_all:Backend")
    with pytest.raises(EngineConfigError, match=r"'absent' cannot be loaded: .*no_such_library_at_all"):
        load_backend("absent")


class Choosy(SdpaBackend):
    name = "choosy"

    def refusal(self, spec, dtype, device):
        return "head_dim 8 is too narrow" if spec.head_dim < 64 else None


@pytest.fixture
def choosy(monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "choosy", f"{__name__}:Choosy")
    monkeypatch.setitem(attention.PREFERENCES, "cpu", ("choosy", "sdpa"))


@pytest.mark.usefixtures("choosy")
def test_auto_takes_the_first_that_serves_and_says_why():
    narrow, wide = spec_of(1, 1, (-1, -1)), AttentionSpec(1, 1, 64, 1.0)
    assert choose_backend("auto", [wide], torch.float32, CPU).backend.name == "choosy"
    choice = choose_backend("auto", [wide, narrow], torch.float32, CPU)
    assert choice.backend.name == "sdpa"
    assert "head_dim 8 is too narrow" in str(choice)


@pytest.mark.usefixtures("choosy")
def test_a_backend_that_was_asked_for_must_serve():
    with pytest.raises(EngineConfigError, match=r"'choosy' cannot serve this model: head_dim 8"):
        choose_backend("choosy", [spec_of(1, 1, (-1, -1))], torch.float32, CPU)
