"""The one tuning of memory that has a clear effect on transfers.

Without it glibc maps and unmaps the buffer of each frame and the kernel's page faults eat a third of the throughput
(docs/performance: 1.9 to 2.4 GB/s untuned, 3.2 to 3.5 tuned, raw frames of 1 MiB on loopback).
"""

from __future__ import annotations

import ctypes
import os

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

_MMAP_THRESHOLDS_BYTES = (1 << 30, 32 << 20)  # before glibc 2.35 anything over 32 MiB is refused
_TRIM_THRESHOLD_BYTES = 2**31 - 1  # give nothing back between two frames
_TOP_PAD_BYTES = 64 << 20  # grow by many frames at a time


def tune_malloc() -> bool:
    """Keeps freed frame buffers in the process; whether the C library took it (only glibc does).

    Call it at the start of a process that moves frames, never at import.
    """
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
        mallopt = ctypes.CDLL(None).mallopt
    except (ValueError, OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS_BYTES)
    settings = (
        (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
        (_M_ARENA_MAX, 1),  # each arena keeps what it was given, and frames pass through many threads
    )
    return taken and all(mallopt(name, value) for name, value in settings)
