"""Several nodes, of which the first alone sees the agent's files: what the site sends is that of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples.bench import MakeBench
from samples.parallel_sessions import ignore, play_on_nodes
from samples.parallel_world import World

from atoll.cluster.open_session import open_session
from atoll.wire.manifest import Manifest

HEADER = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2, "tp_plan": {"0": "colwise", "3": "rowwise"}},
    "pp": {"pp": 2, "pipeline": {"microbatches": 3}},
    "fsdp pp": {"dp_shard": 2, "pp": 2, "pipeline": {"microbatches": 2}},
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as found:
        yield found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_without_the_files_hand_their_tensors_over_one_by_one(
    world: World, make_bench: MakeBench, installed: Path, layout: str
) -> None:
    bench = make_bench(work={"epochs": 1, "batch_size": 8})
    alone = open_session(bench.prepare("north"))
    alone.train(bench.train("alone"), ignore)
    judged = alone.evaluate(bench.evaluate(), ignore)
    prepare = bench.prepare("north", parallel=LAYOUTS[layout])
    count = 4 if layout == "fsdp pp" else 2
    trains = [bench.train("first"), bench.train("again")]
    answers = world.run(play_on_nodes, count, installed, prepare, trains, bench.evaluate(), count // 2)
    assert bench.update("first") == bench.update("again")
    own, other = bench.update("first"), bench.update("alone")
    assert own[:HEADER] == other[:HEADER]
    found, wanted = (np.frombuffer(update[HEADER:], dtype="<f8") for update in (own, other))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert np.abs(wanted).max() > 1e-3
    for (_, _, evaluated), most in answers:
        assert evaluated.metrics["accuracy"] == judged.metrics["accuracy"]
        sizes = [spec.num_bytes for spec in Manifest.decode(Path(prepare.manifest_path).read_bytes())]
        assert most <= max(sizes) < sum(sizes)  # one tensor at a time, and never the whole model
    assert answers[-1][1] > 0


def test_a_version_that_the_first_node_does_not_see_is_told_by_all(
    world: World, make_bench: MakeBench, installed: Path
) -> None:
    bench = make_bench(work={"steps": 1, "batch_size": 8})
    prepare = bench.prepare("north", parallel=LAYOUTS["ddp"])
    (Path(prepare.manifest_path)).unlink()
    with pytest.raises(
        AssertionError, match=r"rank 0: [\s\S]*must see the site's folder[\s\S]*rank 1: [\s\S]*must see"
    ):
        world.run(play_on_nodes, 2, installed, prepare, [], bench.evaluate(), 1)
