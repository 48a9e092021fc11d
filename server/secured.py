"""What a run's state knows of the sessions of a round. Pure; the journal replays it.

A session is numbered before anything of it is said, so that its number, and the keys that hang on it, are never used
twice. Until its survivors are fixed a server that was killed begins the next one; from then on it goes on with it. A
round has a session for each of its parts; it is closed with the survivors of all of them once each has its sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from atoll.privacy.secagg.agreement import Opening
from atoll.server import counted
from atoll.server.round import Round, Secured
from atoll.server.run_state import RunState
from atoll.server.secure_events import SecureEvent, SessionFailed, SessionOpened, SurvivorsFixed, Unmasked
from atoll.server.secure_session import survivors_in


def heard(state: RunState, event: SecureEvent) -> RunState:
    """The state after an event of a session; the same where it is of none that is under way."""
    round_ = state.rounds.get(event.round)
    if round_ is None or not round_.closing:
        return state
    known = round_.secured.get(event.part, Secured())
    if isinstance(event, SessionOpened):
        if event.session <= known.session:
            return state
        known = replace(known, session=event.session, opening=event.opening, said="", sites=())
        return _with(state, round_.protected(event.part, known))
    if event.session != known.session or not known.opening:
        return state
    match event:
        case SurvivorsFixed(said=said):
            revealed = survivors_in(said, Opening.decode(known.opening.encode()).sites)
            round_ = round_.protected(event.part, replace(known, said=said, revealed=revealed))
        case SessionFailed(reason=reason):
            known = replace(known, opening="", said="", sites=(), failed=(*known.failed, reason))
            round_ = round_.protected(event.part, known)
        case Unmasked():
            known = replace(
                known,
                sites=tuple(event.sites),
                weight=event.weight,
                metrics=event.metrics,
                dropped=tuple(event.dropped) or known.dropped,
                liars=dict(event.liars),
            )
            round_ = _closed(state, round_.protected(event.part, known), event.num_parts)
    return _with(state, round_)


def roster(known: Secured, there: Collection[str]) -> tuple[str, ...]:
    """Whom the next session of a cohort is over, of those that are there.

    Once a sum may be known, they are its survivors, where all of them are there: no other sum may be told apart from it.
    """
    return tuple(sorted(known.revealed if known.revealed and set(known.revealed) <= set(there) else there))


def opening(
    round_: Round, part: int, sites: tuple[str, ...], *, run: str, members: int, digests: Mapping[int, str]
) -> Opening:
    """What the server decides of the next session of a cohort: whose updates, and what they are the difference to.

    Args:
        sites: the roster, sorted.
        members: version of the member list.
        digests: of the base versions of `sites`.
    """
    return Opening(
        run=run,
        round=round_.number,
        session=round_.secured.get(part, Secured()).session + 1,
        sites=sites,
        member_list_version=members,
        max_weight=round_.branch_weights[part] if round_.branches else round_.max_weight,
        base_version=round_.base_version,
        bases={site: round_.bases[site] for site in sites if round_.staleness(site) > 0},
        digests=dict(digests),
    )


def _closed(state: RunState, round_: Round, num_parts: int) -> Round:
    """The round with those whose updates are in its sums, once all of them are there."""
    done = [one.sites for one in round_.secured.values() if one.sites]
    if len(done) < num_parts:
        return round_
    regions = set(round_.closing) & round_.regions.keys()  # which have had sessions of their own
    return counted.closed(state, round_, tuple(sorted(regions.union(*done))))


def _with(state: RunState, round_: Round) -> RunState:
    return replace(state, rounds={**state.rounds, round_.number: round_})
