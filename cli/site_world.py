"""`atoll site world`: shows the processes of a site as they would be launched, or launches them once to see that they meet."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from atoll.client.settings import SiteSettings, load_settings
from atoll.cluster.messages import Close, encode
from atoll.cluster.parallel.world_section import WorldSection
from atoll.wire.errors import ConfigError
from atoll.wire.parallel_section import ParallelSection


def show_world(home: Path, *, launcher: str | None) -> str:
    """The world of `site.toml` in words; nothing is started.

    Args:
        launcher: in place of that of the settings.

    Raises:
        ConfigError: the settings do not describe a world.
    """
    from atoll.cluster.parallel.launchers.spec import shown
    from atoll.cluster.parallel.world import planned

    section, world, count, device_type = _read(home, launcher)
    ports = (world.port, world.port + 1) if world.port else (0, 0)
    folder = Path(tempfile.gettempdir()) / "atoll-world"
    return shown(*planned(world, section, count, device_type, folder=folder, ports=ports))


def start_world(home: Path, *, launcher: str | None) -> str:
    """Has the processes meet once, and ends them. What came of it, in words.

    Raises:
        ConfigError: as `show_world`.
        LocalError: they do not meet.
    """
    from atoll.cluster.parallel.world import World

    section, world, count, device_type = _read(home, launcher)
    begin_s = time.monotonic()
    found = World(world, section, count, device_type)
    met_s = time.monotonic() - begin_s
    for connection, _ in found.connections.values():
        connection.sendall(encode(Close()))
    found.close()
    return f"{count} processes on {world.nodes} nodes met after {met_s:.1f} s (launcher {world.launcher})"


def _read(home: Path, launcher: str | None) -> tuple[ParallelSection, WorldSection, int, str]:
    from atoll.cluster.device import choose_device
    from atoll.cluster.parallel.open_spread import num_processes

    path = home / "site.toml"
    settings = load_settings(path)
    if launcher is not None:
        settings = _with_launcher(settings, launcher, path)
    section, world = settings.parallel, settings.world or WorldSection()
    if section is None:
        raise ConfigError(f"{path}: without [parallel] a run has one process at this site; add it", key="parallel")
    device = settings.devices.device
    device_type = choose_device(device).type if world.launcher == "local" else device
    count = num_processes(section, device_type, is_own=True, wanted=world.num_processes)
    return section, world, count, device_type


def _with_launcher(settings: SiteSettings, launcher: str, path: Path) -> SiteSettings:
    from pydantic import ValidationError

    from atoll.wire.explain import explain

    table = settings.model_dump(mode="json", exclude_none=True)
    table["world"] = {**table.get("world", {}), "launcher": launcher}
    try:
        return SiteSettings.model_validate(table)
    except ValidationError as error:
        raise explain(error, SiteSettings, f"{path} with --launcher {launcher}") from None
