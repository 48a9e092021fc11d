"""Spread the source text of Python's standard library over sites: `python -m atoll_examples.letters.prepare --out DIR`.

Each site has modules of its own, and no data set is downloaded: the text is that of the Python that runs this.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.simulations.partition import iid
from atoll_examples.site_files import parse, save

LENGTH = 65  # characters of an example: 64 to read, each of which predicts the next
PER_MODULE = 20  # so that no module outweighs the others


def main() -> None:
    options = parse(__doc__, sites=3, alpha=100.0)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    modules = list(texts(Path(os.__file__).parent))
    parts = iid(np.zeros(len(modules), dtype=np.int64), options.sites, seed=options.seed)
    tests = []
    for site, part in enumerate(parts, start=1):
        rows = np.concatenate([modules[number] for number in part])
        rows, test = rows[: -len(rows) // 10], rows[-len(rows) // 10 :]
        tests.append(test)
        path = out / f"site-{site}.npz"
        save(path, x_train=rows, x_test=test)
        print(
            f'site-{site}: {len(rows)} lines of {len(part)} modules; in its site.toml:\n  [data.letters]\n  path = "{path}"'
        )
    save(out / "test.npz", x_test=np.concatenate(tests))


def texts(folder: Path) -> Iterator[NDArray[np.uint8]]:
    """The beginning of each module as rows of characters; those beyond ASCII become the last of it."""
    for path in sorted(folder.glob("*.py")):
        characters = np.array([min(ord(letter), 127) for letter in path.read_text(encoding="utf-8")], dtype=np.uint8)
        num_rows = min(PER_MODULE, len(characters) // LENGTH)
        if num_rows:
            yield characters[: num_rows * LENGTH].reshape(num_rows, LENGTH)


if __name__ == "__main__":
    main()
