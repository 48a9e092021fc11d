"""Updates whose bytes are kept in `tests/golden/codecs`: `python tests/contracts/golden_updates.py` writes them anew.

Their bytes are a promise to every site of an older version. A change that is meant is a new name of the encoding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, as pytest does

from contracts.updates import CODECS, encoded, layout_of

from atoll.wire.manifest import Entry
from atoll.wire.tensors import DTYPES

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"

_ENTRIES: tuple[Entry, ...] = (
    ("double", "float64", (5,), "parameter"),
    ("complex", "complex64", (2,), "parameter"),
    ("weight", "float32", (3, 100), "parameter"),
    ("half", "float16", (3,), "parameter"),
    ("brain", "bfloat16", (3,), "parameter"),
    ("eighth", "float8_e4m3fn", (3,), "parameter"),
    ("mean", "float32", (4,), "buffer"),
    ("count", "int64", (), "buffer"),
    ("flag", "bool", (3,), "buffer"),
)


def golden_update(codec: str) -> bytes:
    """An update of every kind of entry, of numbers that need no generator."""
    layout = layout_of(_ENTRIES, codec)
    base = {spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in layout.manifest}
    trained = {}
    for spec in layout.manifest:
        numbers = torch.arange(spec.num_elements, dtype=torch.float64)
        trained[spec.name] = (
            ((numbers - 2) / 70 * 1.5 ** numbers.remainder(11)).reshape(spec.shape).to(DTYPES[spec.dtype])
        )
    return encoded(layout, base, trained, site="golden")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for codec in CODECS:
        (FOLDER / f"{codec}.bin").write_bytes(golden_update(codec))


if __name__ == "__main__":
    main()
