"""Backends without their libraries: registry, refusals, how each library is called, and who is chosen."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import ClassVar

import numpy as np
import pytest
import torch

from rose_engine.attention import BACKENDS, choose_backend, load_backend
from rose_engine.attention import flashinfer as flashinfer_module
from rose_engine.attention.base import AttentionSpec, RaggedLayout
from rose_engine.attention.choice import (
    Attention,
    ShapeClass,
    fastest_attention,
    known_attention,
    single_attention,
)
from rose_engine.attention.flash import Fa2Backend, Fa3Backend
from rose_engine.attention.flash4 import Fa4Backend
from rose_engine.attention.flashinfer import FlashInferBackend
from rose_engine.attention.sdpa import SdpaBackend
from rose_engine.errors import EngineConfigError

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CAUSAL = AttentionSpec(4, 2, 64, 0.125, (-1, 0))
FULL = AttentionSpec(4, 4, 64, 0.125, (-1, -1))
LOCAL = AttentionSpec(4, 4, 64, 0.125, (64, 64))


def layout(*lengths: int) -> RaggedLayout:
    cu = torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32)
    return RaggedLayout(cu, max(lengths), len(lengths), lengths)


def heads(tokens: int, spec: AttentionSpec):
    shapes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(tokens, count, spec.head_dim) for count in shapes]


def test_every_registered_backend_loads_or_says_why():
    for name in BACKENDS:
        loaded = "neither loaded nor explained"
        try:
            loaded = load_backend(name).name
        except EngineConfigError as error:
            loaded = name if f"{name!r} cannot be loaded" in str(error) else str(error)
        assert loaded == name


@pytest.mark.parametrize("name", ["fa2", "triton"])
def test_gpu_backends_refuse_a_cpu(name):
    assert "CUDA" in load_backend(name).refusal(CAUSAL, BF16, CPU)
    with pytest.raises(EngineConfigError, match="CUDA"):
        choose_backend(name, [CAUSAL], BF16, CPU)


def test_flash_refusals_name_what_is_wrong(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    backend = Fa2Backend()
    assert backend.refusal(CAUSAL, BF16, cuda) is None
    assert backend.refusal(LOCAL, torch.float16, cuda) is None
    assert "float32" in backend.refusal(CAUSAL, torch.float32, cuda)
    assert "width 20" in backend.refusal(AttentionSpec(1, 1, 20, 1.0), BF16, cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0" in backend.refusal(CAUSAL, BF16, cuda)


class Recorded:
    """Stands for a library's function; remembers how it was called."""

    def __init__(self, result=None) -> None:
        self.args: tuple = ()
        self.kwargs: dict = {}
        self._result = result

    def __call__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args[0] if self._result is None else self._result


def bare(kind: type):
    """A backend whose library was never imported."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("spec", "causal", "window"),
    [(CAUSAL, True, (None, None)), (FULL, False, (None, None)), (LOCAL, False, (64, 64))],
)
def test_fa4_masks(spec, causal, window):
    backend = bare(Fa4Backend)
    backend._varlen = Recorded()
    q, k, v = heads(10, spec)
    assert backend.bind(layout(3, 7))(q, k, v, spec) is q
    assert backend._varlen.kwargs["causal"] is causal
    assert backend._varlen.kwargs["window_size"] == window
    assert backend._varlen.kwargs["max_seqlen_q"] == 7
    assert backend._varlen.kwargs["softmax_scale"] == spec.scale


def test_fa4_takes_the_output_of_a_pair():
    backend = bare(Fa4Backend)
    q, k, v = heads(3, FULL)
    backend._varlen = Recorded((q, None))
    assert backend.bind(layout(3))(q, k, v, FULL) is q


def test_fa3_arguments_are_in_the_operators_order():
    backend = bare(Fa3Backend)
    q, k, v = heads(10, CAUSAL)
    backend._forward = Recorded((q, None, None, None))
    bounds = layout(3, 7)
    assert backend.bind(bounds)(q, k, v, CAUSAL) is q
    args = backend._forward.args
    assert len(args) == 34
    assert args[:3] == (q, k, v)
    assert args[7] is bounds.cu_lengths  # cu_seqlens_q
    assert args[8] is bounds.cu_lengths  # cu_seqlens_k
    assert args[12:14] == (7, 7)  # max_seqlen_q, max_seqlen_k
    assert args[23:27] == (CAUSAL.scale, True, -1, 0)  # scale, causal, window
    assert args[31] == 1  # num_splits: sums in one order, whatever the batch
    assert "local" in backend.refusal(LOCAL, BF16, CPU)


class FakeWrapper:
    made: ClassVar[list[FakeWrapper]] = []

    def __init__(self, workspace, kv_layout, **kwargs) -> None:
        self.kwargs = kwargs
        self.plans: list[tuple[list[int], dict]] = []
        FakeWrapper.made.append(self)

    def plan(self, qo_indptr, kv_indptr, *counts, **kwargs) -> None:
        self.plans.append((qo_indptr.tolist(), kwargs))

    def run(self, q, k, v):
        return q + len(self.plans)


@pytest.fixture
def flashinfer(monkeypatch):
    FakeWrapper.made = []
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = FakeWrapper
    module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_module, "WORKSPACE_BYTES", 16)
    waits = []
    monkeypatch.setattr(
        flashinfer_module, "_record", lambda: types.SimpleNamespace(synchronize=lambda: waits.append(1))
    )
    return FlashInferBackend("fa2"), waits


def test_flashinfer_plans_before_it_runs_and_waits_for_its_last_copy(flashinfer):
    backend, waits = flashinfer
    bounds = layout(3, 7)
    q, k, v = heads(10, CAUSAL)
    attend = backend.bind(bounds)
    for count in (1, 2):
        backend.plan(bounds, bounds.cu_lengths.numpy(), CAUSAL, BF16, captured=True)
        torch.testing.assert_close(attend(q, k, v, CAUSAL), q + count)
    assert waits == [1]
    (wrapper,) = FakeWrapper.made
    assert wrapper.kwargs["use_cuda_graph"]
    assert len(wrapper.kwargs["qo_indptr_buf"]) == 3
    cu_lengths, plan = wrapper.plans[0]
    assert cu_lengths == [0, 3, 10]
    assert (plan["causal"], plan["window_left"], plan["sm_scale"]) == (True, -1, CAUSAL.scale)


def test_flashinfer_keeps_a_wrapper_for_each_captured_shape_and_one_for_the_rest(flashinfer):
    backend, _ = flashinfer
    shapes = [layout(3, 7), layout(4, 6, 1)]
    for bounds in shapes:
        backend.plan(bounds, bounds.cu_lengths.numpy(), FULL, BF16, captured=True)
    for bounds in (layout(5), layout(6, 6), layout(9)):
        backend.plan(bounds, bounds.cu_lengths.numpy(), FULL, BF16, captured=False)
    assert len(FakeWrapper.made) == 3
    assert "use_cuda_graph" not in FakeWrapper.made[-1].kwargs


def test_flashinfer_is_out_until_its_library_is_built(flashinfer, monkeypatch, tmp_path):
    backend, _ = flashinfer
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda", 0)
    built = types.SimpleNamespace(is_compiled=False)
    monkeypatch.setattr(flashinfer_module, "library", lambda *args: pytest.fail("it must not be asked"))
    assert "not built" in backend.refusal(CAUSAL, BF16, cuda)
    library = tmp_path / ".cache" / "flashinfer" / "0.6" / "prefill.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(flashinfer_module, "library", lambda *args: built)
    assert "not built" in backend.refusal(CAUSAL, BF16, cuda)
    built.is_compiled = True
    assert backend.refusal(CAUSAL, BF16, cuda) is None
    assert "right" in backend.refusal(LOCAL, BF16, cuda)
    assert "width 32" in backend.refusal(AttentionSpec(1, 1, 32, 1.0), BF16, cuda)


@pytest.mark.parametrize(
    ("lengths", "shape_class"),
    [
        ((128,), ShapeClass.FEW),
        ((64,) * 16, ShapeClass.FEW),
        ((512,) * 25, ShapeClass.MANY),
        ((2048,), ShapeClass.LONG),
        ((2048, 1, 1), ShapeClass.LONG),
    ],
)
def test_shape_classes(lengths, shape_class):
    assert ShapeClass.of(layout(*lengths)) is shape_class
    assert ShapeClass.of(layout(*shape_class.example)) is shape_class


class Named(SdpaBackend):
    def __init__(self, name: str, refuses: AttentionSpec | None = None) -> None:
        self.name = name
        self._refuses = refuses
        self.bound: list[AttentionSpec] = []

    def refusal(self, spec, dtype, device):
        return "not this one" if spec == self._refuses else None

    def bind(self, layout):
        attend = super().bind(layout)

        def noted(q, k, v, spec):
            self.bound.append(spec)
            return attend(q, k, v, spec)

        return noted


@pytest.fixture
def registry(monkeypatch):
    backends = {"a": Named("a"), "b": Named("b", refuses=LOCAL), "c": Named("c")}
    module = types.ModuleType("fake_backends")
    for name, backend in backends.items():
        setattr(module, name, lambda backend=backend: backend)
    monkeypatch.setitem(sys.modules, "fake_backends", module)
    table = {name: f"fake_backends:{name}" for name in backends} | {"gone": "no_such_library:Backend"}
    monkeypatch.setattr(importlib.import_module("rose_engine.attention"), "BACKENDS", table)
    monkeypatch.setattr(importlib.import_module("rose_engine.attention.choice"), "BACKENDS", table)
    return backends


def test_the_fastest_that_can_is_chosen_for_each_spec_and_class(registry, caplog):
    caplog.set_level("INFO")

    def measure(backend, spec, shape_class):
        if backend.name == "c" and shape_class is ShapeClass.LONG:
            raise RuntimeError("does not compile")
        return {"a": 3.0, "b": 1.0 if shape_class is ShapeClass.FEW else 9.0, "c": 2.0}[backend.name]

    attention = fastest_attention([CAUSAL, LOCAL], BF16, CPU, measure)
    assert attention.choices == {
        (CAUSAL, ShapeClass.FEW): "b",
        (CAUSAL, ShapeClass.LONG): "a",
        (CAUSAL, ShapeClass.MANY): "c",
        (LOCAL, ShapeClass.FEW): "c",
        (LOCAL, ShapeClass.LONG): "a",
        (LOCAL, ShapeClass.MANY): "c",
    }
    chosen = "b + c for few tokens; a for long sequences; c for many sequences"
    assert attention.describe() == f"{chosen} (the fastest measured on this device)"
    assert "no_such_library" in caplog.text
    assert "not this one" in caplog.text
    assert "does not compile" in caplog.text


@pytest.mark.parametrize(("specs", "tried"), [([CAUSAL], "ab"), ([CAUSAL, LOCAL], "abc")])
def test_a_backend_is_not_even_loaded_where_the_better_one_serves_every_spec(
    registry, monkeypatch, specs, tried
):
    choice = importlib.import_module("rose_engine.attention.choice")
    monkeypatch.setattr(choice, "OUTRUN_BY", {"c": "b"})  # which refuses LOCAL
    loaded = []
    monkeypatch.setattr(choice, "load_backend", lambda name: loaded.append(name) or registry[name])
    monkeypatch.delitem(choice.BACKENDS, "gone")
    attention = fastest_attention(specs, BF16, CPU, lambda backend, spec, shapes: -ord(backend.name))
    assert "".join(loaded) == tried
    assert set(attention.choices.values()) == ({"b"} if tried == "ab" else {"c"})


def test_a_better_backend_that_is_not_installed_keeps_none_from_being_tried(registry, monkeypatch):
    monkeypatch.setattr(importlib.import_module("rose_engine.attention.choice"), "OUTRUN_BY", {"c": "gone"})
    attention = fastest_attention([CAUSAL], BF16, CPU, lambda backend, spec, shapes: -ord(backend.name))
    assert set(attention.choices.values()) == {"c"}


def test_no_backend_at_all_is_an_error(registry):
    def measure(backend, spec, shape_class):
        raise RuntimeError("broken")

    with pytest.raises(EngineConfigError, match="no attention backend"):
        fastest_attention([CAUSAL], BF16, CPU, measure)


def test_calls_go_to_the_backend_of_their_spec_and_shape(registry):
    choices = {(spec, shapes): "a" for spec in (CAUSAL, FULL) for shapes in ShapeClass}
    choices[FULL, ShapeClass.FEW] = "b"
    attention = known_attention(choices, BF16, CPU)
    assert attention is not None
    bounds = layout(3, 7)
    attend = attention.bind(bounds)
    for spec in (CAUSAL, FULL):
        q, k, v = heads(10, spec)
        torch.testing.assert_close(attend(q, k, v, spec), SdpaBackend().bind(bounds)(q, k, v, spec))
    assert registry["a"].bound == [CAUSAL]
    assert registry["b"].bound == [FULL]
    assert not attention.plans


def test_choices_of_an_earlier_start_are_dropped_when_a_backend_is_gone_or_refuses(registry):
    assert known_attention({(CAUSAL, ShapeClass.FEW): "gone"}, BF16, CPU) is None
    assert known_attention({(LOCAL, ShapeClass.FEW): "b"}, BF16, CPU) is None
    assert known_attention({(CAUSAL, ShapeClass.FEW): "never registered"}, BF16, CPU) is None


def test_a_backend_asked_for_serves_everything(registry):
    choice = choose_backend("a", [CAUSAL, LOCAL], BF16, CPU)
    attention = single_attention(choice, [CAUSAL, LOCAL])
    assert set(attention.choices.values()) == {"a"}
    assert attention.describe() == "a (asked for)"


def test_only_planning_backends_of_the_class_are_planned(flashinfer):
    backend, _ = flashinfer
    choices = {(CAUSAL, shapes): "sdpa" for shapes in ShapeClass}
    choices[CAUSAL, ShapeClass.MANY] = "flashinfer-fa2"
    attention = Attention({"sdpa": SdpaBackend(), "flashinfer-fa2": backend}, choices, "test")
    assert attention.plans
    for lengths in ((5,), (512,) * 4):
        bounds = layout(*lengths)
        attention.plan(bounds, bounds.cu_lengths.numpy(), BF16, captured=True)
    (wrapper,) = FakeWrapper.made
    assert len(wrapper.plans) == 1
