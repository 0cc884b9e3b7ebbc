"""What a server holds: resident bytes of its processes, and of the card."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from benchmarks.processes import descendants


def host_mib(pid: int) -> int:
    """Resident memory of the tree, shared pages counted once where the kernel says how (PSS)."""
    total = 0
    for member in descendants(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total // 1024


def card_mib() -> int | None:
    """Memory in use on all cards together, by nvidia-smi; `None` without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(int(line) for line in done.stdout.split()) if done.returncode == 0 else None
