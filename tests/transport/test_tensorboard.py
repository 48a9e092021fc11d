"""What the callback for TensorBoard has written, as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path

from samples.simulated import Points, points_job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import atoll
from atoll.transport.callbacks import Callbacks
from atoll.transport.news import SnapshotReader
from atoll.wire.job import Part
from atoll.wire.runs_pb2 import RunSnapshot


def test_tensorboard_reads_the_metrics_of_a_run_by_round(tmp_path: Path) -> None:
    part = Part.model_validate({"kind": "tensorboard", "path": str(tmp_path)})
    callbacks, reader = Callbacks({"board": part}), SnapshotReader()

    def show(snapshot: RunSnapshot) -> None:
        for news in reader.read(snapshot):
            callbacks.tell(news)

    result = atoll.simulate(points_job(rounds=3), app=Points, sites=6, source={}, show=show)
    callbacks.close()
    found = EventAccumulator(str(tmp_path / "points-simulation"))
    found.Reload()
    assert set(found.Tags()["tensors"]) == {
        "round/examples", "round/sites", "sites/accuracy", "sites/loss", "train/loss",
    }  # fmt: skip
    events = found.Tensors("sites/accuracy")
    assert [event.step for event in events] == [1, 2, 3]
    values = [float(event.tensor_proto.float_val[0]) for event in events]
    assert all(
        abs(value - result.metrics("accuracy")[event.step]) < 1e-6 for value, event in zip(values, events, strict=True)
    )
