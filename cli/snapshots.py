"""A run's state as plain values: what `--json` prints, and what the tables for people are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from atoll.wire.names import PERSONAL
from atoll.wire.secure_record import secure_values

if TYPE_CHECKING:
    from atoll.wire import control_pb2, errors_pb2, runs_pb2


def metric_values(sums: Mapping[str, control_pb2.MetricSum]) -> dict[str, float | None]:
    """The metrics by name, sum divided by count; None where nothing was counted or the value is not finite."""
    return {name: _quotient(sums[name]) for name in sorted(sums)}


def _quotient(metric: control_pb2.MetricSum) -> float | None:
    value = metric.sum / metric.count if metric.count > 0 else math.nan
    return value if math.isfinite(value) else None


def timestamp(unix_s: float) -> str | None:
    """An instant in ISO 8601, UTC, whole seconds; None where it never was."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds") if unix_s > 0 else None


def reason(detail: errors_pb2.ErrorDetail) -> dict[str, Any] | None:
    """Why something failed or waits, with the fields that say where; None where there is no reason."""
    if not detail.message and not detail.kind:
        return None
    named = {field: getattr(detail, field) for field in ("site", "round", "field", "value", "bound")}
    return {"kind": detail.kind, "message": detail.message, **{key: value for key, value in named.items() if value}}


def feature_record(summary: runs_pb2.FeatureSummary) -> dict[str, Any]:
    """One feature over sites; `low` and `high` of a bin bound how many examples lie in it."""
    edges: list[float | None] = [None, *summary.edges, None]
    bins = zip(edges, edges[1:], summary.least, summary.most, strict=False)
    return {
        "sites": summary.num_sites,
        "withheld": summary.num_withheld,
        "count": summary.count,
        "mean": summary.mean if summary.HasField("mean") else None,
        "variance": summary.variance if summary.HasField("variance") else None,
        "histogram": [{"from": a, "to": b, "low": low, "high": high} for a, b, low, high in bins],
        "quantiles": [
            {"q": found.q, **{key: getattr(found, key) if found.HasField(key) else None for key in _BOUNDS}}
            for found in summary.quantiles
        ],
    }


_BOUNDS = ("value", "lower", "upper")


def round_record(record: runs_pb2.RoundRecord) -> dict[str, Any]:
    """One committed round."""
    more: dict[str, Any] = {}
    if record.features:
        more["features"] = {summary.name: feature_record(summary) for summary in record.features}
    if record.by_site:
        more["by_site"] = {answer.site: _answer(answer) for answer in record.by_site}
    return {
        **more,
        "round": record.round,
        "version": record.version,
        "sites": record.num_sites,
        "weight": record.weight,
        "seconds": round(record.seconds, 3),
        "train": metric_values(record.train_metrics),
        "evaluate": metric_values(record.evaluate_metrics),
        "server": metric_values(record.server_metrics),
        "missing": {site: record.reasons.get(site, "") for site in record.missing},
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        **_exchange(record),
        **_secure(record),
    }


def _answer(answer: runs_pb2.SiteAnswer) -> dict[str, Any]:
    if answer.features:
        return {"features": {summary.name: feature_record(summary) for summary in answer.features}}
    return {"evaluate": metric_values(answer.metrics)}


def _exchange(of: runs_pb2.RoundRecord | runs_pb2.RunSnapshot) -> dict[str, Any]:
    """Of gossip: how neighbours exchanged their models; nothing of other runs."""
    if not of.HasField("exchange"):
        return {}
    found = of.exchange
    counts = {"round": found.round, "pairs": found.num_pairs, "direct": found.num_direct}
    return {"exchange": {**counts, "relayed": list(found.relayed)}}


def _secure(record: runs_pb2.RoundRecord) -> dict[str, Any]:
    """Of secure aggregation: how the round's sum was protected; nothing of other runs."""
    return {"secure": secure_values(record.secure)} if record.HasField("secure") else {}


def run_record(snapshot: runs_pb2.RunSnapshot, *, rounds: bool = True) -> dict[str, Any]:
    """A run; without its sites and rounds where `rounds` is false, as in the list of all runs."""
    record: dict[str, Any] = {
        "run": snapshot.run,
        "name": snapshot.name,
        "status": snapshot.status,
        "reason": reason(snapshot.reason),
        "round": snapshot.round,
        "num_rounds": snapshot.num_rounds,
        "version": snapshot.version,
        "best_version": snapshot.best_version or None,
        "continues": snapshot.continues or None,
        "submitted_by": snapshot.submitted_by,
        "submitted_at": timestamp(snapshot.submitted_at_unix_s),
    }
    if rounds:
        record["sites"] = [
            {"site": site.site, "state": site.state, "done": site.done, "total": site.total, "detail": site.detail}
            for site in snapshot.sites
        ]
        record["rounds"] = [round_record(entry) for entry in snapshot.rounds]
        record.update(_exchange(snapshot))
    return record


def headline_metric(values: Mapping[str, float | None]) -> tuple[str, float] | None:
    """The metric that people look at first: accuracy where there is one, else the first that is no loss, else the loss.

    Those of personal models stand beside that of the global one, and never in its place.
    """
    known = {name: value for name, value in values.items() if value is not None and not name.startswith(PERSONAL)}
    ranked = sorted(known, key=lambda name: (name != "accuracy", name == "loss", name))
    return (ranked[0], known[ranked[0]]) if ranked else None
