"""How examples and classes lie over the sites of a simulation, before anything is trained: a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atoll.cluster.app import App
from atoll.simulations.figures import new_figure, save_figure
from atoll.simulations.opening import app_of, located_job, sites_of
from atoll.simulations.sites import Partition, labels_of
from atoll.wire.errors import AppFailed, ConfigError
from atoll.wire.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED_SITES = 30  # more have no room for their names under a picture
LEGEND_CLASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Examples by site and class. `counts_SC` has one column, of all examples, where the data has no classes."""

    sites: Sequence[str]
    classes: Sequence[str]  # none where the data has none
    counts_SC: NDArray[np.int64]

    @property
    def sizes_S(self) -> NDArray[np.int64]:
        """Examples of each site."""
        sizes: NDArray[np.int64] = self.counts_SC.sum(axis=1)
        return sizes

    @property
    def num_classes_S(self) -> NDArray[np.int64]:
        """Classes that each site has an example of."""
        return np.asarray((self.counts_SC > 0).sum(axis=1), dtype=np.int64)

    @property
    def distance(self) -> float:
        """Mean over sites of the total-variation distance of their classes from those of all: 0 alike, near 1 apart."""
        shares_SC = self.counts_SC / np.maximum(self.sizes_S[:, None], 1)
        whole_C = self.counts_SC.sum(axis=0) / max(int(self.counts_SC.sum()), 1)
        return float(np.abs(shares_SC - whole_C).sum(axis=1).mean() / 2)

    def summary(self) -> str:
        """The same in a line."""
        sizes_S = self.sizes_S
        text = (
            f"{len(self.sites)} sites, {int(sizes_S.sum())} examples, "
            f"{int(sizes_S.min())} to {int(sizes_S.max())} at a site (median {float(np.median(sizes_S)):g})"
        )
        if not self.classes:
            return f"{text}; no classes"
        found_S = self.num_classes_S
        return (
            f"{text}; {len(self.classes)} classes, {int(found_S.min())} to {int(found_S.max())} at a site, "
            f"distance from the whole {self.distance:.2f}"
        )

    def plot(self) -> Figure:
        """A bar for each site: its examples, by class. Raises ConfigError where matplotlib is not installed."""
        from matplotlib import colormaps

        figure = new_figure(width=min(7 + len(self.sites) / 20, 14), height=4.5)
        axes = figure.add_subplot()
        places, many = np.arange(len(self.sites)), len(self.sites) > NAMED_SITES
        below_S = np.zeros(len(self.sites), dtype=np.int64)
        colours = colormaps["tab10" if len(self.classes) <= 10 else "tab20" if len(self.classes) <= 20 else "viridis"]
        for number, column_S in enumerate(self.counts_SC.T):
            label = self.classes[number] if self.classes else "examples"
            colour = colours(number if len(self.classes) <= 20 else number / len(self.classes))
            if many:
                axes.fill_between(
                    places, below_S, below_S + column_S, step="mid", color=colour, label=label, linewidth=0
                )
            else:
                axes.bar(places, column_S, 0.85, bottom=below_S, color=colour, label=label)
            below_S = below_S + column_S
        axes.set(ylabel="training examples", xlim=(-0.6, len(self.sites) - 0.4), ylim=(0, 1.05 * below_S.max()))
        axes.set_title(self.summary().replace("; ", "\n"), fontsize=9)
        if many:
            axes.set_xlabel("site")
        elif len(self.sites) > 8:
            axes.set_xticks(places, self.sites, rotation=45, ha="right")
        else:
            axes.set_xticks(places, self.sites)
        if 0 < len(self.classes) <= LEGEND_CLASSES:
            axes.legend(title="class", bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8)
        return figure

    def save(self, path: Path) -> None:
        """Writes the picture as a PNG. Raises LocalError; ConfigError where matplotlib is not installed."""
        save_figure(self.plot(), path)


def preview(
    job: Job | Mapping[str, Any] | Path | str,
    *,
    sites: int | Mapping[str, Mapping[str, Any]] | None = None,
    app: type[App] | None = None,
    source: Mapping[str, Any] | None = None,
    partition: Partition | None = None,
    home: Path | None = None,
) -> Preview:
    """How the training data of a simulation lies over its sites; arguments as those of `atoll.simulate`.

    Raises:
        ConfigError: the job, its app's values or the partition cannot be used; names key, value and bound.
        AppFailed: a site has no training data; names it.
    """
    with located_job(job) as parsed:
        kind, settings = app_of(parsed, app, home)
        source = settings.source(parsed.data_name) if source is None else source
        found = sites_of(parsed, kind, sites, source, None, partition or Partition())
        columns = [_labels_at(name, found.data(name, "train")) for name in found.names]
    return _counted(tuple(found.names), columns)


def _labels_at(site: str, dataset: Any) -> NDArray[Any] | int:
    """The class of each example; their number where they have none."""
    if dataset is None:
        text = f'{site}: data("train") is None: this site has nothing to train on'
        raise AppFailed(text, site=site, field="data.train")
    try:
        return labels_of(dataset)
    except ConfigError:  # no class for each example, which iid and quantity need not
        return len(dataset)


def _counted(sites: Sequence[str], columns: Sequence[NDArray[Any] | int]) -> Preview:
    labelled = [column for column in columns if not isinstance(column, int)]
    known = np.unique(np.concatenate(labelled)) if len(labelled) == len(columns) else np.empty(0)
    if not 0 < len(known) <= _most_classes(columns):
        sizes = [[column if isinstance(column, int) else len(column)] for column in columns]
        return Preview(sites=sites, classes=(), counts_SC=np.array(sizes, dtype=np.int64))
    counts_SC = np.stack([np.bincount(np.searchsorted(known, column), minlength=len(known)) for column in labelled])
    return Preview(sites=sites, classes=tuple(str(name) for name in known), counts_SC=counts_SC.astype(np.int64))


def _most_classes(columns: Sequence[NDArray[Any] | int]) -> int:
    """A last tensor of real numbers is a target and no class."""
    whole = [column for column in columns if not isinstance(column, int)]
    return (
        10_000 if all(np.issubdtype(column.dtype, np.integer) or column.dtype.kind in "SUb" for column in whole) else 0
    )
