"""A site of protocol version 1, the oldest that is supported, beside one of today in a round of a real server.

The older one says recorded bytes and reads the server's by field numbers, so a change of what any field of a round
means breaks this, however well the present agent and server agree.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from integration.federation import Federation
from integration.trial import trial_job
from numpy.typing import NDArray
from samples.older_peer import Alter, Fields, OlderPeer, as_stored, fields

from atoll.transport.identity import load_identity

OLDER, PRESENT = "site-1", "site-2"
WEIGHT = 339  # of the recorded update: thrice the examples of the present site
UPDATE = np.arange(35) / 64  # what the recorded update adds to the model's values, one after the other
# A step of no length: the update of the present site is zero.
JOB = trial_job(rounds=1, sites=[OLDER, PRESENT], schedule="min = 2", values="hidden = 1\nlr = 0.0")

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")  # in the order of the model's bytes

LATER_FIELD = b"\xfa\x7c\x05later"  # field 1999, bytes
LATER_FEATURE = b"\x1a\x07later/9"  # one more of Hello's features


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A running server with one running site; the other has an identity and no agent."""
    federation = Federation(tmp_path_factory.mktemp("older"), limits="heartbeat_s = 1\nlease_s = 120")
    try:
        federation.make()
        federation.start_server()
        federation.enrol_researcher()
        for name in (OLDER, PRESENT):
            federation.enrol_site(name)
        federation.sign()
        federation.start_site(PRESENT)
        yield federation
    finally:
        federation.close()


def as_a_later_version(name: str, data: bytes) -> bytes:
    """The message with a field more, within its body and beside it, and a Hello with a feature more."""
    if name == "download_request":
        return data + LATER_FIELD
    more = LATER_FIELD + (LATER_FEATURE if name == "hello" else b"")
    return data + data[:1] + bytes([len(more)]) + more + LATER_FIELD  # a second part of the body: the two are merged


@pytest.mark.parametrize("alter", [as_stored, as_a_later_version], ids=["version-1", "with-unknown-fields"])
def test_a_peer_of_version_1_takes_part_in_a_round(federation: Federation, alter: Alter) -> None:
    peer = OlderPeer(load_identity(federation.home(OLDER) / "identity"), alter)
    try:
        run, base = take_part(federation, peer)
    finally:
        peer.close()
    state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    [record] = state["rounds"]
    assert (record["sites"], record["missing"], record["weight"]) == (2, {}, WEIGHT + WEIGHT // 3)
    assert record["train"]["margin"] == 5 / 4
    assert record["evaluate"]["recall"] == 9 / 12
    np.testing.assert_array_equal(base, values_of(federation, run, 0))
    np.testing.assert_allclose(values_of(federation, run, 1), base + 3 / 4 * UPDATE, rtol=0, atol=1e-6)


def take_part(federation: Federation, peer: OlderPeer) -> tuple[str, NDArray[np.float32]]:
    """One round from Hello to the end of its run, with all that the server says; the run, and the values it began with."""
    peer.say("hello")
    welcome = peer.hear(1)
    assert welcome.pop(4).startswith(b"atoll ")
    assert welcome == {1: 1, 3: b"trial", 5: 1, 6: 120, 7: 4 << 20}
    peer.say("heartbeat")
    name = federation.submit(JOB)
    run = name.encode()
    offer = peer.hear_offer()
    assert (offer[1], offer[5], offer[6]) == (run, b"ada", 2)
    assert json.loads(offer[2])["job"]["app"] == "trial"
    peer.say("accept")

    train, evaluate = {1: run, 2: b"r1.site-1", 3: 1}, {1: run, 2: b"e1.site-1", 3: 1}
    task = peer.hear(3)
    assert (fields(task[1]), task[2], task[3], task.get(4, 0)) == (train, 1, 1, 0)
    peer.say("fetch")
    grant = peer.hear(4)
    model = peer.download(grant[1])
    assert (grant[2], fields(grant[3]), grant.get(5, 0), grant.get(6, 0)) == (2, {1: run}, 0, 0)
    assert (grant[7], grant[8]) == (len(model), zlib.crc32(model))
    peer.say("progress")
    peer.say("result")
    grant = peer.hear(4)
    assert (grant[2], fields(grant[3]), grant[4], grant.get(6, 0)) == (1, train, b"update", 0)
    assert peer.upload(grant[1], "frame_1", "frame_2") == {1: grant[7], 2: 1}
    assert verdict(peer.hear(6)) == (train, 2, 1)
    assert peer.hear(7) == {1: run, 2: 1, 3: 1}

    task = peer.hear(3)
    assert (fields(task[1]), task[2], task[3], task[4]) == (evaluate, 2, 1, 1)
    peer.say("evaluated")
    assert verdict(peer.hear(6)) == (evaluate, 4, 1)
    assert peer.hear(9) == {1: run, 2: b"finished"}
    return name, np.frombuffer(model, dtype="<f4")


def verdict(message: Fields) -> tuple[Fields, int, int]:
    """Of which task, which outcome, and its value."""
    [outcome] = message.keys() - {1}
    return fields(message[1]), outcome, message[outcome]


def values_of(federation: Federation, run: str, version: int) -> NDArray[np.float32]:
    model = federation.model_of_version(run, version)
    return np.concatenate([model[name].ravel() for name in NAMES])
