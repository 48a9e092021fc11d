from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from samples.bench import DISTRIBUTION, install

from atoll.cluster.registry import MEND_APP, AppEntry, failure_of, hash_distribution, hash_script, load_app
from atoll.wire.errors import AppFailed, NotAllowed, Unknown

APP = "import atoll\nclass One(atoll.App):\n    def model(self): ...\n    data = loss = optimizer = model\n"
POINTS = {"one": "registry_app.one:One"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "registry_app"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def lay(folder: Path, *, one: str = APP, more: str = "", points: dict[str, str] = POINTS) -> None:
    files = {"registry_app/__init__.py": "", "registry_app/one.py": one, "registry_app/words.txt": more}
    install(folder, name="registry-app", files=files, entry_points=points)


def lay_editable(folder: Path, *, one: str = APP) -> None:
    """The same, as `pip install -e` leaves it: RECORD lists no code."""
    lay(folder, one=one)
    metadata = folder / "registry_app-1.0.dist-info"
    (metadata / "RECORD").write_text(f"{metadata.name}/METADATA,,\n__editable__.pth,,\n")
    (metadata / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))


@pytest.mark.parametrize("write", [lay, lay_editable])
def test_hash_changes_with_any_file_of_the_app(folder: Path, write) -> None:  # type: ignore[no-untyped-def]
    write(folder)
    before = hash_distribution("registry-app")
    assert hash_distribution("registry-app") == before
    (folder / "registry_app" / "__pycache__").mkdir()
    (folder / "registry_app" / "__pycache__" / "one.cpython-311.pyc").write_bytes(b"code")
    assert hash_distribution("registry-app") == before
    write(folder, one=APP + "# changed\n")
    assert hash_distribution("registry-app") != before


def test_hash_is_the_same_installed_and_editable(folder: Path) -> None:
    lay(folder)
    installed = hash_distribution("registry-app")
    lay_editable(folder)
    assert hash_distribution("registry-app") == installed


def test_hash_covers_data_files_names_and_entry_points(folder: Path) -> None:
    hashes = set()
    for more, points in (("", POINTS), ("word", POINTS), ("", {"one": "registry_app.two:One"})):
        lay(folder, more=more, points=points)
        hashes.add(hash_distribution("registry-app"))
    assert len(hashes) == 3


def test_hashing_imports_nothing(folder: Path) -> None:
    lay(folder, one="raise SystemExit('imported')")
    hash_distribution("registry-app")
    assert "registry_app" not in sys.modules


def test_loads_the_class_whose_hash_is_right(folder: Path) -> None:
    lay(folder)
    entry = AppEntry(name="a", distribution="registry-app", entry_point="one")
    assert load_app(entry, hash_distribution("registry-app")).__name__ == "One"
    with pytest.raises(
        NotAllowed, match="another hash than the run's; install the same version at the site and"
    ) as refused:
        load_app(entry, "0" * 64)
    assert refused.value.bound == "0" * 64


def test_names_what_is_not_here(folder: Path) -> None:
    lay(folder)
    found = hash_distribution("registry-app")
    with pytest.raises(Unknown, match=r"no entry point 'two' .*it has one; set entry_point under \[apps\.a\] to one"):
        load_app(AppEntry(name="a", distribution="registry-app", entry_point="two"), found)
    with pytest.raises(Unknown, match="pip install"):
        hash_distribution("no-such-distribution")
    with pytest.raises(Unknown, match="pip install"):
        hash_distribution("")
    with pytest.raises(Unknown, match="cannot be read"):
        hash_script(folder / "no-such-script.py")


@pytest.mark.parametrize("code", ["import a_module_that_nobody_has", "1 / 0", "raise SystemExit(1)", "def broken(:"])
def test_an_app_that_does_not_import(folder: Path, code: str) -> None:
    lay(folder, one=code)
    entry = AppEntry(name="a", distribution="registry-app", entry_point="one")
    with pytest.raises(AppFailed, match="app 'a' does not import") as caught:
        load_app(entry, hash_distribution("registry-app"))
    needs = "install what it needs there, in the Python environment that runs Atoll"
    advice = needs if "a_module_that_nobody_has" in code else MEND_APP
    assert caught.value.message.splitlines()[0].endswith(f"; {advice}")


def test_an_entry_point_that_is_no_app(installed: Path) -> None:
    with pytest.raises(AppFailed, match=r"not a subclass of atoll\.App; have entry point 'no_app' of .* name one$"):
        load_app(AppEntry(name="a", distribution=DISTRIBUTION, entry_point="no_app"), hash_distribution(DISTRIBUTION))


def test_hash_of_a_script_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)\n")
    assert hash_script(tmp_path / "train.py").startswith("cc42155088fc")  # sha256sum train.py


def test_a_failure_tells_where_and_not_what_the_values_were() -> None:
    patient = "Jane Roe, room 7"

    def inner() -> None:
        raise KeyError("missing column")

    with pytest.raises(KeyError) as raised:
        inner()
    failure = failure_of(raised.value, "app failed to train", advice="add the column")
    assert failure.message.splitlines()[0] == "app failed to train: KeyError: 'missing column'; add the column"
    assert "in inner" in failure.message
    assert patient not in failure.message
    assert ".py" not in failure.message
