"""How much memory a worker took so far, to be compared with its plan."""

from __future__ import annotations

import sys
from pathlib import Path


def rank_peak_bytes() -> int:
    """Of tensors on this rank's GPU; without one, of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return process_peak_bytes()


def engine_peak_bytes() -> int:
    """Taken of this engine's GPU now, by whomever; without one, the peak of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    return process_peak_bytes()


def process_peak_bytes() -> int:
    """The most host memory this process had, less mapped files; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = {
        name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines) if "kB" in value
    }
    return max(0, sizes.get("VmHWM", 0) - sizes.get("RssFile", 0))
