"""Spread Debian's fashion-mnist over sites: `python -m atoll_examples.fashion.prepare --sites 10 --out DIR`."""

import gzip
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll_examples.site_files import Arrays, parse, write

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of bytes: two zeros, type, number of dimensions, each size as 32 bits, the data."""
    data = gzip.decompress(path.read_bytes())
    num_dimensions = data[3]
    shape = np.frombuffer(data, dtype=">u4", count=num_dimensions, offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def read(split: str) -> Arrays:
    """The "train" or "t10k" part."""
    images, labels = (read_idx(FOLDER / f"{split}-{name}.gz") for name in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    return Arrays(x=images, y=labels.astype(np.int64))


def main() -> None:
    options = parse(__doc__, sites=10, alpha=0.5)
    if not FOLDER.is_dir():
        sys.exit(f"{FOLDER} is not there; install it: apt-get install dataset-fashion-mnist")
    write("fashion", read("train"), read("t10k"), options)


if __name__ == "__main__":
    main()
