"""Groups of sites that sync among themselves, and now and then with each other.

::

    round t, in every group:   inner rounds (rounds.py) --every group has closed its part--> Close
    Committed(t), t % rounds:  the next round starts from each group's own version
    Committed(t), the last of `rounds`:  the groups' versions are combined; all start from what they are combined to

Each group has an inner schedule of its own, all in step: round t of the run is round t of each. What a round makes is
one version for each group, a branch, and every `rounds` of them one for all (server/groups.py).

Invariants: a site belongs to one group for the whole run. A round closes once, when the last group has closed its part;
the run gives up where one group does. Equal events give equal states and actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, field_validator

from atoll.aggregation.schedule import (
    Accepted,
    Action,
    Cancel,
    Close,
    Committed,
    Dispatch,
    Event,
    Exchange,
    Failed,
    GiveUp,
    Joined,
    Left,
    Ready,
    SetTimer,
    Stop,
    TimerFired,
)
from atoll.aggregation.schedules.every_steps import EverySteps
from atoll.aggregation.schedules.rounds import LabelText, Phase, Rounds, RoundsState, Standing
from atoll.wire.errors import ConfigError
from atoll.wire.job import Part, Strict


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalState:
    """Plain values. A group is known by its place in the job's `groups`."""

    groups: tuple[RoundsState, ...]
    homes: tuple[tuple[str, int], ...] = ()  # (site, group), sorted: of everyone who ever joined
    is_over: bool = False


Step = tuple[HierarchicalState, Sequence[Action]]


class Hierarchical:
    """Groups of sites by a label: `rounds` rounds within each, then their versions are combined (arXiv:1808.07217).

    Two levels of local SGD (Lin et al. 2018, arXiv:1808.07217, section 5; Liu et al. 2019, arXiv:1905.06641, algorithm
    1). The job's optimizer moves the common version by the mean difference of the groups', weighted by the examples
    of all their rounds; `inner_optimizer` moves a group's. Memory of the server: one sum for each group, and one more.
    """

    class Options(Strict):
        label: LabelText  # of sites, whose value says to which group they belong
        groups: tuple[LabelText, ...] = Field(min_length=2, max_length=64)  # values of it; other sites take no part
        rounds: int = Field(ge=1, le=1_000_000)  # in each group, between two versions of all
        inner: Part = Part(kind="rounds")  # schedule of each group: rounds, or every_steps
        inner_optimizer: Part = Part(kind="sgd")  # of each group; its state goes on

        @field_validator("groups")
        @classmethod
        def _differ(cls, groups: tuple[str, ...]) -> tuple[str, ...]:
            if len(set(groups)) < len(groups):
                raise ValueError("wanted names that differ")
            return groups

    def __init__(self, options: Options) -> None:
        from atoll.aggregation.parts import build  # parts lists this class

        self.name = "hierarchical"
        self.options = options
        key = "strategy.schedule.inner"
        inner: Any = build("schedule", options.inner.kind, options.inner.options, key)
        if not isinstance(inner, Rounds) or (isinstance(inner, EverySteps) and inner.exchange.num_fragments > 1):
            raise ConfigError(
                f"{key}.kind = {options.inner.kind!r}: the groups close their rounds together, each of whole models; take "
                "rounds, or every_steps with fragments = 1",
                key=f"{key}.kind",
                value=options.inner.kind,
                bound="rounds, every_steps",
            )
        self.inner: Rounds = inner
        self.inner_optimizer: Any = build(
            "optimizer",
            options.inner_optimizer.kind,
            options.inner_optimizer.options,
            "strategy.schedule.inner_optimizer",
        )

    @property
    def min_sites(self) -> int:
        return self.inner.min_sites * len(self.options.groups)

    @property
    def fewest_updates(self) -> int:
        return self.inner.fewest_updates  # of a group's version

    @property
    def fixed(self) -> Mapping[str, object]:
        """By option, what has to be the same in all rounds of a run."""
        options = self.options
        inner = {f"inner.{name}": value for name, value in self.inner.fixed.items()}
        kinds = {"inner.kind": self.inner.name, "inner_optimizer": str(self.inner_optimizer.precision(wide=False))}
        return {"label": options.label, "groups": options.groups, "rounds": options.rounds, **kinds, **inner}

    @property
    def draws(self) -> bool:
        """Whether a round may close without some of the members."""
        return True  # no site is in every group

    @property
    def exchange(self) -> Exchange:
        return self.inner.exchange if isinstance(self.inner, EverySteps) else Exchange()

    @property
    def combines_every(self) -> int:
        """Rounds from one version of all groups to the next."""
        return self.options.rounds

    @property
    def num_branches(self) -> int:
        return len(self.options.groups)

    def takes(self, site: str, labels: Mapping[str, str]) -> bool:
        """Whether a site with these labels can be asked."""
        return labels.get(self.options.label) in self.options.groups and self.inner.takes(site, labels)

    def is_complete(self, state: HierarchicalState) -> bool:
        """Whether every group has the members without which it cannot begin."""
        return all(len(group.members) >= self.inner.min_sites for group in state.groups)

    def branch(self, state: HierarchicalState, site: str, version: int) -> int | None:
        """Whose form of a version a site gets: its group's, or None for the one that all have in common."""
        return None if version % self.options.rounds == 0 else dict(state.homes).get(site)

    def init(self, *, num_rounds: int, seed: int) -> HierarchicalState:
        return HierarchicalState(
            groups=tuple(self.inner.init(num_rounds=num_rounds, seed=seed) for _ in self.options.groups)
        )

    def on(self, state: HierarchicalState, event: Event) -> Step:
        """The state after `event` and what is to be done; events that do not matter change nothing."""
        if state.is_over:
            return state, ()
        match event:
            case Joined() if self.takes(event.site, event.labels) and event.site not in dict(state.homes):
                home = (event.site, self.options.groups.index(event.labels[self.options.label]))
                state = replace(state, homes=tuple(sorted((*state.homes, home))))
                return self._tell(state, home[1], event)
            case Joined() | Left() | Accepted() | Failed():
                group = dict(state.homes).get(event.site)
                return (state, ()) if group is None else self._tell(state, group, event)
            case TimerFired():
                number, _, name = event.name.removeprefix("group-").partition("/")
                return self._tell(state, int(number), TimerFired(name=name))
            case Ready() | Committed():
                return self._tell_all(state, event)
        return state, ()  # of a region's rounds (relayed.py)

    def _tell_all(self, state: HierarchicalState, event: Event) -> Step:
        done: list[Action] = []
        for group in range(self.num_branches):
            if state.is_over:
                break
            state, actions = self._tell(state, group, event)
            done += actions
        return state, tuple(done)

    def _tell(self, state: HierarchicalState, group: int, event: Event) -> Step:
        """What the inner schedule of a group says to an event, as actions of the run."""
        inner, wanted = self.inner.on(state.groups[group], event)
        if inner == state.groups[group] and not wanted:
            return state, ()
        state = replace(state, groups=(*state.groups[:group], inner, *state.groups[group + 1 :]))
        done: list[Action] = []
        for action in wanted:
            match action:
                case Dispatch():
                    done.append(replace(action, branch=group))
                case Close():
                    done += _close_if_all(state, action.round)
                case SetTimer():
                    done.append(replace(action, name=f"group-{group}/{action.name}"))
                case Stop():
                    if all(one.is_over for one in state.groups):
                        state = replace(state, is_over=True)
                        done.append(action)
                case GiveUp():
                    state = replace(state, is_over=True)
                    done.append(GiveUp(reason=f"group {self.options.groups[group]}: {action.reason}"))
                case Cancel():
                    done.append(action)
        return state, tuple(done)


def _close_if_all(state: HierarchicalState, round_: int) -> tuple[Action, ...]:
    """A group has all that it waits for; the round closes with the last one."""
    if any(group.phase is not Phase.CLOSING for group in state.groups):
        return ()
    sites = sorted(site for group in state.groups for site in group.those(Standing.IN))
    return (Close(round=round_, sites=tuple(sites)),)
