"""How a run looks to a person: one line, a table of its sites, a table of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from atoll.cli.output import size
from atoll.cli.snapshots import headline_metric, metric_values

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atoll.wire import control_pb2, runs_pb2

ENDED = frozenset({"finished", "failed", "stopped"})
ROUNDS_SHOWN = 12  # the rest of a terminal of 24 lines is for the sites
SITES_SHOWN = 40
BAR_WIDTH = 24
STYLES: Mapping[str, str] = {
    "training": "cyan",
    "evaluating": "cyan",
    "sending": "blue",
    "accepted": "green",
    "failed": "red",
    "gone": "red",
    "declined": "yellow",
}


def status_line(snapshot: runs_pb2.RunSnapshot) -> str:
    """The run in one line, with the reason where there is one."""
    where = f", round {snapshot.round} of {snapshot.num_rounds}" if snapshot.status == "running" else ""
    why = f": {snapshot.reason.message}" if snapshot.reason.message else ""
    return f"run {snapshot.run} ({snapshot.name}) is {snapshot.status}{where}{why}"


def round_line(record: runs_pb2.RoundRecord, num_rounds: int) -> str:
    """One committed round in one line."""
    parts = [f"round {record.round} of {num_rounds}", f"{record.num_sites} sites", f"{record.seconds:.1f} s"]
    parts += [f"{title} {value:.4f}" for title, value in _judgements(record)]
    if record.missing:
        reasons = {site: f" ({record.reasons[site]})" if site in record.reasons else "" for site in record.missing}
        parts.append("without " + ", ".join(site + reason for site, reason in reasons.items()))
    return ", ".join(parts)


def render(snapshot: runs_pb2.RunSnapshot) -> RenderableType:
    """The whole view of one moment."""
    from rich.console import Group
    from rich.text import Text

    ended = snapshot.status in ENDED
    parts: list[RenderableType] = [Text(status_line(snapshot), style="bold")]
    if snapshot.sites and snapshot.status != "finished":
        parts.append(sites_table(snapshot))
    if snapshot.rounds:
        parts.append(rounds_table(snapshot, newest=None if ended else ROUNDS_SHOWN))
    return Group(*parts)


def sites_table(snapshot: runs_pb2.RunSnapshot) -> Table:
    """Each site's state and, while it works, how many of its steps are done."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table("site", "state", "steps", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for site in snapshot.sites[:SITES_SHOWN]:
        bar = ProgressBar(total=site.total, completed=min(site.done, site.total), width=BAR_WIDTH)
        steps = Text(f"{site.done}/{site.total}" if site.total else "")
        state = Text(site.state, style=STYLES.get(site.state, ""))
        table.add_row(Text(site.site), state, steps, bar if site.total and not site.detail else Text(site.detail))
    if len(snapshot.sites) > SITES_SHOWN:
        table.caption = f"and {len(snapshot.sites) - SITES_SHOWN} more"
    return table


def rounds_table(snapshot: runs_pb2.RunSnapshot, *, newest: int | None = None) -> Table:
    """The committed rounds, oldest first; the `newest` ones alone where that is given."""
    from rich.table import Table
    from rich.text import Text

    records = list(snapshot.rounds)[-newest if newest else 0 :]
    titles = list(dict.fromkeys(title for record in records for title, _ in _judgements(record)))
    missing = any(record.missing for record in records)
    columns = ("round", "sites", *titles, "seconds", "up", *(("missing",) if missing else ()))
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[: len(titles) + 4]:
        column.justify = "right"
    for record in records:
        values = dict(_judgements(record))
        shown = (f"{values[title]:.4f}" if title in values else "" for title in titles)
        cells = (str(record.round), str(record.num_sites), *shown, f"{record.seconds:.1f}", size(record.bytes_up))
        table.add_row(*(Text(cell) for cell in (*cells, *((", ".join(record.missing),) if missing else ()))))
    return table


def _judgements(record: runs_pb2.RoundRecord) -> Iterator[tuple[str, float]]:
    """What people look at first: the loss of the training, and the headline metric of each evaluation."""
    loss = metric_values(record.train_metrics).get("loss")
    if loss is not None:
        yield "training loss", loss
    if found := _headline(record.evaluate_metrics):
        yield f"{found[0]} at sites", found[1]
    if found := _headline(record.server_metrics):
        yield f"{found[0]} at server", found[1]


def _headline(sums: Mapping[str, control_pb2.MetricSum]) -> tuple[str, float] | None:
    return headline_metric(metric_values(sums))
