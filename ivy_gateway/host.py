"""This machine: the cores that this process may use, and whether there is a GPU. Knows nothing of servers."""

from __future__ import annotations

import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: microseconds a period, or "max", and the period
_GPU_DEVICE = Path("/dev/nvidiactl")


def num_cores() -> int:
    """Cores that this process may run on, or the fewer that a container's limit amounts to; at least one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        limit = int(quota) // int(period)
    except (OSError, ValueError):  # no such file, or no limit
        return cores
    return max(1, min(cores, limit))


def has_gpu() -> bool:
    """Whether NVIDIA's driver has a device here."""
    return _GPU_DEVICE.exists()
