"""Spread scikit-learn's digits over sites: `python -m atoll_examples.digits.prepare --sites 3 --out DIR`."""

import numpy as np
from sklearn.datasets import load_digits

from atoll_examples.site_files import Arrays, hold_back, parse, write


def main() -> None:
    options = parse(__doc__, sites=3, alpha=1.0)
    pixels, labels = load_digits(return_X_y=True)
    data = Arrays(x=np.asarray(pixels / 16, dtype=np.float32), y=np.asarray(labels, dtype=np.int64))
    write("digits", *hold_back(data), options)


if __name__ == "__main__":
    main()
