"""What a server holds: resident bytes of its processes, and of the card."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # Behind the name, which may hold anything, come the state and the parent.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    tree, i = [pid], 0
    while i < len(tree):
        tree += parents.get(tree[i], [])
        i += 1
    return tree


def host_mib(pid: int) -> int:
    """Resident memory of the tree, shared pages counted once where the kernel says how (PSS)."""
    total = 0
    for member in process_tree(pid):
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
