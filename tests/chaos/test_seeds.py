"""Random fault scripts against one federation: whatever happens, the run ends with the undisturbed bytes.

One seed is part of the tests; `scripts/chaos --seeds 200` runs 200 of them, `scripts/chaos --seed 17` repeats one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chaos.conftest import SITES, alter, restore
from chaos.relay import Relay
from chaos.script import AT_ONCE, Event, Kill, KillAtStep, KillWorker, Pause, draw
from integration.federation import Federation, Process
from integration.trial import trial_job

JOB = trial_job(rounds=3, strategy='kind = "fedadam"\ncodec = { kind = "int8" }')
PARTS = ("server", *SITES)
SHORT = 5  # the seed that is part of the tests
REVIVED_AFTER_S = 0.3


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        one, many = (metafunc.config.getoption(name, default=None) for name in ("seed", "seeds"))
        metafunc.parametrize("seed", [one] if one is not None else range(1, many + 1) if many else [SHORT])


@pytest.fixture(scope="module")
def stage(made: tuple[Federation, Relay]) -> Iterator[Stage]:
    """The federation with all its processes ready to die at a step, and what an undisturbed run gives and takes."""
    federation, relay = made
    stage = Stage(federation, relay)
    try:
        for name in PARTS:
            stage.revive(name)
        began_s = time.monotonic()
        state = federation.finish(JOB)
        stage.undisturbed_s = time.monotonic() - began_s
        stage.undisturbed = federation.model_hash(state["run"])
        yield stage
    finally:
        restore(federation, *PARTS)


def test_a_random_script_ends_with_the_same_bytes(stage: Stage, seed: int) -> None:
    script = draw(seed)
    lines = "\n".join(f"  {event}" for event in script)
    print(f"\nseed {seed}, undisturbed in {stage.undisturbed_s:.1f} s:\n{lines}")
    try:
        state = stage.perform(script)
        assert state["status"] == "finished", state
        assert [record["sites"] for record in state["rounds"]] == [3, 3, 3], state
        assert stage.federation.model_hash(state["run"]) == stage.undisturbed
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: again with: scripts/chaos --seed {seed}\n{lines}\n{error}") from None


class Stage:
    """A federation whose processes are killed, stopped and started again as a script says."""

    def __init__(self, federation: Federation, relay: Relay) -> None:
        self.federation, self.relay = federation, relay
        self.undisturbed, self.undisturbed_s = "", 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []  # what is still to be done, and when
        self._reviving: set[str] = set()

    def perform(self, script: tuple[Event, ...]) -> dict[str, Any]:
        """Submit the job, have happen what the script says, and see the run to its end."""
        federation = self.federation
        for event in script:
            if event.at == AT_ONCE:
                self._strike(event)
        before = self._runs()
        submitting = federation.start_submitting(JOB)
        # A person who meets no server at all is told so at once; from here on its absence is waited out.
        federation.wait_for(lambda: self._runs() > before, "the server has heard of the run")
        with ThreadPoolExecutor(1) as watching:
            ending = watching.submit(lambda: federation.wait_for_end(federation.submitted(submitting)))
            began_s = time.monotonic()
            for event in script:
                if event.at != AT_ONCE:
                    self._later(began_s + event.at * self.undisturbed_s, self._strike, event)
            while not ending.done():
                self._do_what_is_due()
                self._revive_the_dead()
                time.sleep(0.02)
        self._calm()
        return ending.result()

    def revive(self, name: str) -> None:
        """Start a part, anew where it runs."""
        self._reviving.discard(name)
        alter(self.federation, name, fatal=str(self._fatal(name)))

    def _strike(self, event: Event) -> None:
        process = self._process(event.target)
        match event.fault:
            case Kill(away_s=away_s):
                process.kill()
                self._reviving.add(event.target)
                self._later(time.monotonic() + away_s, self.revive, event.target)
            case KillAtStep(step=step):
                self._fatal(event.target).write_text(step)
            case KillWorker():
                for pid in self.federation.workers(event.target):
                    os.kill(pid, signal.SIGKILL)
            case Pause(for_s=for_s):
                _signal(process, signal.SIGSTOP)
                self._later(time.monotonic() + for_s, _signal, process, signal.SIGCONT)
            case fault:
                self.relay.do(fault)

    def _later(self, at_s: float, do: Callable[..., None], *arguments: object) -> None:
        self._due.append((at_s, lambda: do(*arguments)))

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        for item in [item for item in self._due if item[0] <= now_s]:
            self._due.remove(item)
            item[1]()

    def _revive_the_dead(self) -> None:
        for name in PARTS:
            if name not in self._reviving and not self._process(name).running:
                self._reviving.add(name)
                self._later(time.monotonic() + REVIVED_AFTER_S, self.revive, name)

    def _calm(self) -> None:
        """After a script: all parts run, and nothing is to come."""
        self._due.clear()
        self.relay.mend()
        for name in PARTS:
            self._fatal(name).unlink(missing_ok=True)
            _signal(self._process(name), signal.SIGCONT)
            if not self._process(name).running:
                self.revive(name)
        self._reviving.clear()

    def _runs(self) -> set[str]:
        """The runs that the server has models of, or awaits one of."""
        folder = self.federation.server_folder
        awaited = {path.name.removeprefix("model-") for path in (folder / "staging").glob("model-*")}
        return awaited | {path.name for path in (folder / "models").glob("*")}

    def _process(self, name: str) -> Process:
        process = self.federation.server if name == "server" else self.federation.sites[name]
        assert process is not None
        return process

    def _fatal(self, name: str) -> Any:
        return self.federation.root / f"{name}.fatal"


def _signal(process: Process, number: signal.Signals) -> None:
    if process.running:
        process.popen.send_signal(number)
