"""gRPC reads its settings when it is imported: they must be there by then, whichever way a tier starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            seen.append(os.environ.get("GRPC_EXPERIMENTS"))

seen = []
os.environ.pop("GRPC_EXPERIMENTS", None)
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
import protos
sys.exit(seen != [protos.GRPC_EXPERIMENTS])
"""


@pytest.mark.parametrize("module", ["ivy_gateway.app", "tulip_server.server"])
def test_they_are_set_before_grpc_is_imported(module: str) -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT, module]).returncode == 0
