"""Whose updates have come to count, and how much they are of all: what rules with a part at each site rest on.

A site may train and its update still be in no version: it was late, or lost. What it keeps for its rule then stays as
it was in the last round that counted, and each task says which that is. A region learns of its part only with its next
round, so what its sites have sent is in doubt until then.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.aggregation.lanes import Share
from atoll.aggregation.schedule import Asked
from atoll.server.round import Round
from atoll.server.run_state import RunState


def closed(state: RunState, round_: Round, sites: tuple[str, ...]) -> Round:
    """The round that makes a version of the updates of `sites`, with their share in all who ever joined.

    A site weighs what it has declared, whatever it sent this time, so that a round of all is a share of 1. A region
    weighs what it sent of what it has declared, since some of its sites may be missing.
    """
    members = {**state.former, **state.members}
    everybody = sum(member.sum_weights or member.max_weight for member in members.values())
    cohort = sum(
        round_.updates[site].weight if members[site].num_sites else members[site].max_weight
        for site in sites
        if site in members
    )
    share = Share(cohort=cohort / everybody, before=(state.all_weights or everybody) / everybody)
    return round_.closed(sites, share, everybody)


def committed(state: RunState, round_: Round, *, delegated: bool) -> RunState:
    """The state once `round_` is committed; `delegated`: by an upper server, which may have left this part out."""
    sites = {site: round_.updates[site].dispatched or round_.number for site in round_.closing}
    if delegated:
        return replace(state, in_doubt={**state.in_doubt, **sites})
    return replace(state, counted={**state.counted, **sites}, all_weights=round_.all_weights)


def asked(state: RunState, event: Asked) -> RunState:
    """The state of a region that is told, with a new round, which one was the last that counted."""
    sure = {site: number for site, number in state.in_doubt.items() if number == event.counted_round}
    return replace(state, counted={**state.counted, **sure}, in_doubt={})
