"""What "auto" becomes, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rose_engine.attention.base import AttentionSpec
from rose_engine.config import EngineConfig, resolve
from rose_engine.errors import EngineConfigError

SPECS = (AttentionSpec(2, 2, 8, 1.0),)


def resolved(max_length=512, **settings):
    return resolve(EngineConfig(Path("model"), **{"device": "cpu", **settings}), max_length, SPECS)


def test_the_cpu_computes_in_float32():
    config = resolved()
    assert (config.device, config.dtype) == (torch.device("cpu"), torch.float32)
    assert config.attention.backend.name == "sdpa"
    assert config.threads == torch.get_num_threads()


def test_auto_device_is_what_the_machine_has():
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolved(device="auto").device.type == kind


def test_what_was_asked_for_is_kept():
    config = resolved(dtype="bfloat16", max_batch_tokens=600, max_batch_sequences=3, threads=2)
    assert config.dtype == torch.bfloat16
    assert (config.max_batch_tokens, config.max_batch_sequences, config.threads) == (600, 3, 2)


def test_every_single_sequence_fits_a_batch():
    assert resolved(max_length=10_000).max_batch_tokens == 10_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device 'tpu' is unknown; known are auto, cpu, cuda"),
        ({"device": "cuda:x"}, "device 'cuda:x' is unknown"),
        ({"device": "cuda:99"}, "device 'cuda:99': .* CUDA devices on this machine"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown; known are auto, float32, bfloat16, float16"),
        ({"dtype": "float16", "device": "cpu"}, "dtype 'float16' is for CUDA devices"),
        ({"attention": "magic"}, "attention backend 'magic' is unknown"),
        ({"max_batch_tokens": 511}, "max_batch_tokens 511: a single sequence may have 512 tokens"),
        ({"max_batch_sequences": 0}, "max_batch_sequences 0: must be at least 1"),
        ({"threads": -1}, "threads -1: must be at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_named(settings, message):
    with pytest.raises(EngineConfigError, match=message):
        resolved(**settings)


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, "rose_engine.config"):
        resolved()
    assert "device cpu, dtype torch.float32, attention sdpa" in caplog.text
