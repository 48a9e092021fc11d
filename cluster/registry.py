"""Which apps a machine knows, what code they are made of, and the one place that imports one.

An app is named by its installed distribution and an entry point of the group `atoll.apps`; nothing imports a dotted
path that came over the wire. The hash covers the code that will run: equal hashes on two machines mean equal files,
whether one of them is an editable install or not. It does not cover what the app imports from other distributions.
Hashing loads no torch and imports none of the app's code; `load_app` does both and runs in workers only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from atoll.wire.errors import AppFailed, AtollError, NotAllowed, Unknown

if TYPE_CHECKING:
    from atoll.cluster.app import App
    from atoll.cluster.opaque_app import OpaqueApp

GROUP = "atoll.apps"
MEND_APP = "correct the app, and install the new version at the sites and at the researcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppEntry:
    """An app as registered in a machine's settings: `[apps.NAME] distribution = ..., entry_point = ...`."""

    name: str
    distribution: str
    entry_point: str


def hash_distribution(name: str) -> str:
    """Hex SHA-256 over the sorted "hash  path" lines of a distribution's files, and its apps' entry points.

    Installed: the files that RECORD lists. Editable: the files of the packages that hold its apps. Left out in both:
    byte code, the metadata folder and scripts outside the packages, since those differ from machine to machine.

    Raises:
        Unknown: no such distribution is installed, or it has no apps or no files.
    """
    distribution = _find(name)
    lines = [f"{_sha256(path)}  {relative}" for relative, path in _code_files(distribution)]
    if not lines:
        raise Unknown(f"distribution {name!r} has no files: install it again", field=name)
    lines += [f"{GROUP}  {entry.name} = {entry.value}" for entry in _entry_points(distribution)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def hash_script(path: Path) -> str:
    """Hex SHA-256 of a script's bytes. Raises Unknown where it cannot be read."""
    try:
        return _sha256(path)
    except OSError as error:
        raise Unknown(
            f"script {path} cannot be read: {error.strerror}; correct its path under [scripts] of site.toml",
            field=str(path),
        ) from None


def load_app(entry: AppEntry, expected_hash: str) -> type[App]:
    """The app's class, imported from its distribution after the hash was found right.

    Raises:
        Unknown: distribution or entry point are not installed here.
        NotAllowed: the installed code is not the code that was asked for.
        AppFailed: it does not import, or is no App.
    """
    found: type[App] = _load(entry, expected_hash, "atoll.cluster.app", "App")
    return found


def load_opaque_app(entry: AppEntry, expected_hash: str) -> type[OpaqueApp]:
    """The same of an app whose model is a list of payloads. Raises as `load_app` does."""
    found: type[OpaqueApp] = _load(entry, expected_hash, "atoll.cluster.opaque_app", "OpaqueApp")
    return found


def _load(entry: AppEntry, expected_hash: str, module: str, kind: str) -> Any:
    found_hash = hash_distribution(entry.distribution)
    if found_hash != expected_hash:
        raise NotAllowed(
            f"app {entry.name!r}: the code of {entry.distribution!r} installed here has another hash than the run's; "
            "install the same version at the site and at the researcher",
            field=entry.name,
            value=found_hash,
            bound=expected_hash,
        )
    points = {point.name: point for point in _entry_points(_find(entry.distribution))}
    if entry.entry_point not in points:
        raise Unknown(
            f"app {entry.name!r}: {entry.distribution!r} has no entry point {entry.entry_point!r} in {GROUP}, it has "
            f"{', '.join(sorted(points)) or 'none'}; set entry_point under [apps.{entry.name}] to one that it has",
            field=entry.name,
            value=entry.entry_point,
            bound=", ".join(sorted(points)),
        )
    return _import(entry, points[entry.entry_point], module, kind)


def failure_of(error: BaseException, doing: str, *, advice: str, num_frames: int = 6) -> AppFailed:
    """What a peer may learn of an exception in the user's code: its type, its message, and the innermost frames.

    Frames are named by module, function and line; no local variable, source line or file path is in it.

    Args:
        advice: what to do; it ends the first line.
    """
    frames = [(f.f_globals.get("__name__", "?"), line, f) for f, line in traceback.walk_tb(error.__traceback__)]
    # Python's own frames of an import say nothing, and would leave no room for the app's.
    places = [f"{m}:{line} in {f.f_code.co_name}" for m, line, f in frames if not m.startswith("importlib.")]
    text = str(error)
    where = "".join(f"\n  at {place}" for place in reversed(places[-num_frames:]))
    return AppFailed(
        f"{doing}: {type(error).__name__}: {text[:500]}; {advice}{where}", field=doing, value=type(error).__name__
    )


def _import(entry: AppEntry, point: metadata.EntryPoint, module: str, kind: str) -> Any:
    wanted = getattr(importlib.import_module(module), kind)  # here, since it loads torch
    try:
        found = point.load()
    except AtollError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module does at import
        needs = "install what it needs there, in the Python environment that runs Atoll"
        advice = needs if isinstance(error, ImportError) else MEND_APP
        raise failure_of(error, f"app {entry.name!r} does not import", advice=advice) from error
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise AppFailed(
            f"app {entry.name!r}: {point.value} is not a subclass of atoll.{kind}; have entry point {point.name!r} of "
            f"{entry.distribution!r} name one",
            field=entry.name,
        )
    return found


def _find(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        raise Unknown(f"distribution {name!r} is not installed here: pip install it", field=name) from None


def _entry_points(distribution: metadata.Distribution) -> list[metadata.EntryPoint]:
    return [point for point in distribution.entry_points if point.group == GROUP]


def _code_files(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    if _is_editable(distribution):
        for top in sorted({point.value.split(":")[0].split(".")[0] for point in _entry_points(distribution)}):
            yield from _package_files(top)
        return
    for file in distribution.files or ():
        path = PurePosixPath(file.as_posix())
        if path.parts[0] != ".." and not path.parts[0].endswith(".dist-info") and _is_code(path):
            yield path.as_posix(), Path(str(distribution.locate_file(file)))


def _is_editable(distribution: metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def _package_files(top: str) -> Iterator[tuple[str, Path]]:
    spec = importlib.util.find_spec(top)  # of a top-level name: finds it without importing it
    if spec is None:
        raise Unknown(f"package {top!r} of an editable install is gone: install it again", field=top)
    if spec.submodule_search_locations is None:
        yield f"{top}.py", Path(str(spec.origin))
        return
    for folder in map(Path, spec.submodule_search_locations):
        for path in sorted(folder.rglob("*")):
            relative = PurePosixPath(top, path.relative_to(folder).as_posix())
            if path.is_file() and _is_code(relative):
                yield relative.as_posix(), path


def _is_code(path: PurePosixPath) -> bool:
    return "__pycache__" not in path.parts and path.suffix != ".pyc"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
