"""Version 0 of a run's model: built on the researcher's machine by the app, and written as the manifest's bytes.

The server never imports an app, so the model's schema and its first values come from here. Torch is loaded by
`build_first_version` alone.
"""

from __future__ import annotations

import mmap
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.client.first_of_script import FirstVersion as FirstVersion  # noqa: PLC0414  named from here by all others
from atoll.client.first_of_script import copy_tensors, first_of_script
from atoll.client.people import SETTINGS_FILE, Person, Place
from atoll.cluster.registry import GROUP, AppEntry, failure_of, hash_distribution, load_app
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import AtollError, BadManifest, ConfigError, LocalError
from atoll.wire.job import Job
from atoll.wire.manifest import Manifest
from atoll.wire.model_file import open_model
from atoll.wire.payload_list import MAGIC, TENSOR, is_list
from atoll.wire.payload_list import manifest_of as manifest_of_payloads
from atoll.wire.room import reserve

if TYPE_CHECKING:
    from torch import nn


def app_entry(person: Person | Place, name: str) -> AppEntry:
    """The app `name`: as `user.toml` registers it, else the one installed distribution that offers it.

    Raises:
        ConfigError: neither; or several distributions offer it and `user.toml` does not choose.
    """
    if table := person.settings.apps.get(name):
        return AppEntry(name=name, distribution=table.distribution, entry_point=table.entry_point or name)
    found = metadata.entry_points(group=GROUP, name=name)
    owners = sorted({point.dist.name for point in found if point.dist is not None})
    if len(owners) == 1:
        return AppEntry(name=name, distribution=owners[0], entry_point=name)
    settings = person.home / SETTINGS_FILE
    if owners:
        raise ConfigError(
            f"app {name!r} comes from several distributions ({', '.join(owners)}): choose one in [apps.{name}] of {settings}",
            key=f"apps.{name}",
        )
    known = sorted({point.name for point in metadata.entry_points(group=GROUP)} | set(person.settings.apps))
    raise ConfigError(
        f"app {name!r} is not known on this machine: install its distribution, or name it in [apps.{name}] of {settings} "
        f"(known here: {', '.join(known) or 'none'})",
        key="job.app",
        value=name,
    )


def build_first_version(person: Person, job: Job, folder: Path) -> FirstVersion:
    """Builds the job's model and writes its bytes into `folder`: values from its seed, or from the file `job.start`.

    Raises:
        ConfigError: the strategy does not resolve, the app is not known here, or the [app] table does not fit it.
        AppFailed: the app does not import or raises.
        BadManifest: the model has a tensor that cannot travel, or the file other tensors than the model.
        LocalError: a file cannot be read or written.
    """
    from atoll.aggregation.lanes import run_manifest
    from atoll.aggregation.reducers.append import Append
    from atoll.aggregation.stages import Strategies
    from atoll.wire.tensors import frozen_of, manifest_of

    # The server and the sites do the same: a mistake is told here, before anything is sent.
    strategy = Strategies(job).first
    path = folder / "version-0.bin"
    start = Path(job.job.start) if job.job.start is not None else None
    if job.job.script is not None:
        return first_of_script(person, job, path, start)
    entry = app_entry(person, job.job.code)
    app_hash = hash_distribution(entry.distribution)
    try:
        if isinstance(strategy.reducer, Append) or job.statistics is not None:
            manifest, crc32 = _write_payloads(path, start)
        else:
            module = _build_model(person, entry, app_hash, job)
            parameters = job.strategy.parameters or "all"
            frozen = frozen_of(module) if parameters == "trainable" else ()
            manifest = run_manifest(manifest_of(module, parameters, frozen), strategy.lanes, strategy.local)
            for number, stage in enumerate(job.stages[1:]):
                if stage.job.app != job.app:
                    later = manifest_of(_build_model(person, entry, app_hash, stage.job), parameters)
                    _check_stage(manifest.model, later, number)
            crc32 = _write(path, manifest, module) if start is None else _copy(path, manifest, start)
    except OSError as error:
        raise LocalError(f"{path} cannot be written: {error.strerror}") from None
    return FirstVersion(manifest=manifest.encode(), app_hash=app_hash, path=path, crc32=crc32)


def _write_payloads(path: Path, start: Path | None) -> tuple[Manifest, int]:
    """Writes a list of payloads, empty or that of a model file; its manifest and crc32."""
    data = MAGIC
    if start is not None:
        with open_model(start) as model:
            if not is_list(model.manifest):
                raise BadManifest(f"{start} holds tensors, the job wants a list of payloads", field=TENSOR)
            data = bytes(model.map)
    path.write_bytes(data)
    return manifest_of_payloads(len(data)), crc32_of(data)


def _write(path: Path, manifest: Manifest, module: nn.Module) -> int:
    """Writes the module's tensors as the manifest's bytes, without a second copy in memory; returns their crc32."""
    from atoll.wire.tensors import write_state

    with path.open("wb+") as file:
        if manifest.num_bytes == 0:  # cannot be mapped, and there is nothing to write
            return 0
        reserve(file.fileno(), manifest.num_bytes)  # a full disk is an error here, not a crash below
        with mmap.mmap(file.fileno(), manifest.num_bytes) as mapped:
            write_state(manifest, module, mapped)
            with memoryview(mapped) as data:
                return crc32_of(data)


def _copy(path: Path, manifest: Manifest, start: Path) -> int:
    """Writes a model file's values as the manifest's bytes, tensor by tensor, lanes as zeros; returns their crc32."""
    with open_model(start) as model:
        _require_tensors(manifest.model, model.manifest, start)
        return copy_tensors(path, manifest, model)


def _require_tensors(wanted: Manifest, found: Manifest, start: Path) -> None:
    """Whether a file has the model's tensors; in which order, and what it calls a buffer, does not matter."""
    for name in sorted({spec.name for spec in (*wanted, *found)}):
        texts = [_text(manifest, name) for manifest in (found, wanted)]
        if texts[0] != texts[1]:
            raise BadManifest(
                f'{start}: tensor "{name}" is {texts[0]} in the file, and {texts[1]} in the app\'s model; use a file of '
                "the same app and [app] values",
                field=name,
                value=texts[0],
                bound=texts[1],
            )


def _text(manifest: Manifest, name: str) -> str:
    return f"{manifest[name].dtype} {list(manifest[name].shape)}" if name in manifest else "absent"


def _check_stage(first: Manifest, later: Manifest, number: int) -> None:
    try:
        first.require_same(later)
    except BadManifest as error:
        key = f"control.override.{number}.app"
        raise ConfigError(
            f"{key}: {error.message}: a run has one model, whose tensors cannot change on the way", key=key
        ) from None


def _build_model(person: Person, entry: AppEntry, app_hash: str, job: Job) -> nn.Module:
    from atoll.cluster.app import build_app, build_model

    app = build_app(load_app(entry, app_hash), job.app, person.settings.source(job.data_name or ""))
    try:
        return build_model(app, job.job.seed)
    except AtollError:
        raise
    except Exception as error:  # whatever the user's code raises
        advice = "correct the app, or what the job says in [app]"
        raise failure_of(error, f"app {entry.name!r} builds no model", advice=advice) from error
