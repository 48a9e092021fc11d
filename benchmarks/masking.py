"""A worker's masking beside bare AES-256-CTR of the same run: masks alone, and values quantised with masks on them.

    python benchmarks/masking.py --parameters 10000000 --neighbours 9 --repeats 9 --json

Bare is `cryptography`'s own cipher in counter mode over one reused buffer, in as many threads as the kernel has. The
three are run in turn, and ratios are taken within a turn; the medians are shown. GB are bytes of key stream (one stream
of 4 bytes a value for each neighbour, and the site's own). `--clock cpu` counts processor seconds in place of the
clock's, for a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.levels import largest_level
from atoll.privacy.secagg.masked_input import BLOCK_VALUES, Encoding, Reals, RealsLane, slice_values
from atoll.privacy.secagg.masks import Masking

BARE_BYTES = 1 << 18  # fastest of 64 KiB to 4 MiB


def main() -> None:
    options = _parse()
    record = measure(options.parameters, options.neighbours, options.repeats, options.threads, options.clock)
    print(json.dumps(record) if options.json else "\n".join(f"{key:24} {value}" for key, value in record.items()))


def measure(
    num_values: int, num_neighbours: int, repeats: int, num_threads: int, clock: str = "wall"
) -> dict[str, Any]:
    """Rates and ratios of one machine."""
    seconds = time.perf_counter if clock == "wall" else time.process_time
    values = (np.random.default_rng(1).standard_normal(num_values) / 100).astype(np.float32)
    levels = np.zeros(num_values, dtype="<u4")
    masks = [Mask(key=os.urandom(32), negative=number % 2 == 0) for number in range(num_neighbours + 1)]
    encoding = Encoding(bits=32, scale=largest_level(10, 32) / 8, bound=8.0, key=os.urandom(32))
    lane = RealsLane([Reals(0, values)], encoding, masks)
    num_bytes = 4 * num_values * len(masks)
    size = slice_values(num_values, num_threads)
    starts = range(0, num_values, size)

    def mask_alone(start: int) -> None:
        part = levels[start : start + size]
        masking = Masking(masks, start, part.dtype)
        for begin in range(0, part.size, BLOCK_VALUES):
            masking.add(part[begin : begin + BLOCK_VALUES])

    def quantise(start: int) -> None:
        lane.write(start, levels[start : start + size])

    found: dict[str, list[float]] = {name: [] for name in ("aes", "masks", "quantised", "masks_ratio", "ratio")}
    with ThreadPoolExecutor(num_threads) as pool:

        def rate(work: Callable[[int], None]) -> float:
            began_s = seconds()
            list(pool.map(work, starts))
            return num_bytes / (seconds() - began_s) / 1e9

        for turn in range(repeats + 1):
            bare = rate(lambda start: _bare(4 * min(size, num_values - start) * len(masks)))
            alone, quantised = rate(mask_alone), rate(quantise)
            if turn:  # the first one warms up
                for name, value in (
                    ("aes", bare),
                    ("masks", alone),
                    ("quantised", quantised),
                    ("masks_ratio", alone / bare),
                    ("ratio", quantised / bare),
                ):
                    found[name].append(value)
    middle = {name: statistics.median(each) for name, each in found.items()}
    return {
        "parameters": num_values,
        "neighbours": num_neighbours,
        "threads": num_threads,
        "clock": clock,
        "aes_gb_per_s": round(middle["aes"], 2),
        "masks_gb_per_s": round(middle["masks"], 2),
        "mask_gb_per_s": round(middle["quantised"], 2),
        "masks_ratio_to_aes": round(middle["masks_ratio"], 3),
        "ratio_to_aes": round(middle["ratio"], 3),
    }


def _bare(num_bytes: int) -> None:
    zeros, out = memoryview(bytes(BARE_BYTES)), bytearray(BARE_BYTES + 16)
    encryptor = Cipher(algorithms.AES256(bytes(32)), modes.CTR(bytes(16))).encryptor()
    for start in range(0, num_bytes, BARE_BYTES):
        encryptor.update_into(zeros[: num_bytes - start], out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--neighbours", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
