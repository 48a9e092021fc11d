"""Spread scikit-learn's breast cancer data over hospitals: `python -m atoll_examples.trees.prepare --out DIR`."""

import numpy as np
from sklearn.datasets import load_breast_cancer

from atoll_examples.site_files import Arrays, hold_back, parse, write


def main() -> None:
    options = parse(__doc__, sites=5, alpha=1.0)
    measurements, labels = load_breast_cancer(return_X_y=True)
    data = Arrays(x=np.asarray(measurements, dtype=np.float32), y=np.asarray(labels, dtype=np.int64))
    write("trees", *hold_back(data), options)


if __name__ == "__main__":
    main()
