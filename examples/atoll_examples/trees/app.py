"""Malignant or benign by boosted trees (XGBoost): each round, every hospital adds a tree to those of all.

All trees of a round correct the same forest, so they are added as they are, and a round's step is their sum.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import xgboost as xgb
from numpy.typing import NDArray
from pydantic import BaseModel

import atoll


@cache  # a payload is read once, not in every round
def tree_of(payload: bytes) -> xgb.Booster:
    return xgb.Booster({"nthread": 1}, model_file=bytearray(payload))


class Trees(atoll.OpaqueApp):
    class Config(BaseModel):
        max_depth: int = 3
        eta: float = 0.06  # of one tree
        subsample: float = 0.9

    def train(self, payloads: Sequence[bytes], seed: int) -> bytes:
        x, y = self._data("train")
        values = self.config.model_dump() | {"seed": seed % 2**31, "nthread": 1}
        data = xgb.DMatrix(x, y, base_margin=self._margin(payloads, x), nthread=1)
        grown = xgb.train(values | {"objective": "binary:logistic", "base_score": 0.5}, data, num_boost_round=1)
        return bytes(grown.save_raw("ubj"))

    def evaluate(self, payloads: Sequence[bytes]) -> dict[str, tuple[float, float]]:
        x, y = self._data("test")
        margin = self._margin(payloads, x)
        loss = np.logaddexp(0, np.where(y == 1, -margin, margin)).sum()
        return {"accuracy": (float(((margin > 0) == (y == 1)).sum()), len(y)), "loss": (float(loss), len(y))}

    def _margin(self, payloads: Sequence[bytes], x: NDArray[np.float32]) -> NDArray[np.float64]:
        parts = (tree_of(payload).inplace_predict(x, predict_type="margin") for payload in payloads)
        return sum(parts, start=np.zeros(len(x)))

    def _data(self, split: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        with np.load(self.source["path"]) as arrays:
            return arrays[f"x_{split}"], arrays[f"y_{split}"]
