"""`atoll strategies`: what a job can compose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.cli import options

if TYPE_CHECKING:
    from atoll.aggregation.catalogue import Kind, Option


def strategies(as_json: options.AsJson = False) -> None:
    """List what a job can compose.

    Strategies and the parts they are made of, built in and from installed plugins.

    \b
    Examples:
      atoll strategies
      atoll strategies --json | jq -r '.[] | select(.part == "codec").kind'
    """
    from dataclasses import asdict

    from atoll.aggregation.catalogue import describe
    from atoll.cli.output import print_json

    found = describe()
    if as_json:
        print_json([asdict(kind) for kind in found])
        return
    for part in dict.fromkeys(kind.part for kind in found):
        print(part)
        for kind in found:
            if kind.part == part:
                print("\n".join(_lines(kind)))


def _lines(kind: Kind) -> Iterator[str]:
    source = "" if kind.source == "built in" else f" [{kind.source}]"
    if kind.failure:
        yield f"  {kind.kind}{source}: cannot be used: {kind.failure}"
        return
    yield f"  {kind.kind}{source}: {kind.summary}"
    for option in kind.options:
        yield f"      {_describe(option)}"


def _describe(option: Option) -> str:
    default = f" = {option.default}" if option.default else " (required)"
    bound = f", {option.bound}" if option.bound else ""
    return f"{option.name}{default}: {option.type}{bound}"
