"""Seconds from process start until a server answers, on a folder of this machine: first start and later ones.

    python -m benchmarks.startup FOLDER [--runs 2] [--device auto]

"First" means an empty cache folder: kernels are compiled and the device is measured. The other runs find
both on disk. Ready is when the server writes its ready file, which is after it listens.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report

TIMEOUT_SECONDS = 180.0


def seconds_to_ready(folder: Path, device: str, cache: Path) -> float:
    """Start a server, wait until it is ready, stop it."""
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        command = [sys.executable, "-m", "tulip_server", "--model", str(folder), "--device", device]
        began = time.perf_counter()
        server = subprocess.Popen(
            [*command, "--port", "0", "--ready-file", str(ready)],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )
        try:
            while not ready.exists():
                if server.poll() is not None or time.perf_counter() - began > TIMEOUT_SECONDS:
                    raise SystemExit(f"the server was not ready after {time.perf_counter() - began:.0f} s")
                time.sleep(0.02)
            return time.perf_counter() - began
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def main() -> None:
    """Measure, print, write `results/startup.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        seconds = [seconds_to_ready(args.folder, args.device, Path(cache)) for _ in range(args.runs)]
    print(
        report.table(
            ("start", "seconds"),
            [("first" if not i else f"again {i}", f"{s:.1f}") for i, s in enumerate(seconds)],
        )
    )
    report.write_json("startup", {"first_seconds": seconds[0], "later_seconds": seconds[1:]}, args.out)


if __name__ == "__main__":
    main()
