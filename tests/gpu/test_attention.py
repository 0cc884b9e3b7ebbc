"""Every attention backend that this machine has, against SDPA in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rose_engine.attention import BACKENDS, load_backend
from rose_engine.attention.base import AttentionSpec, RaggedLayout
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.errors import EngineConfigError

# Libraries of kernels warn about their own dependencies when they are imported.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MASKS = {"causal": (-1, 0), "full": (-1, -1), "local": (16, 16), "sliding": (32, 0)}
HEADS = {"grouped": (16, 8, 128), "alike": (12, 12, 64), "narrow": (12, 12, 32)}
LENGTHS = {
    "one token": (1,),
    "one-token sequences": (1,) * 17,
    "odd": (7, 131, 1, 300, 64, 63, 65, 2),
    "one long": (1537,),
    "full": (64, 64),
    "spare": (100, 0, 0, 28),
}
NAMES = [name for name in BACKENDS if name != "sdpa"]


def cuda_layout(lengths, in_graph: bool = False) -> RaggedLayout:
    cu = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32, device="cuda")
    return RaggedLayout(cu, max(lengths), len(lengths), None if in_graph else tuple(lengths))


def random_heads(spec: AttentionSpec, tokens: int):
    """q, k, v as views of packed rows, as a fused projection leaves them."""
    counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    packed = torch.randn(tokens, sum(counts), spec.head_dim, device="cuda", dtype=torch.bfloat16)
    return packed.split(counts, dim=1)


def able(name: str, spec: AttentionSpec):
    try:
        backend = load_backend(name)
    except EngineConfigError as error:
        pytest.skip(str(error))
    if refusal := backend.refusal(spec, torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip(refusal)
    return backend


def attend(backend, layout, spec, q, k, v, captured: bool = False):
    if isinstance(backend, FlashInferBackend):
        backend.plan(layout, layout.cu_lengths.cpu().numpy(), spec, torch.bfloat16, captured=captured)
    return backend.bind(layout)(q, k, v, spec)


def expected(layout: RaggedLayout, spec, q, k, v):
    return SdpaBackend().bind(layout)(q.float(), k.float(), v.float(), spec)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_as_sdpa(name, window, heads, lengths):
    spec = AttentionSpec(*heads, heads[2] ** -0.5, window)
    backend, layout = able(name, spec), cuda_layout(lengths)
    q, k, v = random_heads(spec, sum(lengths))
    out = attend(backend, layout, spec, q, k, v).float()
    torch.testing.assert_close(out, expected(layout, spec, q, k, v), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("window", [MASKS["causal"], MASKS["full"]], ids=["causal", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_serves_every_layout_of_its_shape(name, window):
    spec = AttentionSpec(16, 8, 128, 128**-0.5, window)
    backend = able(name, spec)
    q, k, v = random_heads(spec, 256)
    layout = RaggedLayout(cuda_layout((256, 0, 0, 0)).cu_lengths, 256, 4, None)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        attend(backend, layout, spec, q, k, v, captured=True)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        out = backend.bind(layout)(q, k, v, spec)
        graph.capture_end()
    for lengths in ((256, 0, 0, 0), (100, 56, 99, 1), (1, 1, 1, 253), (64, 0, 64, 128)):
        exact = cuda_layout(lengths)
        layout.cu_lengths.copy_(exact.cu_lengths)
        if isinstance(backend, FlashInferBackend):
            backend.plan(layout, exact.cu_lengths.cpu().numpy(), spec, torch.bfloat16, captured=True)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.float(), expected(exact, spec, q, k, v), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["fa2", "triton"])
def test_values_that_are_not_numbers_stay_in_their_sequence(name):
    spec = AttentionSpec(16, 8, 128, 128**-0.5, (-1, -1))
    backend, layout = able(name, spec), cuda_layout((37, 50, 41))
    q, k, v = random_heads(spec, 128)
    v[37:87] = float("nan")
    out = attend(backend, layout, spec, q, k, v)
    assert out[:37].isfinite().all()
    assert out[87:].isfinite().all()
