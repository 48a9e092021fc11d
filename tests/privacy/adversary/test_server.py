"""A server that does not keep to the protocol: what each honest site refuses, and that it would take the honest form."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from samples.secagg_session import Session, inputs, plan_of, signing_keys

from atoll.privacy.secagg import aggregator, site
from atoll.privacy.secagg.messages import (
    Kind,
    Phase,
    PublicKeys,
    ShareItem,
    Survivors,
    decode_revealed,
    encode_revealed,
    sign,
    verify,
)
from atoll.privacy.secagg.plan import Member
from atoll.privacy.secagg.site import Secrets
from atoll.wire.errors import Malformed, NotAllowed

EVERYBODY = set(range(5))


def session_up_to(phase: str, *, dropped: set[int] = frozenset()) -> Session:  # type: ignore[assignment]
    """Five sites; those of `dropped` share their secrets and send no input."""
    session = Session(plan_of(5))
    session.advertise(EVERYBODY)
    if phase == "keys":
        return session
    session.share(EVERYBODY)
    if phase == "shares":
        return session
    session.send_inputs(EVERYBODY - dropped, inputs(session.plan))
    if phase == "inputs":
        return session
    session.confirm(EVERYBODY - dropped)
    return session


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_that_the_server_made_itself_are_refused() -> None:
    session = session_up_to("keys")
    forged = PublicKeys(
        sealing=hashlib.sha256(b"s").digest(), masking=hashlib.sha256(b"m").digest(), commitment=bytes(32)
    )
    message = sign(session.plan, Phase.ADVERTISE_KEYS, 3, forged.encode(), Ed25519PrivateKey.generate())
    swapped = [*list(session.server.advertised.values())[:3], message.data, session.server.advertised[4]]
    with pytest.raises(Malformed, match="not signed by site-00003"):
        site.take_keys(session.plan, session.states[0], swapped)
    site.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def test_a_ghost_site_has_no_place_in_the_roster() -> None:
    """A server that mints certificates: its ghost signs well, with a key that no signed member list has."""
    session, ghost = session_up_to("keys"), Ed25519PrivateKey.generate()
    roster = (
        *session.plan.roster[:4],
        Member(site="site-ghost", organisation="x", signing_key=ghost.public_key().public_bytes_raw()),
    )
    told = replace(session.plan, roster=roster)
    message = site.advertise(told, 4, Secrets.draw(), ghost)
    with pytest.raises(Malformed, match="of another session, plan or phase"):
        site.take_keys(
            session.plan, session.states[0], [*list(session.server.advertised.values())[:4], message.advertised]
        )


def test_one_site_twice_or_two_with_the_same_keys() -> None:
    session = session_up_to("keys")
    every = list(session.server.advertised.values())
    with pytest.raises(Malformed, match="a site twice"):
        site.take_keys(session.plan, session.states[0], [*every, every[3]])
    stolen = verify(session.plan, Phase.ADVERTISE_KEYS, every[2]).body
    copied = sign(session.plan, Phase.ADVERTISE_KEYS, 3, stolen, session.keys[3]).data
    with pytest.raises(Malformed, match="two keys in the list are the same"):
        site.take_keys(session.plan, session.states[0], [*every[:3], copied, every[4]])


def test_a_list_without_this_sites_own_keys() -> None:
    session = session_up_to("keys")
    with pytest.raises(Malformed, match="not this site's own keys"):
        site.take_keys(session.plan, session.states[0], list(session.server.advertised.values())[1:])


def test_a_cohort_below_the_minimum() -> None:
    session = Session(plan_of(5, fewest=5))
    session.advertise({0, 1, 2, 3})
    with pytest.raises(NotAllowed, match="4 sites of 4 organisations sent keys, wanted 5"):
        site.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def test_many_sites_of_one_organisation_count_once() -> None:
    plan = plan_of(5)
    roster = tuple(replace(member, organisation="one") for member in plan.roster)
    session = Session(replace(plan, roster=roster))
    session.advertise(EVERYBODY)
    with pytest.raises(NotAllowed, match="5 sites of 1 organisations"):
        site.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def test_a_second_list_of_keys() -> None:
    session = session_up_to("shares")
    with pytest.raises(NotAllowed, match="one list"):
        site.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, bound_to={"base": "11" * 32}),
        lambda plan: replace(plan, round=8),
        lambda plan: replace(plan, attempt=2),
        lambda plan: replace(plan, run_id=bytes(16)),
        lambda plan: replace(plan, parameters=replace(plan.parameters, threshold=2)),
        lambda plan: replace(plan, fewest_survivors=2),
        lambda plan: replace(plan, member_list_version=5),
        lambda plan: replace(plan, lanes=plan.lanes[:2]),
    ],
    ids=[
        "another model",
        "another round",
        "another attempt",
        "another run",
        "a lower threshold",
        "fewer survivors",
        "another member list",
        "other lanes",
    ],
)
def test_sites_with_different_plans_share_no_session(change: Callable) -> None:  # type: ignore[type-arg]
    """Whatever the server tells one site otherwise, its messages are none for the others."""
    session = session_up_to("keys")
    told = change(session.plan)
    other = site.advertise(told, 4, Secrets.draw(), session.keys[4])
    with pytest.raises(Malformed, match="of another session, plan or phase"):
        site.take_keys(
            session.plan, session.states[0], [*list(session.server.advertised.values())[:4], other.advertised]
        )


def test_masks_of_different_models_do_not_cancel() -> None:
    """Even with the envelope left out of account: every key is derived from the plan's hash."""
    session = session_up_to("inputs")
    told = replace(session.plan, bound_to={"base": "11" * 32})
    mine, theirs = session.states[0], session.states[1]
    public = {index: one.masking for index, one in mine.public.items()}
    ours = site.pair_masks(session.plan, 0, 1, mine.secrets.masking_key, public)
    same = site.pair_masks(session.plan, 1, 0, theirs.secrets.masking_key, public)
    different = site.pair_masks(told, 1, 0, theirs.secrets.masking_key, public)
    assert [mask.opposite for mask in ours] == list(same)
    assert not {mask.key for mask in ours} & {mask.key for mask in different}


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_share_that_was_changed_exchanged_or_left_out() -> None:
    session = session_up_to("shares")
    plan, state, sharing = session.plan, session.states[0], session.server.sharing
    honest = session.delivery(0)
    flipped = bytearray(honest[1])
    flipped[100] ^= 1
    with pytest.raises(Malformed, match="not signed by site-00002"):
        site.take_shares(plan, state, sharing, [honest[0], bytes(flipped), *honest[2:]])
    with pytest.raises(Malformed, match="share of site-00002 does not open"):
        site.take_shares(plan, state, sharing, [honest[0], session.server.shared[2][3], *honest[2:]])
    with pytest.raises(Malformed, match="not those of the neighbours"):
        site.take_shares(plan, state, sharing, honest[1:])
    with pytest.raises(Malformed, match="not those of the neighbours"):
        site.take_shares(plan, state, sharing, [*honest, honest[0]])
    with pytest.raises(Malformed, match="this one is left out"):
        site.take_shares(plan, state, sharing - {0}, honest)
    assert site.take_shares(plan, state, sharing, honest).sharing == sharing


def test_an_owner_whose_share_is_not_what_it_committed_to() -> None:
    session = session_up_to("shares")
    item = ShareItem.decode(verify(session.plan, Phase.SHARE_KEYS, session.server.shared[2][0]).body)
    lie = replace(item, seed_commitment=bytes(32))
    message = sign(session.plan, Phase.SHARE_KEYS, 2, lie.encode(), session.keys[2]).data
    honest = session.delivery(0)
    with pytest.raises(Malformed, match="share of site-00002 is not what it committed to"):
        site.take_shares(session.plan, session.states[0], session.server.sharing, [honest[0], message, *honest[2:]])


def test_too_few_that_share() -> None:
    session = Session(plan_of(5))
    session.advertise(EVERYBODY)
    session.share({0, 1})
    with pytest.raises(NotAllowed, match="2 sites of 2 organisations shared their secrets, wanted 3"):
        site.take_shares(session.plan, session.states[0], session.server.sharing, session.delivery(0))


def test_shares_of_another_attempt() -> None:
    old, new = session_up_to("shares"), Session(plan_of(5, attempt=2))
    new.advertise(EVERYBODY)
    new.share(EVERYBODY)
    with pytest.raises(Malformed, match="of another session, plan or phase"):
        site.take_shares(new.plan, new.states[0], new.server.sharing, old.delivery(0))


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_a_second_input_under_the_same_masks() -> None:
    session = session_up_to("inputs")
    state = session.states[0]
    with pytest.raises(NotAllowed, match="another input was declared"):
        site.send_input(session.plan, state, bytes(32), session.keys[0])
    assert site.send_input(session.plan, state, state.input_root, session.keys[0]).input == state.input


def test_no_masks_before_it_is_fixed_who_shares() -> None:
    session = session_up_to("shares")
    with pytest.raises(NotAllowed, match="not known before shares were taken"):
        site.masks(session.plan, session.states[0])
    with pytest.raises(NotAllowed, match="not known before shares were taken"):
        site.send_input(session.plan, session.states[0], bytes(32), session.keys[0])


# --- survivors --------------------------------------------------------------------------------------------------------


def survivors_without(session: Session, left_out: set[int]) -> bytes:
    """A list of survivors as an honest server would make it, had these sites dropped out."""
    inputs_in = {index: data for index, data in session.server.inputs.items() if index not in left_out}
    return aggregator.fix_survivors(session.plan, replace(session.server, inputs=inputs_in, survivors=b"")).survivors


def test_two_sites_are_told_of_different_survivors() -> None:
    """Site 0 hears that all survive, the rest that 4 dropped out: its seed from some, its key from the others."""
    session = session_up_to("inputs")
    everybody, without = survivors_without(session, set()), survivors_without(session, {4})
    told = {0: everybody, 1: everybody, 2: without, 3: without}
    for index, data in told.items():
        session.states[index] = site.confirm(session.plan, session.states[index], data, session.keys[index])
    confirmations = [session.states[index].consistency for index in told]
    for index, mine in told.items():
        with pytest.raises(Malformed, match="does not tell all the same"):
            site.unmask(session.plan, session.states[index], confirmations, session.keys[index])
        half = [session.states[other].consistency for other in told if told[other] == mine]
        with pytest.raises(NotAllowed, match="2 survivors confirm the same, the threshold is 3"):
            site.unmask(session.plan, session.states[index], half, session.keys[index])


def test_other_survivors_after_the_first() -> None:
    session = session_up_to("inputs")
    everybody, without = survivors_without(session, set()), survivors_without(session, {4})
    state = site.confirm(session.plan, session.states[0], everybody, session.keys[0])
    with pytest.raises(NotAllowed, match="other survivors were confirmed"):
        site.confirm(session.plan, state, without, session.keys[0])
    assert site.confirm(session.plan, state, everybody, session.keys[0]).consistency == state.consistency


def test_a_single_survivor_and_two() -> None:
    session = session_up_to("inputs")
    for left_out in ({1, 2, 3, 4}, {2, 3, 4}):
        told = Survivors(
            sharing=session.server.sharing,
            surviving=frozenset(EVERYBODY - left_out),
            roots={index: session.states[index].input_root for index in EVERYBODY - left_out},
        )
        with pytest.raises(NotAllowed, match="survive, wanted 3"):
            site.confirm(session.plan, session.states[0], told.encode(5), session.keys[0])


def test_survivors_with_another_input_of_this_site() -> None:
    session = session_up_to("inputs")
    told = Survivors.decode(survivors_without(session, set()), 5)
    changed = replace(told, roots={**told.roots, 0: bytes(32)})
    with pytest.raises(Malformed, match="another input of this site"):
        site.confirm(session.plan, session.states[0], changed.encode(5), session.keys[0])


# --- unmasking --------------------------------------------------------------------------------------------------------


def kinds(session: Session, index: int) -> dict[int, Kind]:
    state = site.unmask(
        session.plan, session.states[index], list(session.server.confirmed.values()), session.keys[index]
    )
    body = verify(session.plan, Phase.UNMASK, state.unmasked).body
    return {one.owner: one.kind for one in decode_revealed(body)}


def test_each_site_reveals_one_kind_for_each_owner() -> None:
    session = session_up_to("confirmed", dropped={4})
    for index in range(4):
        assert kinds(session, index) == {0: Kind.SEED, 1: Kind.SEED, 2: Kind.SEED, 3: Kind.SEED, 4: Kind.KEY}


def test_asked_again_a_site_gives_the_bytes_that_it_gave() -> None:
    session = session_up_to("confirmed")
    session.unmask({0})
    state = session.states[0]
    again = site.unmask(session.plan, state, [], session.keys[0])
    assert again.unmasked == state.unmasked != b""


def test_shares_without_survivors_or_confirmations() -> None:
    session = session_up_to("inputs")
    with pytest.raises(NotAllowed, match="before the survivors are confirmed"):
        site.unmask(session.plan, session.states[0], [], session.keys[0])
    session.confirm(EVERYBODY)
    few = list(session.server.confirmed.values())[:2]
    with pytest.raises(NotAllowed, match="2 survivors confirm the same, the threshold is 3"):
        site.unmask(session.plan, session.states[0], few, session.keys[0])
    with pytest.raises(NotAllowed, match="1 survivors confirm the same"):  # one of them three times
        site.unmask(session.plan, session.states[0], [few[0]] * 3, session.keys[0])
    stranger = sign(
        session.plan, Phase.CONSISTENCY, 3, hashlib.sha256(session.server.survivors).digest(), signing_keys(9)[8]
    )
    with pytest.raises(Malformed, match="not signed by site-00003"):
        site.unmask(session.plan, session.states[0], [*few, stranger.data], session.keys[0])
    assert site.unmask(session.plan, session.states[0], list(session.server.confirmed.values())[:3], session.keys[0])


def test_confirmations_of_another_attempt() -> None:
    old = session_up_to("confirmed")
    new = Session(plan_of(5, attempt=2))
    new.advertise(EVERYBODY)
    new.share(EVERYBODY)
    new.send_inputs(EVERYBODY, inputs(new.plan))
    new.confirm(EVERYBODY)
    with pytest.raises(Malformed, match="of another session, plan or phase"):
        site.unmask(new.plan, new.states[0], list(old.server.confirmed.values()), new.keys[0])


# --- sites that lie to the server ---------------------------------------------------------------------------------------


def test_a_liar_is_named_and_the_sum_comes_out_without_its_share() -> None:
    session = session_up_to("confirmed")
    session.unmask(EVERYBODY)
    revealed = list(decode_revealed(verify(session.plan, Phase.UNMASK, session.server.unmasked[1]).body))
    lies = [replace(one, share=bytes(33)) if one.owner == 3 else one for one in revealed]
    forged = sign(session.plan, Phase.UNMASK, 1, encode_revealed(lies), session.keys[1]).data
    server = replace(session.server, unmasked={**session.server.unmasked, 1: forged})
    found = aggregator.unmasking(session.plan, server)
    assert dict(found.liars) == {1: "revealed another share of site-00003 than it was given"}
    assert found.masks == aggregator.unmasking(session.plan, session.server).masks
