"""A local rule's part at this site: what a round begins with, and what it leaves if its update comes to count.

Invariant: what the site keeps is what `settle` gave in the last round that counted, whatever it has trained since; a
round that is done again begins as it did the first time. The server says with each task which round that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from atoll.aggregation.lanes import lane_values
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.rules.rule import LocalRule, has_part
from atoll.aggregation.sent import Sent
from atoll.cluster.site_state import Kept, SiteState
from atoll.wire.tensors import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """The rule of a run and its state at one site; nothing of it where the rule has no part at the server."""

    rule: LocalRule
    state: SiteState

    def resume(self, counted_round: int, base: Mapping[str, Tensor]) -> None:
        """Hand the rule what a round begins with.

        Args:
            counted_round: the last one whose version holds this site's update; 0: none.
            base: the tensors of the version that the round begins with.

        Raises:
            LocalError: the state is missing, damaged or unreadable.
        """
        if has_part(self.rule):
            kept = self.state.left_by(counted_round).tensors if counted_round else {}
            self.rule.resume(kept, lane_values(base, self.rule.lanes))

    def differences(self) -> Mapping[str, Tensor]:
        """What the update says in place of trained minus base, by tensor of the manifest."""
        return self.rule.differences() if has_part(self.rule) else {}

    def settle(self, round: int, counted_round: int, layout: UpdateLayout, update: Buffer) -> None:
        """Keep what the rule needs once `update` of this round counts.

        Raises:
            DiskFull, LocalError: it cannot be written.
        """
        if has_part(self.rule):
            kept = Kept(tensors=self.rule.settle(Sent(layout, update)))
            self.state.save(round, kept, begun_with=counted_round)
