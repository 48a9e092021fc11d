"""The server's state table of a session: what it waits for, what it refuses, and what it keeps at rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples.masked_run import terms_of
from samples.secagg_session import LANES, Session, inputs, plan_of

from atoll.privacy.secagg.aggregator import AggregatorState
from atoll.privacy.secagg.agreement import Terms
from atoll.server.secure_session import At, SecureSession, survivors_in
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.errors import RemoteError, TooFewSites


def terms(num_sites: int = 5) -> Terms:
    """Of small lanes."""
    found, _ = terms_of(num_sites)
    plan = plan_of(num_sites, lanes=(LANES[0], LANES[1]))
    return replace(found, plan=plan)


TERMS = terms()
EVERYBODY = set(range(5))


def said(session: SecureSession, site: int, **answer: object) -> SecureSession:
    return session.take(site, pb.SecureAnswer(**answer))  # type: ignore[arg-type]


def played(upto: At, *, there: set[int] = EVERYBODY) -> tuple[SecureSession, Session]:
    """A session at the beginning of a phase, and the sites that have brought it there."""
    sites = Session(TERMS.plan)
    sites.advertise(there)
    sites.share(there)
    values = {site: lanes[:2] for site, lanes in inputs(TERMS.plan).items()}
    sites.send_inputs(there, values)
    sites.confirm(there)
    sites.unmask(there)
    session = SecureSession(terms=TERMS)
    while session.at is not upto:
        for site in sorted(there):
            state = sites.states[site]
            match session.at:
                case At.KEYS:
                    session = said(session, site, advertised=state.advertised)
                case At.SHARES:
                    session = said(session, site, shared=secure_pb2.SecureShared(items=state.shared))
                case At.INPUTS:
                    session = session.take_input(site, state.input, state.input_root)
                case At.CONFIRMING:
                    session = said(session, site, confirmation=state.consistency)
        for site in EVERYBODY - there:
            session = session.without(site, "silent")
        session = session.close()
    return session, sites


PHASES = [At.KEYS, At.SHARES, At.INPUTS, At.CONFIRMING, At.UNMASKING]
KINDS = {
    At.KEYS: "advertised",
    At.SHARES: "shared",
    At.INPUTS: "input",
    At.CONFIRMING: "confirmation",
    At.UNMASKING: "unmasked",
}


@pytest.mark.parametrize("at", PHASES)
def test_a_phase_waits_for_everybody_and_tells_each_what_to_answer(at: At) -> None:
    session, _ = played(at)
    assert session.awaited == EVERYBODY
    assert all(len(session.steps_for(site)) == 1 for site in EVERYBODY)
    gone = session.without(2, "gone")
    assert gone.awaited == EVERYBODY - {2}
    assert gone.steps_for(2) == ()
    assert session.without(2, "gone").without(2, "again").out == {2: "gone"}


@pytest.mark.parametrize("at", PHASES)
def test_a_phase_that_too_few_answer_says_who_is_missing(at: At) -> None:
    session, _ = played(at)
    with pytest.raises(TooFewSites, match="of 0 of 5 sites") as caught:
        session.without(1, "on fire").close()
    assert "(on fire)" in caught.value.message
    assert "(silent)" in caught.value.message


@given(data=st.binary(max_size=400), phase=st.sampled_from(PHASES), site=st.integers(0, 4))
def test_bytes_that_nobody_signed_are_refused_in_every_phase(data: bytes, phase: At, site: int) -> None:
    with pytest.raises(RemoteError):
        say(BEGINNINGS[phase][0], site, KINDS[phase], data)


def say(session: SecureSession, site: int, kind: str, data: bytes) -> None:
    if kind == "input":
        session.declared(site, data)
    elif kind == "shared":
        said(session, site, shared=secure_pb2.SecureShared(items=[data]))
    else:
        said(session, site, **{kind: data})


BEGINNINGS = {phase: played(phase) for phase in PHASES}


def test_on_a_harary_graph_a_site_is_handed_the_confirmations_of_its_neighbours() -> None:
    found, _ = terms_of(200)
    plan, everybody = found.plan, range(200)
    assert not plan.parameters.complete
    heard = AggregatorState(
        inputs=dict.fromkeys(everybody, b"root"),
        survivors=b"all",
        confirmed={site: site.to_bytes(2, "big") for site in everybody},
    )
    session = SecureSession(terms=found, at=At.UNMASKING, said=heard, ring=bytes(32))
    for site in (0, 77, 199):
        [step] = session.steps_for(site)
        handed = list(step["confirmations"].confirmed)  # type: ignore[attr-defined]
        assert handed == [other.to_bytes(2, "big") for other in sorted(plan.neighbours(site, bytes(32)))]
        assert plan.parameters.threshold <= len(handed) == plan.parameters.degree < 199


def test_what_one_site_signed_is_not_taken_from_another() -> None:
    session, sites = played(At.KEYS)
    with pytest.raises(RemoteError):
        said(session, 1, advertised=sites.states[0].advertised)


def test_an_answer_of_another_phase_or_the_same_again_changes_nothing() -> None:
    session, sites = played(At.SHARES)
    assert said(session, 0, advertised=sites.states[0].advertised) is session
    assert said(session, 0, unmasked=b"early") is session
    once = said(session, 0, shared=secure_pb2.SecureShared(items=sites.states[0].shared))
    assert once.heard == {0}
    assert said(once, 0, shared=secure_pb2.SecureShared(items=sites.states[0].shared)) is once


def test_survivors_never_change_once_they_are_fixed_and_are_kept_at_rest() -> None:
    session, sites = played(At.CONFIRMING, there={0, 1, 3, 4})
    assert session.surviving == {0, 1, 3, 4}
    with pytest.raises(RemoteError, match="too late"):
        session.take_input(2, b"", b"")
    again = SecureSession.unpack(TERMS, session.pack())
    assert again.said == session.said
    assert again.at is At.INPUTS
    assert again.awaited == {0, 1, 3, 4}
    names = tuple(member.site for member in TERMS.plan.roster)
    assert survivors_in(session.pack(), names) == tuple(names[site] for site in (0, 1, 3, 4))
    for site in sorted(again.awaited):
        again = again.take_input(site, sites.states[site].input, sites.states[site].input_root)
    assert again.close().said.survivors == session.said.survivors


def test_of_a_session_that_goes_on_no_survivor_may_be_missing() -> None:
    session, sites = played(At.CONFIRMING)
    again = SecureSession.unpack(TERMS, session.pack())
    for site in (0, 1, 2, 3):
        again = again.take_input(site, sites.states[site].input, sites.states[site].input_root)
    with pytest.raises(TooFewSites, match="before the server restarted"):
        again.without(4, "gone").close()
