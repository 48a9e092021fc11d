"""Peers of other versions: what they have in common is chosen, what one does not know is ignored."""

from __future__ import annotations

import pytest

from atoll.transport.hello import (
    BULK,
    MAX_FEATURES,
    OF_A_SITE,
    OURS,
    REGION,
    SECAGG,
    Abilities,
    check_welcome,
    choose,
    make_hello,
    make_welcome,
    require_regions_taken,
)
from atoll.wire.control_pb2 import Capacity, Hello, ServerMessage, TaskKey, Welcome
from atoll.wire.errors import Incompatible, Malformed, RemoteError, TooLarge

CAPACITY = Capacity(runs_at_once=2)
# Field 1999 of wire type 2 (length-delimited): what a later version may send.
UNKNOWN_FIELD = bytes([0xFA, 0x7C, 5]) + b"later"


def abilities(protocol_min: int, protocol_max: int, *features: str) -> Abilities:
    return Abilities(protocol_min=protocol_min, protocol_max=protocol_max, features=frozenset(features))


def welcome(chosen: tuple[int, tuple[str, ...]], heartbeat_s: int = 15, lease_s: int = 60) -> Welcome:
    return make_welcome(
        chosen, federation="hospitals", heartbeat_s=heartbeat_s, lease_s=lease_s, max_frame_bytes=1 << 20
    )


def test_two_ends_of_this_version_agree() -> None:
    hello = make_hello(CAPACITY, joined_runs=["a"], held_updates=[TaskKey(run="a", task="b", attempt=1)])
    chosen = choose(hello)
    assert chosen == (1, (BULK,))
    assert check_welcome(welcome(chosen)) == chosen


@pytest.mark.parametrize(
    ("site", "server", "chosen"),
    [
        (abilities(1, 1, "a/1"), abilities(1, 3, "a/1", "b/1"), (1, ("a/1",))),  # an older site
        (abilities(1, 4, "b/1", "z/9"), abilities(1, 1, "b/1"), (1, ("b/1",))),  # a newer site
        (abilities(2, 5), abilities(1, 3), (3, ())),  # ranges that overlap
    ],
)
def test_the_highest_common_version_and_the_common_features(
    site: Abilities, server: Abilities, chosen: tuple[int, tuple[str, ...]]
) -> None:
    assert choose(make_hello(CAPACITY, ours=site), server) == chosen
    assert check_welcome(welcome(chosen), site) == chosen


@pytest.mark.parametrize(
    ("site", "server", "behind"),
    [(abilities(1, 1), abilities(2, 3), "upgrade the site"), (abilities(4, 5), abilities(1, 3), "upgrade the server")],
)
def test_nothing_in_common_says_which_end_to_upgrade(site: Abilities, server: Abilities, behind: str) -> None:
    with pytest.raises(Incompatible, match=behind) as caught:
        choose(make_hello(CAPACITY, ours=site), server)
    assert caught.value.value == f"{site.protocol_min} to {site.protocol_max}"
    assert caught.value.bound == f"{server.protocol_min} to {server.protocol_max}"


def test_unknown_fields_and_messages_of_a_newer_peer_are_ignored() -> None:
    newer = Hello.FromString(make_hello(CAPACITY, ours=abilities(1, 9, "z/9")).SerializeToString() + UNKNOWN_FIELD)
    assert choose(newer) == (1, ())
    later_kind = ServerMessage.FromString(UNKNOWN_FIELD)
    assert later_kind.WhichOneof("body") is None


def test_a_hello_of_an_older_peer_lacks_fields_and_is_read() -> None:
    older = Hello(protocol_min=1, protocol_max=1, capacity=CAPACITY)
    assert choose(older) == (1, ())
    assert older.member_list_version == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (Hello(protocol_min=3, protocol_max=2), "protocol_min"),
        (Hello(protocol_min=0, protocol_max=0), "protocol_min"),
        (Hello(protocol_min=1, protocol_max=1, capacity=Capacity(runs_at_once=0)), "capacity.runs_at_once"),
        (Hello(protocol_min=1, protocol_max=1, capacity=Capacity(runs_at_once=65)), "capacity.runs_at_once"),
    ],
)
def test_a_hello_out_of_bounds_is_refused(change: Hello, field: str) -> None:
    with pytest.raises(Malformed) as caught:
        choose(change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "more",
    [
        Hello(features=[f"f{number}" for number in range(MAX_FEATURES + 1)]),
        Hello(features=["x" * 65]),
        Hello(capacity=Capacity(labels={f"l{number}": "" for number in range(33)})),
        Hello(capacity=Capacity(labels={"zone": "x" * 64})),
        Hello(joined_runs=["r"] * 100_001),
        Hello(joined_runs=["r" * 27]),
        Hello(held_updates=[TaskKey(run="r" * 27)]),
        Hello(open_tasks=[TaskKey(task="t" * 97)]),
        Hello(software="s" * 129),
    ],
)
def test_a_hello_that_lists_too_much_is_refused(more: Hello) -> None:
    hello = make_hello(CAPACITY)
    hello.MergeFrom(more)
    with pytest.raises(TooLarge):
        choose(hello)


def test_a_welcome_with_a_version_that_nobody_offered_is_refused() -> None:
    with pytest.raises(Incompatible, match="chose protocol 2"):
        check_welcome(welcome((2, ())))


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        (Welcome(features=["x"] * (MAX_FEATURES + 1)), TooLarge),
        (Welcome(features=["x" * 65]), TooLarge),
        (Welcome(server_software="s" * 129), TooLarge),
        (Welcome(federation="f" * 64), Malformed),
        (Welcome(federation="\x1b[2J"), Malformed),
    ],
)
def test_a_welcome_out_of_bounds_is_refused(more: Welcome, kind: type[RemoteError]) -> None:
    greeting = welcome((1, ()))
    greeting.MergeFrom(more)
    with pytest.raises(kind):
        check_welcome(greeting)


@pytest.mark.parametrize(("heartbeat_s", "lease_s"), [(0, 60), (60, 60), (61, 60)])
def test_a_lease_must_outlast_the_heartbeat(heartbeat_s: int, lease_s: int) -> None:
    with pytest.raises(Malformed, match="heartbeat"):
        check_welcome(welcome((1, ()), heartbeat_s, lease_s))


def test_features_that_the_site_never_offered_are_ignored() -> None:
    assert check_welcome(welcome((1, ("z/9",))), OURS) == (1, ())


def test_a_region_and_a_server_of_this_version_agree_on_partial_sums() -> None:
    chosen = choose(make_hello(CAPACITY, ours=OURS))
    assert chosen == (1, (BULK, REGION, SECAGG))
    require_regions_taken(welcome(chosen))


def test_an_older_server_takes_no_region_and_the_error_says_what_to_do() -> None:
    chosen = choose(make_hello(CAPACITY, ours=OURS), OF_A_SITE)
    with pytest.raises(Incompatible, match="takes no regions, only sites: upgrade it") as caught:
        require_regions_taken(welcome(chosen))
    assert caught.value.bound == REGION
