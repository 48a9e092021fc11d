"""A pair of interfaces between this network namespace and another, with a token bucket at both ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NAME = f"atoll-{os.getpid()}"
HERE, THERE = "10.203.77.1", "10.203.77.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where this end is reached from the other one, and what to put before a command that is to run there."""

    address: str
    prefix: tuple[str, ...]


@contextmanager
def shaped_pair(bits_per_s: int) -> Iterator[Pair | None]:
    """The pair, for as long as the block lasts; None where this machine makes none (it takes root and iproute2)."""
    try:
        yield Pair(address=HERE, prefix=("ip", "netns", "exec", NAME)) if _made(bits_per_s) else None
    finally:
        if shutil.which("ip"):
            _run("ip", "link", "delete", _end("a"))
            _run("ip", "netns", "delete", NAME)


def _made(bits_per_s: int) -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    inside = ("ip", "netns", "exec", NAME)
    bucket = ("root", "tbf", "rate", f"{bits_per_s}bit", "burst", "16kb", "latency", "400ms")
    return all(
        _run(*step)
        for step in (
            ("ip", "netns", "add", NAME),
            ("ip", "link", "add", _end("a"), "type", "veth", "peer", "name", _end("b"), "netns", NAME),
            ("ip", "address", "add", f"{HERE}/30", "dev", _end("a")),
            ("ip", "link", "set", _end("a"), "up"),
            (*inside, "ip", "address", "add", f"{THERE}/30", "dev", _end("b")),
            (*inside, "ip", "link", "set", _end("b"), "up"),
            (*inside, "ip", "link", "set", "lo", "up"),
            ("tc", "qdisc", "add", "dev", _end("a"), *bucket),
            (*inside, "tc", "qdisc", "add", "dev", _end("b"), *bucket),
        )
    )


def _end(letter: str) -> str:
    return f"at{os.getpid()}{letter}"  # at most 15 characters


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
