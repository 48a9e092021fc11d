"""Prints how much anonymous memory a reducer took at its peak: KIND OPTIONS NUM_SITES. Linux only.

Files that are mapped are no anonymous memory: the system takes their pages back when it needs them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from atoll.aggregation.layout import update_layout
from atoll.aggregation.parts import build
from atoll.aggregation.reducers.append import Appending
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.wire.manifest import Manifest

NUM_VALUES = 1 << 18


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of(kind: str, options: dict[str, Any], num_sites: int, spool: Path) -> int:
    """Bytes beyond those of the start, sampled every two milliseconds."""
    layout = update_layout(
        Manifest.build([("w", "float32", (NUM_VALUES,), "parameter")]), build("codec", "native", {}), "mean"
    )
    payload, values = bytearray(layout.num_bytes), torch.linspace(-1, 1, NUM_VALUES)
    payload[: len(layout.header)] = layout.header
    region = torch.frombuffer(payload, dtype=torch.float32, offset=layout.means[0].offset)
    out_V = torch.empty(NUM_VALUES, dtype=torch.float64).zero_()
    reducer, start = build("reducer", kind, options), anonymous_bytes()
    peak, over = start, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    reduction = reducer.init(layout, RoundTerms(num_sites=num_sites, max_weight=1, bound=1024.0, spool=spool))
    for number in range(num_sites):
        torch.mul(values, 1 + number / num_sites, out=region)
        metrics = {"loss": (1.0, 1.0)}
        reduction.check(payload, 1, metrics=metrics)
        reduction.fold(f"site-{number:03d}", payload, 1, metrics)
    if not isinstance(reduction, Appending):  # which has no values
        reduction.difference(0, out_V)
    over.set()
    watching.join()
    return max(peak, anonymous_bytes()) - start


def main() -> None:
    torch.set_num_threads(1)
    kind, options, num_sites = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        peak_of(kind, options, 8, Path(folder))  # what libraries load and keep at their first use
        print(peak_of(kind, options, num_sites, Path(folder)))


if __name__ == "__main__":
    main()
