"""The callback that writes the metrics of runs for TensorBoard, a folder for each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.transport.news import Evaluated, RoundClosed, RunEnded, RunNews, RunStarted
from atoll.wire.strict import Strict


class TensorBoard:
    """Scalars by round: `train/NAME`, `sites/NAME`, `server/NAME`, and the number of sites and examples of each round."""

    class Options(Strict):
        path: Path

    def __init__(self, options: Options) -> None:
        """Raises ImportError where tensorboard is not installed."""
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ImportError("tensorboard is not installed: pip install 'atoll[tensorboard]'") from None
        self._open, self._path = Writer, options.path
        self._writers: dict[str, Any] = {}
        self._path.mkdir(parents=True, exist_ok=True)  # one that cannot be written is told at the start

    def on(self, news: RunNews) -> None:
        if isinstance(news, RunStarted):
            self._writers[news.run] = self._open(str(self._path / f"{news.name}-{news.run}"))
        elif isinstance(news, RoundClosed):
            about = {"round/sites": float(news.sites), "round/examples": float(news.weight)}
            self._write(news.run, news.round, {**about, **_below("train", news.metrics)})
        elif isinstance(news, Evaluated):
            found = {**_below("sites", news.sites), **_below("server", news.server)}
            self._write(news.run, news.round, found)
        elif isinstance(news, RunEnded) and (writer := self._writers.pop(news.run, None)) is not None:
            writer.close()

    def _write(self, run: str, round_: int, values: Mapping[str, float]) -> None:
        if run not in self._writers:  # it began before this process
            self._writers[run] = self._open(str(self._path / run))
        for name, value in values.items():
            self._writers[run].add_scalar(name, value, round_)
        self._writers[run].flush()


def _below(place: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{place}/{name}": value for name, value in metrics.items()}
