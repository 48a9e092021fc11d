"""The command starts fast, since nothing heavy is imported before a command needs it."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

START_S = 0.3
HEAVY = (
    "torch",
    "numpy",
    "grpc",
    "google.protobuf",
    "pydantic",
    "cryptography",
    "sqlalchemy",
    "rich",
    "matplotlib",
    "asyncio",
)
COMMANDS = [
    (),
    ("run",),
    ("runs",),
    ("status",),
    ("stop",),
    ("model",),
    ("strategies",),
    ("doctor",),
    ("demo",),
    ("server", "init"),
    ("server", "run"),
    ("site", "add"),
    ("site", "join"),
    ("site", "run"),
    ("site", "status"),
    ("site", "list"),
    ("site", "revoke"),
    ("user", "add"),
    ("user", "join"),
    ("federation", "pending"),
    ("federation", "sign"),
    ("federation", "publish"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_without_loading_anything_heavy(command: tuple[str, ...]) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['atoll', *{command!r}, '--help']\n"
        "from atoll.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        f"    print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])\n"
        "    print('code:', end.code or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "loaded: []" in done.stdout, done.stdout.splitlines()[-2]
    assert "code: 0" in done.stdout
    if command:
        assert "Example" in done.stdout


def test_help_needs_less_than_300_ms() -> None:
    """Of processor time, which is what the wall clock shows where nothing else runs: other tests may run beside."""
    needed_s = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "atoll.cli", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        needed_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if needed_s[-1] < START_S:
            return
    pytest.fail(f"every start took {min(needed_s):.3f} s or more, {START_S} s are promised; see python -X importtime")
