"""The shape of the repository, held by tests: layers, links, light imports, public names, roles, sizes."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import atoll
from atoll.server.security import METHOD_ROLES
from atoll.transport.grpc_carrier import DOWNLOAD_METHOD, UPLOAD_METHOD

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
SOURCES = [
    path.relative_to(ROOT)
    for folder in [*ROOMS, "src/atoll", "examples"]
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name and not path.is_relative_to(ROOT / "src" / "atoll" / folder)
]
HEAVY = ("torch", "flwr", "fastapi", "starlette", "flask", "django", "aiohttp", "uvicorn")
NUM_LINES = 400  # house rule: one idea a file, and no file beyond this
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


def modules_of(package: ModuleType) -> list[str]:
    return [name for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def loaded_by(tmp_path: Path, *modules: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after importing these."""
    imports = "".join(f"import {module}\n" for module in modules)
    # Away from the repository, whose root would offer `server`, `client`, ... as packages of their own.
    answer = subprocess.run(
        [sys.executable, "-c", f"{imports}import sys\nprint(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


def test_imports_point_one_way() -> None:
    # In a process of its own: import-linter configures logging, which would mute the loggers of later tests.
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_room_is_linked_typed_and_banned_by_its_bare_name() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "src" / "atoll").iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}
    assert set(ROOMS) <= set(PROJECT["tool"]["pyright"]["include"])
    assert set(ROOMS) == set(PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    layers = " | ".join(PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]).split(" | ")
    assert {layer.removeprefix("atoll.") for layer in layers} == set(ROOMS)


@pytest.mark.parametrize("package", ["atoll", *(f"atoll.{room}" for room in ROOMS)])
def test_importing_a_package_loads_nothing_heavy(tmp_path: Path, package: str) -> None:
    assert not loaded_by(tmp_path, package) & {*HEAVY, "grpc", "pydantic", "sqlalchemy", "numpy", "rich", "typer"}


def test_the_wire_loads_no_torch(tmp_path: Path) -> None:
    names = [name for name in modules_of(importlib.import_module("atoll.wire")) if name != "atoll.wire.tensors"]
    assert not loaded_by(tmp_path, *names) & set(HEAVY)


@pytest.mark.parametrize("package", ["atoll.transport", "atoll.client"])
def test_these_rooms_load_no_torch(tmp_path: Path, package: str) -> None:
    assert not loaded_by(tmp_path, *modules_of(importlib.import_module(package))) & set(HEAVY)


@pytest.mark.parametrize(
    "module",
    ["atoll.client.agent", "atoll.cluster.messages", "atoll.cluster.worker_process", "atoll.cluster.registry"],
)
def test_the_agents_path_loads_no_torch(tmp_path: Path, module: str) -> None:
    assert not loaded_by(tmp_path, module) & set(HEAVY)


@pytest.mark.parametrize("package", ["atoll", *(f"atoll.{room}" for room in ROOMS)])
def test_public_names_are_those_of_all(package: str) -> None:
    module = importlib.import_module(package)
    exported = set(getattr(module, "__all__", ()))
    for name in exported:
        assert getattr(module, name) is not None
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == package}
    assert {name for name in defined if not name.startswith("_")} <= exported


def test_the_public_names_of_atoll() -> None:
    """A name added here is kept for ever: other people's apps and scripts import it."""
    names = {"App", "OpaqueApp", "RunEnded", "__version__", "connect", "join", "save_model", "simulate"}
    assert set(atoll.__all__) == names


def test_every_method_has_a_role_and_no_other() -> None:
    methods = {UPLOAD_METHOD, DOWNLOAD_METHOD}
    for path in sorted((ROOT / "wire").glob("*.proto")):
        descriptor = importlib.import_module(f"atoll.wire.{path.stem}_pb2").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            methods |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert set(METHOD_ROLES) == methods
    assert all(METHOD_ROLES.values()), "a method that nobody may call has no use"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_is_one_idea_and_named_after_it(path: Path) -> None:
    assert path.stem not in VAGUE_NAMES
    assert len((ROOT / path).read_text().splitlines()) <= NUM_LINES


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_nothing_received_is_ever_executed(path: Path) -> None:
    """No pickle, torch.load, eval or exec: what arrives from another organisation is data."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, f"line {node.lineno}"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"eval", "exec", "torch.load", "torch.save"}, f"line {node.lineno}"


def test_one_function_computes_checksums() -> None:
    """Both ends of every transfer, and whoever reads a file later, must mean the same number by it."""
    importing = re.compile(r"^\s*(?:from|import) (?:isal|zlib)\b", re.MULTILINE)
    assert [str(path) for path in SOURCES if importing.search((ROOT / path).read_text())] == ["wire/checksum.py"]


def test_nothing_of_this_machine_is_in_the_files() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in (ROOT / name for name in tracked if name.endswith((".py", ".md", ".toml", ".proto"))):
        assert str(ROOT) not in path.read_text(), path


def test_every_dependency_is_pinned_for_development() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[^A-Za-z0-9_.-]", one, maxsplit=1)[0].lower() for one in wanted} - {"atoll"}
    pins = re.findall(r"(?m)^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text())
    assert names - {pin.lower() for pin in pins} == set()
