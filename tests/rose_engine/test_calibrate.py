"""The two points, the plan and the memory of a calibration, from made-up measurements."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.random_qwen3 import QWEN3_0_6B, random_qwen3
from rose_engine import cuda_runner
from rose_engine.attention import choose_backend
from rose_engine.attention.base import AttentionSpec, RaggedLayout
from rose_engine.attention.choice import ShapeClass
from rose_engine.calibrate import (
    PLAN_TOKENS,
    Calibration,
    CalibrationCache,
    Timing,
    cache_folder,
    fastest_plan,
    inflection_point,
    key_of,
    probe_lengths,
    sample,
    saturation_point,
)
from rose_engine.config import ResolvedConfig
from rose_engine.cuda_runner import Calibrator, decoder_of
from rose_engine.layers import decoder
from rose_engine.layers.decoder import DecoderPlan
from rose_engine.staging import DeviceBatch

SPECS = (AttentionSpec(16, 8, 128, 128**-0.5, (-1, 0)), AttentionSpec(4, 4, 64, 0.125, (64, 64)))
CALIBRATION = Calibration(
    3072,
    4096,
    {(spec, shapes): "fa2" for spec in SPECS for shapes in ShapeClass},
    DecoderPlan(((512, "folded"),), "plain"),
)


def linear(tokens: int, launch: float = 6.0, fixed: float = 1.0, per_token: float = 0.002) -> Timing:
    return Timing(fixed + per_token * tokens, launch)


def test_inflection_is_where_launching_stays_a_small_part():
    samples = {tokens: linear(tokens, launch=0.6) for tokens in (512, 1024, 2048, 3072, 4096)}
    assert inflection_point(samples, 16384) == 3072  # 1 + 0.002 * 2500 = 6, ten times the launch


def test_inflection_ignores_an_outlier_below():
    samples = {512: Timing(90, 6), 1024: Timing(30, 6), 2048: Timing(70, 6), 4096: Timing(140, 6)}
    assert inflection_point(samples, 16384) == 2048


def test_inflection_when_the_launch_always_weighs():
    assert inflection_point({256: Timing(1, 6), 512: Timing(2, 6)}, 16384) == 16384


def test_saturation_is_the_fewest_tokens_near_the_best_rate():
    samples = {tokens: linear(tokens) for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768)}
    best = 32768 / linear(32768).device_seconds
    found = saturation_point(samples)
    assert found / linear(found).device_seconds >= 0.95 * best
    assert all(t / linear(t).device_seconds < 0.95 * best for t in samples if t < found)


@pytest.mark.parametrize(
    ("tokens", "max_length", "lengths"),
    [(1024, 4096, (512, 512)), (256, 4096, (256,)), (300, 128, (128, 128, 44)), (1536, 512, (512,) * 3)],
)
def test_probe_lengths(tokens, max_length, lengths):
    assert probe_lengths(tokens, max_length) == lengths


def test_sampling_stays_within_the_batch_limit():
    asked = []

    def time(lengths):
        asked.append(sum(lengths))
        return Timing(1, 1)

    assert set(sample(time, 2048, 512)) == {256, 512, 1024, 1536, 2048}
    assert max(asked) == 2048
    assert set(sample(time, 100, 512)) == {100}


def test_what_was_timed_already_is_not_sampled_again():
    asked = []

    def time(lengths):
        asked.append(sum(lengths))
        return Timing(1, 1)

    samples = sample(time, 2048, 512, {512: Timing(7, 7), 2048: Timing(8, 8), 64: Timing(9, 9)})
    assert asked == [256, 1024, 1536]
    assert (samples[512], samples[2048]) == (Timing(7, 7), Timing(8, 8))
    assert 64 not in samples


def test_the_plan_takes_each_winner():
    seconds = {
        64: {"a": 1.0, "b": 2.0},
        128: {"a": 1.0, "b": 2.0},
        512: {"a": 3.0, "b": 2.0},
        1024: {"a": 1.0, "b": 2.0},
        2048: {"a": 9.0, "b": 2.0},
        4096: {"a": 9.0, "b": 2.0},
    }
    plan = fastest_plan(seconds)
    assert plan == DecoderPlan(((128, "a"), (512, "b"), (1024, "a")), "b")
    for tokens, paths in seconds.items():
        assert plan.path_for(tokens) == min(paths, key=paths.__getitem__)


def test_one_winner_everywhere_needs_no_bounds():
    assert fastest_plan({64: {"a": 1.0}, 128: {"a": 1.0}}) == DecoderPlan((), "a")


def test_a_calibration_survives_its_file(tmp_path):
    cache = CalibrationCache(tmp_path / "deep" / "er")
    assert cache.find("k") is None
    cache.store("k", CALIBRATION)
    assert cache.find("k") == CALIBRATION
    assert cache.find("other") is None
    assert [file.name for file in cache.folder.iterdir()] == ["k.json"]


def test_a_calibration_without_decoder_survives_too(tmp_path):
    cache = CalibrationCache(tmp_path)
    bert = Calibration(1, 2, {}, None, {256: 0.01, 512: 0.015})
    cache.store("k", bert)
    assert cache.find("k") == bert


def test_a_step_takes_what_the_next_larger_one_took():
    calibration = Calibration(1, 2, {}, None, {256: 0.01, 512: 0.015})
    assert [calibration.seconds_of(tokens) for tokens in (1, 256, 257, 512)] == [0.01, 0.01, 0.015, 0.015]
    assert calibration.seconds_of(1024) == pytest.approx(0.03)
    assert Calibration(1, 2, {}, None).seconds_of(5) is None


def test_a_file_without_step_times_is_still_a_calibration():
    values = CALIBRATION.to_json()
    del values["step_seconds"]
    assert Calibration.from_json(values).seconds_of(100) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", json.dumps({"inflection_tokens": 1})])
def test_a_damaged_file_is_no_calibration(tmp_path, damage, caplog):
    (tmp_path / "k.json").write_text(damage)
    assert CalibrationCache(tmp_path).find("k") is None
    assert "measuring again" in caplog.text


def test_a_folder_that_cannot_be_written_is_not_fatal(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    CalibrationCache(tmp_path / "file").store("k", CALIBRATION)
    assert "cannot be kept" in caplog.text


def test_keys_tell_models_and_cards_apart():
    keys = {key_of(facts, card) for facts in (["a"], ["b"], ["a", "b"]) for card in ("H200", "L4")}
    assert len(keys) == 6
    assert key_of(["a"], "H200") == key_of(["a"], "H200")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "bouquet" / "calibration"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-3:] == (".cache", "bouquet", "calibration")


def test_sampling_stops_where_memory_does():
    def time(lengths):
        if sum(lengths) > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Timing(1, 1)

    assert set(sample(time, 4096, 512)) == {256, 512, 1024}
    with pytest.raises(torch.OutOfMemoryError):
        sample(lambda lengths: time((9999,)), 4096, 512)


TINY = {
    **QWEN3_0_6B,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}


class FakeTimer:
    """Times by a formula: the folded path is fast up to 512 tokens, then broken or slow."""

    measured = 0
    broken = False
    stack = None

    def __init__(self, device, vocabulary_size) -> None:
        pass

    def random_batch(self, lengths):
        tokens = torch.zeros(sum(lengths), dtype=torch.int32)
        return DeviceBatch(tokens, tokens, tokens, FakeTimer.layout(lengths))

    @staticmethod
    def layout(lengths):
        return RaggedLayout(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths), 1, lengths)

    def attention(self, backend, spec, lengths, dtype):
        return 1e-6

    def forward(self, forward, batch):
        FakeTimer.measured += 1
        tokens = len(batch.token_ids_T)
        folded = FakeTimer.stack.plan.path_for(tokens) == "folded"
        if folded and FakeTimer.broken:
            raise RuntimeError("does not compile")
        per_token = 1e-6 if not folded else 5e-7 if tokens <= 512 else 2e-6
        return Timing(1e-3 + per_token * tokens, 3e-3)


@pytest.fixture
def calibrator(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_runner, "CudaTimer", FakeTimer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "made up")
    cpu = torch.device("cpu")
    model = random_qwen3(cpu, torch.float32, TINY).model
    FakeTimer.stack, FakeTimer.measured, FakeTimer.broken = decoder_of(model.trunk), 0, False
    choice = choose_backend("auto", model.facts.attention_specs, torch.float32, cpu)
    return lambda: Calibrator(model, ResolvedConfig(cpu, torch.float32, choice, 8192, 16, 1))


def test_a_first_start_measures_and_the_next_remembers(calibrator):
    first, attention = calibrator().find_or_measure()
    assert first.plan == DecoderPlan(((512, "folded"),), "plain")
    assert FakeTimer.stack.plan == first.plan
    paths, more_samples = 2 * len([t for t in PLAN_TOKENS if t <= 8192]), [1536, 3072, 6144]
    assert FakeTimer.measured == paths + len(more_samples)
    assert first.step_seconds[512] == pytest.approx(3e-3)  # the launch, of the path that was adopted
    assert first.step_seconds[8192] == pytest.approx(1e-3 + 1e-6 * 8192)
    assert first.inflection_tokens == 8192  # 1 ms + 1 us a token is never ten times 3 ms
    assert set(attention.choices.values()) == {"sdpa"}
    count = FakeTimer.measured
    FakeTimer.stack.adopt(DecoderPlan())
    again, attention = calibrator().find_or_measure()
    assert again == first
    assert FakeTimer.measured == count
    assert FakeTimer.stack.plan == first.plan
    assert "earlier start" in attention.describe()


def test_a_path_that_breaks_is_left_out(calibrator, caplog):
    FakeTimer.broken = True
    calibration, _ = calibrator().find_or_measure()
    assert calibration.plan == DecoderPlan((), "plain")
    assert "decoder path folded failed" in caplog.text


class FakeBuild:
    """A build of GEMMs or of kernels, noting when it was asked for."""

    def __init__(self, events: list[str], shape: object = None) -> None:
        self.shape, self._events = shape, events

    def wait(self) -> None:
        self._events.append("GEMMs awaited")

    def end(self) -> None:
        self._events.append("kernels reported")


@pytest.fixture
def events(calibrator, monkeypatch):
    """What a calibration in bfloat16 does with what is compiled beside it, and the paths that it loads."""
    events: list[str] = []
    stack = FakeTimer.stack

    def adopt(plan):
        events.append(f"adopted {plan.above}" if not plan.up_to else "adopted the plan")
        adopted(plan)

    adopted = stack.adopt
    monkeypatch.setattr(stack, "adopt", adopt)
    monkeypatch.setattr(cuda_runner, "PATHS", {"plain": "", "fused": ""})
    monkeypatch.setattr(decoder, "load_path", lambda name, weights: name)
    monkeypatch.setattr(cuda_runner, "gemm_builds", lambda shape, device: FakeBuild(events, shape))
    monkeypatch.setattr(cuda_runner, "triton_build", lambda shape, device: FakeBuild(events))
    return events


def test_the_fused_path_is_timed_when_its_gemms_are_compiled(calibrator, events):
    measuring = calibrator()
    measuring._settings = dataclasses.replace(measuring._settings, dtype=torch.bfloat16)
    calibration, _ = measuring.find_or_measure()
    assert events == [
        "adopted plain",
        "adopted fused",
        "GEMMs awaited",
        f"adopted {calibration.plan.above}",
        "kernels reported",
    ]


@pytest.mark.parametrize("path", ["plain", "fused"])
def test_a_known_plan_waits_only_for_gemms_that_it_launches(calibrator, events, path):
    measuring = calibrator()
    measuring._settings = dataclasses.replace(measuring._settings, dtype=torch.bfloat16)
    known = dataclasses.replace(CALIBRATION, attention={}, plan=DecoderPlan((), path))
    measuring._cache.store(measuring._key(), known)
    assert measuring.find_or_measure()[0] == known
    assert events == [f"adopted {path}", *(["GEMMs awaited"] if path == "fused" else [])]
