"""Sessions of secure aggregation at sites: whole ones, restarts at each phase, and servers that lie."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples.secure_sites import (
    BASE,
    RUN,
    Server,
    Site,
    federation,
    make_job,
    make_opening,
    member_list,
    sent,
    serve,
    signing_key,
)

from atoll.privacy.secagg import aggregator, parameters
from atoll.privacy.secagg.messages import Phase, PublicKeys, Survivors, decode_revealed, sign, verify
from atoll.wire import control_pb2 as pb
from atoll.wire.errors import LocalError, Malformed

PHASES = ("plan", "keys", "shares", "survivors", "confirmations")


def up_to(server: Server, phase: str, names: set[str] | None = None) -> None:
    """All phases before `phase`."""
    for one in PHASES[: PHASES.index(phase)]:
        server.go(one, names)


def refused(answer: pb.SecureAnswer | None) -> str:
    assert answer is not None
    assert answer.WhichOneof("answer") == "refused", answer
    return str(answer.refused.message)


# --- honest servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threat", ["active", "semi-honest"])
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("drops", [set(), {"s1"}, {"s0", "s4"}])
def test_the_sum_is_that_of_the_quantised_updates(tmp_path: Path, threat: str, bits: int, drops: set[str]) -> None:
    sites = federation(tmp_path, job=make_job(threat=threat, bits=bits))
    server = serve(sites)
    server.go("plan")
    server.go("keys")
    left = set(sites) - drops
    for phase in PHASES[2:]:
        server.go(phase, left)
    _, reals = server.sums()
    naive = np.sum([sent(sites[name], server) for name in sorted(left)], axis=0)
    assert np.array_equal(reals, naive)
    weight = sum(sites[name].weight for name in left)
    counted = server.counted()
    assert (counted.weight, counted.metrics) == (weight, {"loss": (1.5 * weight, float(weight))})
    mean = reals * server.terms.quantum * server.terms.max_weight / weight
    flat = [
        np.concatenate([t.double().numpy().ravel() for t in sites[n].values.values()]) * sites[n].weight for n in left
    ]
    quanta = len(left) * server.terms.quantum * server.terms.max_weight / weight
    assert np.abs(mean - np.sum(flat, axis=0) / weight).max() <= quanta


def test_a_harary_graph_opens_its_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "LARGEST_COMPLETE", 8)
    sites = federation(tmp_path, 14, job=make_job(threat="semi-honest", dropped=0.0))
    server = serve(sites)
    assert not server.plan.parameters.complete
    for phase in ("plan", "keys", "ring", "shares", "survivors", "confirmations"):
        server.go(phase)
        if phase == "keys":  # what a site opens it opens again, and it opens no ring that is not of these nonces
            sites["s3"].restarted()
            assert sites["s3"].hear(server.keys_step("s3")) == server.answers["s3", "keys"]
            wrong = server.ring_step("s4")
            wrong.ring.nonces[2].nonce = bytes(32)
            shutil.copytree(tmp_path / "s4", tmp_path / "clone" / "s4")
            clone = replace(sites["s4"], root=tmp_path / "clone")
            assert "is not what it committed to" in refused(clone.hear(wrong))
    naive = np.sum([sent(one, server) for one in sites.values()], axis=0)
    assert np.array_equal(server.sums()[1], naive)


def test_the_masked_input_says_nothing_of_the_update(tmp_path: Path) -> None:
    """Two sites with the same values, weight and rounding send unrelated bytes."""
    sites = federation(tmp_path)
    sites["s1"].secret = sites["s0"].secret
    server = serve(sites)
    up_to(server, "survivors")
    first, second = (np.frombuffer(server.masked(name), "<u1") for name in ("s0", "s1"))
    assert (first == second).mean() < 0.05


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", range(5))
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_agent_that_is_killed_in_any_phase_answers_with_the_same_bytes(
    tmp_path: Path, killed: int, when: str
) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    for number, phase in enumerate(PHASES):
        if number == killed and when == "before":
            sites["s2"].restarted()
        server.go(phase)
        if number == killed and when == "after":
            sites["s2"].restarted()
        for again in PHASES[: number + 1]:
            step = getattr(server, f"{again}_step")("s2")
            if again != "confirmations":
                assert sites["s2"].hear(step) == server.answers["s2", again]
    naive = np.sum([sent(one, server) for one in sites.values()], axis=0)
    assert np.array_equal(server.sums()[1], naive)


def test_an_agent_killed_while_its_worker_masks_lets_it_begin_again(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "shares")
    order = sites["s2"].session.take(server.shares_step("s2"), sites["s2"].agreed)
    sites["s2"].mask(order)  # type: ignore[arg-type]
    written = server.masked("s2")
    sites["s2"].session.masked_path(1).write_bytes(written[:100])
    sites["s2"].restarted()
    server.go("shares")
    assert server.masked("s2") == written


def test_a_session_that_began_and_was_never_answered_is_not_begun_again(tmp_path: Path) -> None:
    """Killed between the mark and the state: whatever it had drawn is gone, so the site stays dropped."""
    sites = federation(tmp_path)
    server = serve(sites)
    server.go("plan", {"s2"})
    (sites["s2"].folder / "session.sealed").unlink()
    sites["s2"].restarted()
    assert "is not newer than session 1 of round 1" in refused(sites["s2"].hear(server.plan_step("s2")))


def test_nothing_of_a_session_lies_open_on_the_disk_and_nothing_at_all_after_it(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "confirmations")
    state = sites["s2"].session._state
    assert state is not None
    secrets = [state.site.secrets.seed, state.site.secrets.masking_key, *state.site.held.values()]
    there = b"".join(path.read_bytes() for path in (tmp_path / "s2").rglob("*") if path.is_file())
    assert not any(secret in there or secret.hex().encode() in there for secret in secrets)
    server.go("confirmations")
    assert sites["s2"].hear(server.end_step("s2")) is None
    assert sorted(path.name for path in sites["s2"].folder.iterdir()) == []
    assert refused(sites["s2"].hear(server.confirmations_step("s2")))


def test_a_session_that_came_to_nothing_leaves_the_update_for_the_next(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "survivors")
    first = server.masked("s2")
    for name, one in sites.items():
        assert one.hear(server.end_step(name, 0, "too few")) is None
        assert sorted(path.name for path in one.folder.iterdir()) == ["private.payload", "private.sealed"]
    server = serve(sites, session=2)
    up_to(server, "survivors")
    assert server.masked("s2") != first
    for phase in PHASES[3:]:
        server.go(phase)
    assert np.array_equal(server.sums()[1], np.sum([sent(one, server) for one in sites.values()], axis=0))


def test_a_damaged_state_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    server.go("plan")
    path = sites["s2"].folder / "session.sealed"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(LocalError, match="is damaged, or was moved here"):
        sites["s2"].restarted()


# --- servers that lie -------------------------------------------------------------------------------------------------


def with_opening(server: Server, **changes: object) -> pb.SecureStep:
    """A plan that holds together, of another opening."""
    return Server(server.sites, server.opening.model_copy(update=changes), server.members, server.job).plan_step("s0")


def test_a_plan_whose_hash_is_another(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    step = server.plan_step("s0")
    step.plan.hash = bytes(32)
    assert "not what this site has worked out" in refused(sites["s0"].hear(step))
    assert sites["s0"].hear(server.plan_step("s0")).WhichOneof("answer") == "advertised"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"threat": "semi-honest"},
        {"corrupt": 0.2},
        {"fewest_survivors": 4},
        {"bits": 16},
        {"bound": 16.0},
        {"metrics": ["loss", "accuracy"]},
    ],
)
def test_terms_other_than_those_of_the_job_that_the_site_has(tmp_path: Path, changes: dict[str, object]) -> None:
    """A changed threshold among them: it follows from corrupt and threat."""
    sites = federation(tmp_path, 7)
    server = Server(sites, make_opening(sites), sites["s0"].members, make_job(**changes))
    assert "not what this site has worked out" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_a_ghost_site_with_a_key_that_no_list_has(tmp_path: Path) -> None:
    """The server certifies one for TLS and puts it on a list of its own making; the site holds the signed one."""
    sites = federation(tmp_path)
    ghosts = member_list([*sites, "s9"])
    sites["s9"] = Site("s9", tmp_path, sites["s0"].job, ghosts)
    server = Server(sites, make_opening(sites), ghosts, sites["s0"].job)
    assert "s9 is no active member on list 1" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_a_key_of_the_servers_in_place_of_a_members(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    swapped = member_list(sites)
    mine = Ed25519PrivateKey.generate()
    swapped.members[3].signing_key = mine.public_key().public_bytes_raw()
    server = Server(sites, make_opening(sites), swapped, sites["s0"].job)
    assert "not what this site has worked out" in refused(sites["s0"].hear(server.plan_step("s0")))
    honest = serve(sites)
    honest.go("plan")
    forged = PublicKeys(sealing=b"\x09" * 32, masking=b"\x08" * 32, commitment=bytes(32)).encode()
    keys = honest.keys_step("s0")
    keys.keys.advertised[3] = sign(honest.plan, Phase.ADVERTISE_KEYS, 3, forged, mine).data
    assert "not signed by s3" in refused(sites["s0"].hear(keys))


def test_this_site_with_another_key_on_the_list(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    sites["s0"].members.members[0].signing_key = bytes(32)
    server = serve(sites)
    assert "another key for s0" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_another_version_of_the_member_list(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    newer = member_list(sites, version=2)
    server = Server(sites, make_opening(sites, member_list_version=2), newer, sites["s0"].job)
    assert "of member list 2, here is 1" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_a_site_without_a_signed_list_takes_part_in_nothing(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    sites["s0"].members = None  # type: ignore[assignment]
    assert "holds no signed member list" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_different_models_to_different_sites(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites, digests={0: "1" * 64})
    assert "not all sites were given the same model" in refused(sites["s0"].hear(server.plan_step("s0")))
    # Told openly, in the opening, it is refused too, unless the schedule sums stale updates.
    bases = {"base_version": 1, "bases": {"s0": 0}, "digests": {0: BASE, 1: "1" * 64}}
    server = serve(sites, **bases)
    assert "began with different models" in refused(sites["s0"].hear(server.plan_step("s0")))
    sites["s0"].sums_stale = True
    sites["s0"].train()
    assert sites["s0"].hear(server.plan_step("s0")).WhichOneof("answer") == "advertised"  # type: ignore[union-attr]


def test_each_of_two_models_has_plans_that_share_no_mask(tmp_path: Path) -> None:
    """Even sites that were told openings of their own refuse each other's keys."""
    sites = federation(tmp_path)
    sites["s0"].base_digest = "1" * 64
    sites["s0"].train()
    server, other = serve(sites), serve(sites, digests={0: "1" * 64})
    server.go("plan", {"s1", "s2", "s3", "s4"})
    answer = sites["s0"].hear(other.plan_step("s0"))
    assert answer is not None
    step = server.keys_step("s1")
    step.keys.advertised.append(answer.advertised)
    assert "of another session, plan or phase" in refused(sites["s1"].hear(step))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"run": "01JD0000000000000000000001"}, "not of run"),
        ({"session": 2}, "not of run"),
        ({"sites": ("s1", "s2", "s3", "s4")}, "not of run"),
        ({"max_weight": 9}, "its update is out of bounds"),
        ({"sites": ("s0", "s1")}, "wanted at least 3 sites|over 2 sites"),
    ],
)
def test_an_opening_that_is_not_this_sites(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    opening = server.opening.model_copy(update=changes)
    step = server.plan_step("s0")
    step.plan.opening = opening.canonical()
    if "max_weight" in changes:
        step = with_opening(server, **changes)
    message = refused(sites["s0"].hear(step))
    assert any(part in message for part in told.split("|")), message


def test_a_cohort_below_the_minimum(tmp_path: Path) -> None:
    sites = federation(tmp_path, job=make_job(fewest_survivors=5))
    server = serve(sites)
    server.go("plan", {"s0", "s1", "s2", "s3"})
    assert "4 sites of 4 organisations sent keys, wanted 5" in refused(sites["s0"].hear(server.keys_step("s0")))


def test_many_sites_of_one_organisation_are_one(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    members = member_list(sites, organisations=2)
    for one in sites.values():
        one.members = members
    server = serve(sites)
    server.go("plan")
    assert "5 sites of 2 organisations" in refused(sites["s0"].hear(server.keys_step("s0")))


def test_a_policy_that_says_no_now(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    sites["s0"].refuses = "policy of site s0: no"
    assert refused(sites["s0"].hear(server.plan_step("s0"))) == "policy of site s0: no"
    sites["s0"].refuses = ""
    up_to(server, "survivors")
    sites["s0"].refuses = "policy of site s0: no more"
    server.state = aggregator.fix_survivors(server.plan, server.state)
    assert refused(sites["s0"].hear(server.survivors_step("s0"))) == "policy of site s0: no more"


def test_replayed_and_older_sessions(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    first, second = serve(sites), serve(sites, session=2)
    up_to(first, "survivors")
    second.go("plan")
    assert "has session 2 under way" in refused(sites["s0"].hear(first.shares_step("s0")))
    assert "is not newer than session 2 of round 1" in refused(sites["s0"].hear(first.plan_step("s0")))
    assert sites["s0"].hear(second.plan_step("s0")) == second.answers["s0", "plan"]


def test_a_second_attempt_with_old_keys(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    first, second = serve(sites), serve(sites, session=2)
    first.go("plan")
    second.go("plan")
    assert first.answers["s0", "plan"].advertised != second.answers["s0", "plan"].advertised
    step = second.keys_step("s0")
    step.keys.advertised[3] = first.state.advertised[3]
    assert "of another session, plan or phase" in refused(sites["s0"].hear(step))


Lie = Callable[[Server], pb.SecureStep]


def _without_own(server: Server) -> pb.SecureStep:
    step = server.keys_step("s0")
    del step.keys.advertised[0]
    return step


def _share_of_another(server: Server) -> pb.SecureStep:
    step = server.shares_step("s0")
    step.shares.items[0] = server.shares_step("s1").shares.items[1]
    return step


def _share_missing(server: Server) -> pb.SecureStep:
    step = server.shares_step("s0")
    del step.shares.items[0]
    return step


def _other_root(server: Server) -> pb.SecureStep:
    told = Survivors.decode(server.state.survivors, 5)
    wrong = Survivors(sharing=told.sharing, surviving=told.surviving, roots={**told.roots, 0: bytes(32)})
    return server.step("s0", survivors=wrong.encode(5))


def _lone_survivor(server: Server) -> pb.SecureStep:
    told = Survivors.decode(server.state.survivors, 5)
    alone = Survivors(sharing=told.sharing, surviving=frozenset({0}), roots={0: told.roots[0]})
    return server.step("s0", survivors=alone.encode(5))


def _few_confirmations(server: Server) -> pb.SecureStep:
    step = server.confirmations_step("s0")
    del step.confirmations.confirmed[2:]
    return step


def _none_confirmed(server: Server) -> pb.SecureStep:
    step = server.confirmations_step("s0")
    del step.confirmations.confirmed[:]
    return step


@pytest.mark.parametrize(
    ("phase", "lie", "told"),
    [
        ("keys", _without_own, "not this site's own keys"),
        ("shares", _share_of_another, "shares are not those of the neighbours|does not open"),
        ("shares", _share_missing, "not those of the neighbours"),
        ("survivors", _other_root, "another input of this site"),
        ("survivors", _lone_survivor, "1 sites of 1 organisations survive"),
        ("confirmations", _few_confirmations, "2 survivors confirm the same, the threshold is 3"),
        ("confirmations", _none_confirmed, "0 survivors confirm the same"),
    ],
)
def test_a_lie_in_a_phase_makes_the_site_leave_and_it_does_not_come_back(
    tmp_path: Path, phase: str, lie: Lie, told: str
) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, phase)
    if phase == "survivors":
        server.state = aggregator.fix_survivors(server.plan, server.state)
    honest: pb.SecureStep = getattr(server, f"{phase}_step")("s0")
    message = refused(sites["s0"].hear(lie(server)))
    assert any(part in message for part in told.split("|")), message
    assert refused(sites["s0"].hear(honest)) == message
    sites["s0"].restarted()
    assert refused(sites["s0"].hear(honest)) == message
    # The control: an honest step in its place is taken by another site.
    answer = sites["s1"].hear(getattr(server, f"{phase}_step")("s1"))
    assert answer is not None
    assert answer.WhichOneof("answer") != "refused"


def test_steps_in_another_order(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    assert "has none under way" in refused(sites["s0"].hear(server.keys_step("s0")))
    up_to(server, "survivors")
    server.state = aggregator.fix_survivors(server.plan, server.state)
    early = server.step("s0", confirmations=server.confirmations_step("s0").confirmations)
    assert "before the survivors are confirmed" in refused(sites["s0"].hear(early))


def test_different_survivors_to_different_sites_and_then_both_to_one(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "survivors")
    server.go("survivors")
    told = Survivors.decode(server.state.survivors, 5)
    fewer = Survivors(
        sharing=told.sharing,
        surviving=told.surviving - {4},
        roots={index: root for index, root in told.roots.items() if index != 4},
    )
    # Twice to one: it would give a share of s4's seed, and then one of its masking key.
    assert "something else than before" in refused(sites["s0"].hear(server.step("s0", survivors=fewer.encode(5))))
    # Half the sites sign the one, half the other: neither reaches the threshold with signatures of the other.
    other = replace(server.state, survivors=fewer.encode(5), confirmed={})
    with pytest.raises(Malformed, match="confirms other survivors"):
        aggregator.take_confirmation(server.plan, other, 1, server.answers["s1", "survivors"].confirmation)


def test_each_site_reveals_one_kind_of_share_of_each_and_once(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "shares")
    for phase in PHASES[2:]:
        server.go(phase, {"s0", "s1", "s2", "s3"})
    kinds: dict[int, set[int]] = {}
    for data in server.state.unmasked.values():
        for one in decode_revealed(verify(server.plan, Phase.UNMASK, data).body):
            kinds.setdefault(one.owner, set()).add(one.kind)
    assert kinds == {0: {1}, 1: {1}, 2: {1}, 3: {1}, 4: {2}}
    again = server.confirmations_step("s0")
    del again.confirmations.confirmed[3:]
    assert sites["s0"].hear(again) == server.answers["s0", "confirmations"]


# --- sums over one base version ---------------------------------------------------------------------------------------


def finished(sites: dict[str, Site], names: set[str], **changes: object) -> list[int]:
    """A session whose sum the server has, whatever it says then: the sum."""
    server = serve(sites, **changes)
    server.go("plan")
    server.go("keys")
    for phase in PHASES[2:]:
        server.go(phase, names)
    return list(server.sums()[1].tolist())


def test_a_retry_without_one_site_would_show_it(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    finished(sites, set(sites))
    without = {name: one for name, one in sites.items() if name != "s4"}
    server = serve(without, session=2)
    message = refused(sites["s0"].hear(server.plan_step("s0")))
    assert message.startswith("the roster differs in s4 from the sites of a sum over the same version that is out")
    sites["s0"].restarted()
    assert refused(sites["s0"].hear(server.plan_step("s0"))) == message


def test_a_retry_with_all_sites_in_which_one_is_said_to_have_dropped_out(tmp_path: Path) -> None:
    """The roster is the same, so the survivors are where the rule bites."""
    sites = federation(tmp_path)
    finished(sites, set(sites))
    server = serve(sites, session=2)
    up_to(server, "shares")
    server.go("shares", {"s0", "s1", "s2", "s3"})
    server.state = aggregator.fix_survivors(server.plan, server.state)
    assert "the list of survivors differs in s4" in refused(sites["s0"].hear(server.survivors_step("s0")))


def test_a_retry_over_the_same_sites_is_taken(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    first = finished(sites, set(sites))
    second = finished(sites, set(sites), session=2)
    assert first == second  # it tells nothing new


def test_three_sums_that_differ_widely_would_show_one_site(tmp_path: Path) -> None:
    """A = {0..9}, B = {0..4}, C = {5..10}: any two differ in at least five sites, and C - (A - B) is site 10."""
    sites = federation(tmp_path, 11)
    a, b = {f"s{n}" for n in range(10)}, {f"s{n}" for n in range(5)}
    c = {f"s{n}" for n in range(5, 11)}
    assert min(len(x ^ y) for x, y in ((a, b), (a, c), (b, c))) >= 5
    finished({name: sites[name] for name in a}, a)
    for session, names in ((2, b), (3, c)):
        server = serve({name: sites[name] for name in sorted(names)}, session=session)
        one = min(names & a)
        assert "the roster differs in" in refused(sites[one].hear(server.plan_step(one)))


def test_the_same_model_under_another_number(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    finished(sites, set(sites))
    for one in sites.values():
        one.task = "train-2"
        one.folder.mkdir()
        one.train(base_version=1, round_=2)
        one.restarted()
    without = {name: one for name, one in sites.items() if name != "s4"}
    server = serve(without, round=2, base_version=1, digests={1: BASE})
    assert "the roster differs in s4" in refused(sites["s0"].hear(server.plan_step("s0")))


def test_a_later_session_of_another_update_ends_what_is_revealed_in_earlier_ones(tmp_path: Path) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    up_to(server, "confirmations")
    other = replace(sites["s0"], task="train-2")
    assert other.hear(serve({**sites, "s0": other}, round=2).plan_step("s0")).WhichOneof("answer") == "advertised"  # type: ignore[union-attr]
    assert "has begun session 1 of round 2 since" in refused(sites["s0"].hear(server.confirmations_step("s0")))


@pytest.mark.parametrize("across_runs", [False, True])
def test_sums_of_other_runs_count_where_the_policy_says_so(tmp_path: Path, across_runs: bool) -> None:
    sites = federation(tmp_path)
    finished(sites, set(sites))
    other = "01JD0000000000000000000009"
    without = {name: one for name, one in sites.items() if name != "s4"}
    for one in without.values():
        one.run, one.across_runs = other, across_runs
        one.folder.mkdir(parents=True)
        one.train()
        one.restarted()
    answer = sites["s0"].hear(serve(without, run=other).plan_step("s0"))
    assert answer is not None
    assert answer.WhichOneof("answer") == ("refused" if across_runs else "advertised")


# --- the log ----------------------------------------------------------------------------------------------------------


def test_a_line_of_audit_for_each_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    with caplog.at_level(logging.INFO, logger="atoll.client.audit"):
        for phase in PHASES:
            server.go(phase)
        sites["s0"].hear(server.end_step("s0"))
    own = [record.message for record in caplog.records if record.name == "atoll.client.audit"]
    lines = [line for line in own if "s0" not in line.split(" ")[0]]
    for wanted in (
        "session 1 plan: round 1: 5 sites of 5 organisations, active server, 0 may be corrupt, threshold 3, no sum of fewer than 3",
        "session 1 keys: keys of 5 sites",
        "session 1 shares: input of",
        "session 1 survivors: 5 survivors: s0, s1, s2, s3, s4",
        "session 1 confirmations: shares revealed for the sum over 5 sites",
        "session 1 end: over, and erased: the sum is in version 1",
    ):
        assert any(wanted in line for line in lines), wanted
    assert RUN in lines[0]
    assert signing_key("s0").private_bytes_raw().hex() not in caplog.text


# --- bytes of any kind ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A site's folder as it is before each phase, by phase, and the honest step of it."""
    root = tmp_path_factory.mktemp("begun")
    steps = {}
    sites = federation(root / "now")
    server = serve(sites)
    for phase in PHASES:
        if phase == "survivors":
            server.state = aggregator.fix_survivors(server.plan, server.state)
        steps[phase] = getattr(server, f"{phase}_step")("s0").SerializeToString()
        shutil.copytree(root / "now" / "s0", root / phase / "s0")
        server.go(phase)
    return root, steps


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_step_with_any_byte_changed_is_refused_and_never_an_error_of_ours(
    begun: tuple[Path, dict[str, bytes]], data: st.DataObject
) -> None:
    root, steps = begun
    phase = data.draw(st.sampled_from(PHASES))
    honest = pb.SecureStep.FromString(steps[phase])
    raw = bytearray(steps[phase])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        step = pb.SecureStep.FromString(bytes(raw[: data.draw(st.integers(len(raw) // 2, len(raw)))]))
    except DecodeError:
        return
    job = make_job()
    with TemporaryDirectory() as folder:
        shutil.copytree(root / phase / "s0", Path(folder) / "s0")
        one = Site("s0", Path(folder), job, member_list(f"s{number}" for number in range(5)))
        answer = one.hear(step)
    if answer is None:
        assert step.WhichOneof("step") == "end"
    elif answer.WhichOneof("answer") != "refused":
        kept = {step.WhichOneof("step"), honest.WhichOneof("step")}
        assert kept == {phase}
        # What was changed is not looked at: names of the task, which the agent has gone by, or confirmations beyond
        # the threshold.
        assert getattr(step, phase) == getattr(honest, phase) or phase == "confirmations"
