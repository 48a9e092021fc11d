"""What this machine can do, measured without torch: the agent must not open a device."""

from __future__ import annotations

import os
import shutil
import subprocess

from atoll.client.settings import SiteSettings
from atoll.wire.control_pb2 import Capacity
from atoll.wire.errors import Unavailable

NVIDIA_SMI_TIMEOUT_S = 20.0  # on a machine whose driver is just waking up
MIB = 1 << 20


def measure_capacity(settings: SiteSettings) -> Capacity:
    """Devices, memory of one device (or of the machine), and what site.toml says. Blocks."""
    devices = [] if settings.devices.device in ("cpu", "mps") else _accelerator_memory_bytes()
    return Capacity(
        runs_at_once=settings.capacity.runs_at_once,
        num_devices=len(devices),
        memory_bytes=min(devices) if devices else _machine_memory_bytes(),
        labels=settings.capacity.labels,
    )


def require_room(num_runs: int, settings: SiteSettings, run: str) -> None:
    """Returns where the site can take on one run more. Raises Unavailable."""
    most, site = settings.capacity.runs_at_once, settings.site.name
    if num_runs >= most:
        busy = f"site {site} works on {most} runs already (capacity.runs_at_once)"
        raise Unavailable(busy, site=site, run=run, bound=most)


def _machine_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _accelerator_memory_bytes() -> list[int]:
    """Memory of each NVIDIA device; empty where there is none, or where its driver does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * MIB for line in done.stdout.split() if line.isdecimal()]
