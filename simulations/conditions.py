"""Under which conditions the sites of a run work: how long a task takes, what comes of it, and who lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atoll.aggregation.fragments import Fragments
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rounding import Rounding, rounding_key
from atoll.aggregation.stages import Strategies
from atoll.cluster.rounding_secret import reproducible_secret
from atoll.server.run_state import Task
from atoll.simulations.devices import Device
from atoll.simulations.dropouts import Dropouts
from atoll.simulations.faults import Fail, Fault, Faults, FreeRide, Slow
from atoll.simulations.lies import lie_about
from atoll.wire.errors import ConfigError
from atoll.wire.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """What a run's updates are made of, by round: what a site needs that tells a lie in one."""

    manifest: Manifest
    strategies: Strategies
    seed: int  # of the sites' secrets of rounding
    job_seed: int
    _fragments: dict[int, Fragments]  # by id of the strategy

    @classmethod
    def of(cls, manifest: Manifest, strategies: Strategies, *, seed: int, job_seed: int) -> Updates:
        return cls(manifest=manifest, strategies=strategies, seed=seed, job_seed=job_seed, _fragments={})

    def num_bytes(self, round_: int) -> int:
        """Of an update, as the codec of its round makes it."""
        return self._layout(round_).num_bytes

    def _layout(self, round_: int) -> UpdateLayout:
        strategy = self.strategies.at(round_)
        if id(strategy) not in self._fragments:
            self._fragments[id(strategy)] = strategy.fragments(self.manifest)
        return self._fragments[id(strategy)].of_round(round_).layout

    def altered(self, site: str, round_: int, update: memoryview, lies: Sequence[Fault]) -> memoryview:
        """The update that a site sends that tells these lies."""
        strategy = self.strategies.at(round_)
        secret = reproducible_secret(self.seed, self.job_seed, site)
        return lie_about(
            update,
            lies,
            self._layout(round_),
            rounding=Rounding(rounding_key(secret, round_)),
            bound=strategy.bound,
            seed=f"{self.job_seed} {site} {round_}".encode(),
        )


class Conditions:
    """Those of one run. All of it follows from seeds, sites and rounds, never from what was asked before."""

    def __init__(self, devices: Mapping[str, Device], *, dropouts: Dropouts, faults: Faults, updates: Updates) -> None:
        """
        Args:
            devices: of the sites that take part, in the order of their joining.

        Raises:
            ConfigError: something is said of a site that is not there, or a fault cannot show.
        """
        self.sites = tuple(devices)
        dropouts.require_sites(self.sites)
        self._devices = devices
        self._dropouts, self._faults, self._updates = dropouts, faults, updates
        waits = any(isinstance(fault, Slow) and fault.seconds > 0 for fault in faults.all)
        self.timed = waits or any(device.timed for device in devices.values())
        _require_that_slow_shows(faults, any(device.step_s for device in devices.values()))

    def task_s(self, task: Task, num_steps: Callable[[str], int], *, now_s: float, down_bytes: int) -> float:
        """Simulated seconds from the task to its update, or to its failure: transfers, steps, and hours of absence."""
        device = self._devices[task.site]
        struck = self._faults.of(task.site, task.given_in)
        steps = 0 if any(isinstance(fault, FreeRide) for fault in struck) else num_steps(task.site)
        fail = next((fault for fault in struck if isinstance(fault, Fail)), None)
        done = steps if fail is None else min(fail.step, steps)
        seconds = done * device.step_s
        for slow in (fault for fault in struck if isinstance(fault, Slow)):
            seconds += max(done - slow.step, 0) * device.step_s * (slow.factor - 1.0) + slow.seconds
        up_bytes = self._updates.num_bytes(task.given_in) if fail is None else 0
        return device.elapsed_s(now_s, seconds + device.transfer_s(down_bytes, up_bytes))

    def failure(self, task: Task) -> str | None:
        """Why nothing comes of a task; None where an update does."""
        if self._dropouts.hits(task.site, task.round, task.attempt):
            return f"dropped out of round {task.round}"
        for fault in self._faults.of(task.site, task.given_in):
            if isinstance(fault, Fail):
                return f"failed round {task.given_in} after {fault.step} steps, as its fault says"
        return None

    def sent(self, task: Task, update: memoryview) -> memoryview:
        """What the site sends in place of its update: another one where it lies, else the same."""
        struck = self._faults.of(task.site, task.given_in)
        return self._updates.altered(task.site, task.given_in, update, struck) if struck else update


def _require_that_slow_shows(faults: Faults, steps_take_time: bool) -> None:
    for number, fault in enumerate(faults.all):
        if isinstance(fault, Slow) and not steps_take_time and fault.seconds == 0:
            key = f"fault.{number}.factor"
            text = f"{key} = {fault.factor:g}: optimizer steps take no simulated time, so none is slower"
            raise ConfigError(f"{text}; set --step-seconds (speeds), or seconds", key=key, value=str(fault.factor))
