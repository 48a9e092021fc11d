"""What `atoll simulate --preview` prints, and the picture that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from atoll.simulations.preview import Preview

PICTURE = "partition.png"
SHOWN_SITES = 30  # lines of a table that a person reads
SHOWN_CLASSES = 12  # columns that fit a terminal


def show_preview(found: Preview, out: Path, *, as_json: bool) -> None:
    """Prints the table, or with `as_json` all of it, and writes the picture into `out`. Raises LocalError, ConfigError."""
    path = out / PICTURE
    found.save(path)
    if as_json:
        sites = {site: counts.tolist() for site, counts in zip(found.sites, found.counts_SC, strict=True)}
        print_json({"classes": list(found.classes), "sites": sites, "distance": found.distance, "picture": str(path)})
        return
    wide = len(found.classes) > SHOWN_CLASSES
    columns = ["site", "examples", *(["classes"] if wide else found.classes)]
    print_table(columns, _rows(found, wide), empty="there are no sites")
    if len(found.sites) > SHOWN_SITES:
        note(f"... and {len(found.sites) - SHOWN_SITES} more sites; all are in the picture, and in --json")
    print(f"{found.summary()}\npicture: {path}")


def _rows(found: Preview, wide: bool) -> Iterator[list[str]]:
    for site, counts, size, num_classes in list(
        zip(found.sites, found.counts_SC, found.sizes_S, found.num_classes_S, strict=True)
    )[:SHOWN_SITES]:
        cells = (
            [str(num_classes)] if wide else [str(count) if count else "." for count in counts] if found.classes else []
        )
        yield [site, str(size), *cells]
