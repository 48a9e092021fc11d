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
    import shutil
    import sys
    from dataclasses import asdict

    from atoll.aggregation.catalogue import describe
    from atoll.cli.output import print_json

    found = describe()
    if as_json:
        print_json([asdict(kind) for kind in found])
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for part in dict.fromkeys(kind.part for kind in found):
        print(part)
        for kind in found:
            if kind.part == part:
                print("\n".join(lines(kind, width)))


def lines(kind: Kind, width: int) -> Iterator[str]:
    """What is printed of one kind: a line for it and one for each option, wrapped to `width` unless that is 0."""
    import textwrap

    from atoll.cli.output import one_line

    indents = ["  ", *["      "] * len(kind.options)]
    for indent, text in zip(indents, [_headline(kind), *map(_describe, kind.options)], strict=True):
        if not width:
            yield indent + one_line(text)
            continue
        yield from textwrap.wrap(
            one_line(text), max(width, 40), initial_indent=indent, subsequent_indent=f"{indent}    "
        )


def _headline(kind: Kind) -> str:
    source = "" if kind.source == "built in" else f" [{kind.source}]"
    if kind.failure:
        return f"{kind.kind}{source}: cannot be used: {kind.failure}"
    paper = f" {kind.paper}." if kind.paper and kind.paper.split()[-1] not in kind.summary else ""
    return f"{kind.kind}{source}: {kind.summary}{paper}"


def _describe(option: Option) -> str:
    default = {"": " (required)", "None": " (optional)"}.get(option.default, f" = {option.default}")
    bound = f", {option.bound}" if option.bound else ""
    return f"{option.name}{default}: {option.type}{bound}"
