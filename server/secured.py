"""What a run's state knows of the sessions of a round. Pure; the journal replays it.

A session is numbered before anything of it is said, so that its number, and the keys that hang on it, are never used
twice. Until its survivors are fixed a server that was killed begins the next one; from then on it goes on with it.
"""

from __future__ import annotations

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
    known = round_.secured or Secured()
    if isinstance(event, SessionOpened):
        if event.session <= known.session:
            return state
        known = replace(known, session=event.session, opening=event.opening, said="")
        return _with(state, replace(round_, secured=known))
    if event.session != known.session or not known.opening:
        return state
    match event:
        case SurvivorsFixed(said=said):
            revealed = survivors_in(said, Opening.decode(known.opening.encode()).sites)
            known = replace(known, said=said, revealed=revealed)
        case SessionFailed(reason=reason):
            known = replace(known, opening="", said="", failed=(*known.failed, reason))
        case Unmasked():
            dropped = tuple(sorted(set(round_.closing) - set(event.sites))) or known.dropped
            known = replace(known, weight=event.weight, metrics=event.metrics, dropped=dropped, liars=dict(event.liars))
            round_ = counted.closed(state, round_, tuple(event.sites))
    return _with(state, replace(round_, secured=known))


def _with(state: RunState, round_: Round) -> RunState:
    return replace(state, rounds={**state.rounds, round_.number: round_})
