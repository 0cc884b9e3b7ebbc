"""What may not be loaded where, seen in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

GATEWAY = "ivy_gateway.app, ivy_gateway.local, ivy_gateway.pipeline"
ENGINE = "rose_engine.engine, rose_engine.models.registry"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (GATEWAY, ("torch", "transformers", "safetensors", "rose_engine", "tulip_server")),
        (ENGINE, ("grpc", "fastapi", "tokenizers", "protos", "tulip_server", "ivy_gateway")),
        (
            "protos.codec, protos.fingerprint",
            ("torch", "fastapi", "ivy_gateway", "tulip_server", "rose_engine"),
        ),
        ("tulip_server.batcher", ("torch", "grpc")),
        ("ivy_gateway.chunking", ("torch", "grpc", "fastapi")),
    ],
)
def test_importing_one_tier_does_not_load_another(modules, forbidden):
    script = f"import sys, {modules}; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded.intersection(forbidden)
