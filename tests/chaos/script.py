"""Random fault scripts: what goes wrong when, and where, as data that a seed draws.

Nothing here is beyond what a patient federation survives: who is away comes back within its lease, and no worker dies
three times in one task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.conftest import RELAYED, SITES
from chaos.relay import Away, Cut, Link, LoseAnswers, Silence
from chaos.relay import Fault as NetworkFault

from atoll.client.steps import Step as SiteStep
from atoll.server.steps import Step as ServerStep

MAX_EVENTS = 6
AT_ONCE = 0.0  # before the run is submitted
SUBMISSION = frozenset({ServerStep.SUBMITTED, ServerStep.STORED, ServerStep.QUEUED})
UPDATE_BYTES = 2000  # of the trial app's model, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL of the server or an agent, which is started again after `away_s`."""

    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAtStep:
    """The same when the named step comes next."""

    step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """SIGKILL of the workers of a site; its agent does what it thinks right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """SIGSTOP, and SIGCONT after `for_s`."""

    for_s: float


Fault = Kill | KillAtStep | KillWorker | Pause | NetworkFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float  # in durations of an undisturbed run
    target: str  # "server" or a site
    fault: Fault


def draw(seed: int) -> tuple[Event, ...]:
    """The fault script of a seed, in order of time."""
    rng = random.Random(seed)
    events: list[Event] = []
    for _ in range(rng.randint(1, MAX_EVENTS)):
        target = rng.choice(["server", *SITES, RELAYED])  # the network is at one site: that one more often
        fault = _fault(rng, target)
        if sum(isinstance(e.fault, KillWorker) and e.target == target for e in events) == 2:
            fault = Pause(for_s=0.5)
        at = round(rng.uniform(0.001, 1.1), 3)
        if isinstance(fault, KillAtStep) and fault.step in SUBMISSION:
            at = AT_ONCE
        events.append(Event(at=at, target=target, fault=fault))
    return tuple(sorted(events, key=lambda event: event.at))


def _fault(rng: random.Random, target: str) -> Fault:
    steps: list[str] = [*ServerStep] if target == "server" else [*SiteStep]
    away_s, for_s = round(rng.uniform(0.0, 2.0), 2), round(rng.uniform(0.2, 3.0), 2)
    faults: list[Fault] = [Kill(away_s=away_s), KillAtStep(step=str(rng.choice(steps))), Pause(for_s=for_s)]
    if target != "server":
        faults += [KillWorker(), KillWorker()]
    if target == RELAYED:
        after_bytes = rng.randint(0, 3 * UPDATE_BYTES)
        faults += [
            Cut(direction="up", after_bytes=after_bytes),
            Cut(direction="down", after_bytes=after_bytes),
            LoseAnswers(after_bytes=after_bytes, hold_s=for_s),
            Silence(for_s=for_s),
            Away(for_s=away_s),
            Link(delay_s=0.1, bytes_per_s=250e3, loss=0.05, seed=rng.randint(0, 999)),
        ]
    return rng.choice(faults)
