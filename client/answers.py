"""What a site answers, as messages, and what it reads of a task. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.aggregation.statistics import FeatureStatistics
from atoll.cluster.messages import MetricSums, Prepared
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import Malformed

TASK_CONFIG_BYTES = 64 << 10  # as wire/control.proto bounds it


def accept_of(prepared: Prepared) -> pb.Accept:
    """That the site takes part. A run that trains nothing has no weights; the field wants one."""
    accept = pb.Accept(max_weight=prepared.max_weight or 1)
    if prepared.num_sites:
        accept.region.CopyFrom(pb.Region(num_sites=prepared.num_sites, sum_weights=prepared.sum_weights))
    return accept


def config_of(task: pb.Task) -> dict[str, Any]:
    """What a task has otherwise than the job. Raises Malformed where it is no JSON object, or too long."""
    if len(task.config) > TASK_CONFIG_BYTES:
        raise Malformed(
            f"task {task.key.task!r}: config of {len(task.config)} bytes", field="config", bound=TASK_CONFIG_BYTES
        )
    try:
        config = json.loads(task.config or b"{}")
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise Malformed(f"task {task.key.task!r}: config is not a JSON object", run=task.key.run, field="config")
    return config


def sums_of(metrics: MetricSums) -> dict[str, pb.MetricSum]:
    """Metrics as a result carries them."""
    return {name: pb.MetricSum(sum=total, count=count) for name, (total, count) in metrics.items()}


def statistics_to_messages(features: Mapping[str, FeatureStatistics]) -> list[pb.FeatureStatistics]:
    """Statistics as a result carries them; `server.surveys` reads them."""
    return [
        pb.FeatureStatistics(
            name=name,
            count=feature.count,
            sum=feature.total,
            sum_low=feature.total_low,
            squares=feature.squares,
            stops=feature.stops,
            counts=feature.counts,
        )
        for name, feature in sorted(features.items())
    ]
