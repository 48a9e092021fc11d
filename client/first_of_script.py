"""Version 0 of a job that names a script: read from a model file, since the researcher's machine has nothing that builds it.

Loads no torch. What is a buffer is as the file says (`atoll.save_model` writes it); of a file that says nothing, whole
numbers are buffers and all else is a parameter.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from atoll.client.people import SETTINGS_FILE, Person
from atoll.cluster.registry import hash_script
from atoll.wire.checksum import crc32_of
from atoll.wire.errors import BadManifest, ConfigError, LocalError
from atoll.wire.job import Job
from atoll.wire.manifest import Entry, Manifest
from atoll.wire.model_file import ModelFile, open_model
from atoll.wire.payload_list import is_list
from atoll.wire.room import reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstVersion:
    """What a submission needs beside the job."""

    manifest: bytes  # serialised
    app_hash: str  # SHA-256, hex
    path: Path  # holds exactly the manifest's bytes
    crc32: int


def first_of_script(person: Person, job: Job, path: Path, start: Path | None) -> FirstVersion:
    """Version 0, in `path`, of the values in the model file `start`.

    Raises:
        ConfigError: there is no such file, or no script of that name in `user.toml`.
        Unknown: the script cannot be read.
        BadManifest: the file holds no tensors.
        LocalError: a file cannot be read or written.
    """
    digest = script_hash(person, job.job.code)
    if job.job.continues is not None:
        raise ConfigError(
            f"job.continues = {job.job.continues!r}: what a script keeps from round to round is its own; begin anew from the "
            f"last version: atoll model {job.job.continues} --out FILE, then atoll run JOB --from FILE",
            key="job.continues",
            value=job.job.continues,
        )
    if start is None:
        raise ConfigError(
            f"job.start is missing: nothing on this machine builds the model of script {job.job.script!r}; write it by "
            "`atoll.save_model(model, FILE)` where the script runs, and give it: atoll run JOB --from FILE",
            key="job.start",
        )
    with open_model(start) as model:
        if is_list(model.manifest) or not model.manifest.tensors:
            raise BadManifest(f"{start} holds no tensors, and a script trains a model of tensors", field="job.start")
        manifest = Manifest.build([_entry(model.manifest, spec.name) for spec in model.manifest])
        try:
            crc32 = copy_tensors(path, manifest, model)
        except OSError as error:
            raise LocalError(f"{path} cannot be written: {error.strerror}") from None
    return FirstVersion(manifest=manifest.encode(), app_hash=digest, path=path, crc32=crc32)


def script_hash(person: Person, name: str) -> str:
    """SHA-256, hex, of the script that `name` means to this person. Raises ConfigError, Unknown."""
    table = person.settings.scripts.get(name)
    if table is None:
        raise ConfigError(
            f"script {name!r} is not named on this machine: add [scripts.{name}] to {person.home / SETTINGS_FILE}, with "
            "the path of the file that you mean, or the hash that `atoll site status` shows",
            key="job.script",
            value=name,
            bound=", ".join(sorted(person.settings.scripts)),
        )
    return table.hash or hash_script(Path(table.path or ""))


def copy_tensors(path: Path, manifest: Manifest, model: ModelFile) -> int:
    """Writes a model file's values as the manifest's bytes, tensor by tensor, lanes as zeros; returns their crc32."""
    with path.open("wb+") as file:
        if manifest.num_bytes == 0:
            return 0
        reserve(file.fileno(), manifest.num_bytes)
        with mmap.mmap(file.fileno(), manifest.num_bytes) as mapped, memoryview(mapped) as data:
            for name in (spec.name for spec in manifest.model):
                spec = manifest[name]
                begin = model.manifest[name].offset
                data[spec.offset : spec.offset + spec.num_bytes] = model.map[begin : begin + spec.num_bytes]
            return crc32_of(data)


def _entry(manifest: Manifest, name: str) -> Entry:
    spec = manifest[name]
    is_whole = "int" in spec.dtype or spec.dtype == "bool"
    return spec.name, spec.dtype, spec.shape, "buffer" if is_whole else spec.role
