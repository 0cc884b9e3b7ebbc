"""Stamps cost nothing and leave nothing unless a folder is named; then each process writes its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = "from protos.stamps import stamp; stamp('first'); stamp('second'); print(stamp.__name__)"


def run(environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_a_folder_a_stamp_does_nothing():
    assert run({"BOUQUET_STAMPS": ""}) == "_nothing"


def test_a_process_writes_its_stamps_in_order_when_it_ends(tmp_path):
    assert run({"BOUQUET_STAMPS": str(tmp_path)}) == "_note"
    (file,) = tmp_path.iterdir()
    (first, began), (second, ended) = json.loads(file.read_text())
    assert (first, second) == ("first", "second")
    assert 0 < began <= ended
