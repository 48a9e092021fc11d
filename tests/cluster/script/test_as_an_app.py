"""A script sends what an app would that trains on the same data in the same order: the same names, and the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from samples.bench import MakeBench
from samples.parallel_world import World
from samples.script_of_app import BATCH, LR, MOMENTUM, build, script
from samples.script_run import PATIENCE_S, STEPS, ScriptRun
from torch.utils.data import TensorDataset

from atoll.aggregation.strategy import resolve
from atoll.cluster.masking import mask_by_strategy
from atoll.cluster.messages import Masked, Train, Trained
from atoll.cluster.open_session import open_session
from atoll.cluster.run_session import RunSession

ROUNDS = 3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


class AsAnApp:
    """The same rounds by an app's session."""

    def __init__(self, make_bench: MakeBench, run: ScriptRun) -> None:
        bench = make_bench(
            app={"lr": LR, "momentum": MOMENTUM, "dtype": "float32"},
            work={"batch_size": BATCH},
            schedule={"kind": "every_steps", "steps": STEPS},
            codec={"kind": "float32"},
        )
        self.run = run
        self.session = open_session(bench.prepare("north"))
        assert isinstance(self.session, RunSession)
        assert self.session.training is not None
        dataset = self.session.training.dataset
        assert isinstance(dataset, TensorDataset)
        self.x, self.y = dataset.tensors

    def update(self, round_: int) -> bytes:
        out = self.run.folder / f"app-{round_}"
        base = str(self.run.base(round_ - 1))
        task = Train(key="t", round=round_, base_version=round_ - 1, base_path=base, out_path=str(out))
        self.trained = self.session.train(task, lambda done, total: None)
        return out.read_bytes()


@pytest.mark.parametrize(("wrap", "size"), [("none", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_script_s_updates_are_those_of_an_app(
    tmp_path: Path, make_bench: MakeBench, world: World, wrap: str, size: int
) -> None:
    with ScriptRun(tmp_path, build, codec={"kind": "float32"}).served() as run, ThreadPoolExecutor(1) as pool:
        app = AsAnApp(make_bench, run)
        ran = pool.submit(world.run, script, size, wrap, run.socket, run.script, app.x, app.y)
        trained = run.play(ROUNDS)
        ran.result(PATIENCE_S)
        for number, one in enumerate(trained, start=1):
            wanted = app.update(number)
            found = (run.folder / f"update-{number}-1").read_bytes()
            assert (one.weight, one.num_bytes, one.num_values) == (
                app.trained.weight,
                app.trained.num_bytes,
                app.trained.num_values,
            )
            if size == 1:
                assert found == wanted
            else:
                values = [torch.frombuffer(bytearray(data[64:]), dtype=torch.float32) for data in (found, wanted)]
                torch.testing.assert_close(*values, rtol=0, atol=1e-6)
                assert found[:64] == wanted[:64]


def test_a_script_writes_masked_inputs(tmp_path: Path, make_bench: MakeBench, world: World) -> None:
    """Between two rounds, as the agent asks; the bytes are those that any worker makes of the update."""
    bench = make_bench()
    with ScriptRun(tmp_path, build).served() as run, ThreadPoolExecutor(1) as pool:
        app = AsAnApp(make_bench, run)
        ran = pool.submit(world.run, script, 1, "none", run.socket, run.script, app.x, app.y)
        run.begin()
        run.ask(run.train(1))
        run.answer(Trained)
        update = str(run.folder / "update-1-1")
        out = run.folder / "masked"
        run.ask(bench.mask(private_path=update, out_path=str(out)))
        masked = run.answer(Masked)
        strategy = resolve(run.job)
        layout = strategy.fragments(run.manifest).whole
        request = bench.mask(private_path=update, out_path=str(run.folder / "again"))
        again = mask_by_strategy(strategy, layout, request, bytes.fromhex("07" * 32), on_slice=lambda: None)
        assert masked == again
        assert out.read_bytes() == (run.folder / "again").read_bytes()
        run.end()
        ran.result(PATIENCE_S)
