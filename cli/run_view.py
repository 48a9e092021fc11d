"""How a run looks to a person: one line, a table of its sites, a table of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from atoll.cli.answers_view import answers
from atoll.cli.output import one_line, size
from atoll.cli.snapshots import headline_metric, metric_values
from atoll.wire.names import PERSONAL

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from atoll.wire import control_pb2, runs_pb2

ENDED = frozenset({"finished", "failed", "stopped"})
ROUNDS_SHOWN = 12  # the rest of a terminal of 24 lines is for the sites
SITES_SHOWN = 40
BAR_WIDTH = 24
ENDLESS = 10_000  # columns of a pipe
BESIDE = 60  # columns from which what a site says, or a bar, fits beside its state
WIDE = 80  # columns of a terminal that nobody has resized
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
    why = f": {one_line(snapshot.reason.message)}" if snapshot.reason.message else ""
    return f"run {snapshot.run} ({snapshot.name}) is {snapshot.status}{where}{why}"


def origin_line(snapshot: runs_pb2.RunSnapshot) -> str:
    """What the run goes on from; empty where it began anew."""
    return f"goes on from run {snapshot.continues}" if snapshot.continues else ""


def best_line(snapshot: runs_pb2.RunSnapshot) -> str:
    """Which version is the best of those that are judged, where the job says by what."""
    record = next((record for record in snapshot.rounds if record.version == snapshot.best_version), None)
    return f"best version: {record.version}, of round {record.round}" if record is not None else ""


def round_line(record: runs_pb2.RoundRecord, num_rounds: int) -> str:
    """One committed round in one line."""
    parts = [f"round {record.round} of {num_rounds}", f"{record.num_sites} sites", f"{record.seconds:.1f} s"]
    parts += [f"{title} {value:.4f}" for title, value in _judgements(record)]
    if record.missing:
        told = record.reasons
        reasons = {site: f" ({one_line(told[site])})" if site in told else "" for site in record.missing}
        parts.append("without " + ", ".join(site + reason for site, reason in reasons.items()))
    return ", ".join(parts)


def render(snapshot: runs_pb2.RunSnapshot, width: int = WIDE) -> RenderableType:
    """The whole view of one moment, in so many columns."""
    from rich.console import Group
    from rich.text import Text

    ended = snapshot.status in ENDED
    parts: list[RenderableType] = [Text(status_line(snapshot), style="bold")]
    parts += [Text(text) for text in (origin_line(snapshot), best_line(snapshot)) if text]
    if snapshot.sites and snapshot.status != "finished":
        parts.append(sites_table(snapshot, width))
        if width < BESIDE:
            parts += [Text(f"{site.site}: {one_line(site.detail)}") for site in snapshot.sites if site.detail]
    parts += [Text(line) for line in (*exchange_lines(snapshot), *secure_lines(snapshot))]
    if snapshot.rounds:
        parts.append(rounds_table(snapshot, newest=None if ended else ROUNDS_SHOWN, width=width))
        parts += answers(snapshot.rounds[-1])
    return Group(*parts)


def exchange_lines(snapshot: runs_pb2.RunSnapshot) -> Iterator[str]:
    """Of gossip: how many pairs met directly, and each that goes through the server, with what was tried."""
    if snapshot.HasField("exchange"):
        found = snapshot.exchange
        yield f"exchange of round {found.round}: {found.num_direct} of {found.num_pairs} pairs directly"
        for pair in found.relayed:
            yield f"through the server: {one_line(pair)}"


def secure_lines(snapshot: runs_pb2.RunSnapshot) -> Iterator[str]:
    """Of secure aggregation: what the newest sum was protected by, who dropped out of it, and who lied."""
    if snapshot.rounds and snapshot.rounds[-1].HasField("secure"):
        record = snapshot.rounds[-1]
        found = record.secure
        threat = "a server that lies" if found.threat == "active" else "a server that only looks"
        sums = f"{found.parts} sums" if found.parts else "sum"
        yield (
            f"masked in round {record.round}: {sums} of {record.num_sites} of {found.num_sites} sites, at least "
            f"{found.fewest_survivors}; {found.threshold} shares rebuild a secret; holds against {threat} with up to "
            f"{found.num_corrupt} sites on its side; {found.sessions} session{'s' if found.sessions > 1 else ''}"
        )
        if found.dropped:
            yield f"dropped out of the sum: {', '.join(found.dropped)}"
        for site, what in sorted(found.liars.items()):
            yield f"{site} {one_line(what)}"


def lines(snapshot: runs_pb2.RunSnapshot) -> list[str]:
    """The same for a pipe or a file: without colours, and each row on one line, however long."""
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=ENDLESS, force_terminal=False, color_system=None).print(render(snapshot, ENDLESS))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def sites_table(snapshot: runs_pb2.RunSnapshot, width: int = WIDE) -> Table:
    """Each site's state and, while it works, how many of its steps are done; in a wide one, what it says."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    wide = width >= BESIDE
    table = Table("site", "state", "steps", *([""] if wide else []), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[:3]:
        column.no_wrap = True
    for site in snapshot.sites[:SITES_SHOWN]:
        bar = ProgressBar(total=site.total, completed=min(site.done, site.total), width=BAR_WIDTH)
        steps = Text(f"{site.done}/{site.total}" if site.total else "")
        state = Text(site.state, style=STYLES.get(site.state, ""))
        last = bar if site.total and not site.detail else Text(one_line(site.detail))
        table.add_row(Text(site.site), state, steps, *([last] if wide else []))
    if len(snapshot.sites) > SITES_SHOWN:
        table.caption = f"and {len(snapshot.sites) - SITES_SHOWN} more"
    return table


def rounds_table(snapshot: runs_pb2.RunSnapshot, *, newest: int | None = None, width: int = WIDE) -> Table:
    """The committed rounds, oldest first; the `newest` ones alone where that is given.

    Numbers are never cut: where `width` is not enough, what matters least is left out.
    """
    from rich.table import Table
    from rich.text import Text

    records = list(snapshot.rounds)[-newest if newest else 0 :]
    titles = list(dict.fromkeys(title for record in records for title, _ in _judgements(record)))
    missing = any(record.missing for record in records)
    columns = ["round", "sites", *titles, "seconds", "up", *(["missing"] if missing else [])]
    rows = [_cells(record) for record in records]
    for title in ("up", "seconds", "sites", "training loss"):
        if sum(_least_width(column, rows) + 2 for column in columns) - 2 > width and title in columns:
            columns.remove(title)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in columns:
        names = title == "missing"
        table.add_column(
            title, justify="left" if names else "right", min_width=0 if names else _least_width(title, rows)
        )
    for row in rows:
        table.add_row(*(Text(row.get(title, "")) for title in columns))
    return table


def _cells(record: runs_pb2.RoundRecord) -> dict[str, str]:
    """What the table says of a round, by title of the column."""
    return {
        "round": str(record.round),
        "sites": str(record.num_sites),
        **{title: f"{value:.4f}" for title, value in _judgements(record)},
        "seconds": f"{record.seconds:.1f}",
        "up": size(record.bytes_up),
        "missing": ", ".join(record.missing),
    }


def _least_width(title: str, rows: Sequence[Mapping[str, str]]) -> int:
    """Columns that a column of the table takes when its title breaks between words, and names do."""
    cells = [row.get(title, "") for row in rows]
    parts = [part for cell in cells for part in cell.split()] if title == "missing" else cells
    return max(map(len, [*title.split(), *parts]))


def _judgements(record: runs_pb2.RoundRecord) -> Iterator[tuple[str, float]]:
    """What people look at first: the loss of the training, and the headline metric of each evaluation."""
    loss = metric_values(record.train_metrics).get("loss")
    if loss is not None:
        yield "training loss", loss
    if found := _headline(record.evaluate_metrics):
        yield f"{found[0]} at sites", found[1]
        own = metric_values(record.evaluate_metrics).get(PERSONAL + found[0])
        if own is not None:
            yield f"personal {found[0]}", own
    if found := _headline(record.server_metrics):
        yield f"{found[0]} at server", found[1]


def _headline(sums: Mapping[str, control_pb2.MetricSum]) -> tuple[str, float] | None:
    return headline_metric(metric_values(sums))
