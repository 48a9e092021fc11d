"""SIGTERM of the server in the middle of an upload: what has time arrives, the rest is sent again; the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from chaos.conftest import PATIENT, RELAYED, Limits
from chaos.relay import Link, Relay
from chaos.test_network import WIDE, WIDE_BYTES
from integration.federation import Federation

from atoll.server.settings import ServerFolder, load_settings
from atoll.server.store import Store

EXIT_S = 30.0  # for a drained process to be gone: torch alone takes seconds to be torn down on a busy machine


def committed(federation: Federation, run: str) -> list[int]:
    """Versions that a server which does not run has committed."""
    place = ServerFolder(root=federation.server_folder)
    store = Store.open(place.database_url(load_settings(place.root, {})))
    try:
        return [row.version for row in store.rounds(run)]
    finally:
        store.close()


def submit_and_wait_for_half_an_upload(federation: Federation, relay: Relay) -> str:
    """The run, when half of the relayed site's update is at the server; the others' are there."""
    before = relay.forwarded["up"]
    run = federation.submit(WIDE)
    federation.wait_for(lambda: relay.forwarded["up"] - before > WIDE_BYTES // 2, "half an upload")
    return run


def test_an_upload_that_has_time_arrives_before_a_drained_server_ends(
    federation: Federation, relay: Relay, limits: Limits, undisturbed_of: Callable[[str], str]
) -> None:
    undisturbed = undisturbed_of(WIDE)
    drain_s = 30.0
    with limits(f"{PATIENT}\ndrain_s = {drain_s}"):
        relay.do(Link(bytes_per_s=1.5e6))  # half an update takes three seconds, the site's wait after a drain is one
        run = submit_and_wait_for_half_an_upload(federation, relay)
        assert federation.server is not None
        began_s = time.monotonic()
        assert federation.server.stop(drain_s) == 0
        took_s = time.monotonic() - began_s
        assert committed(federation, run) == [1], federation.logs()
        relay.mend()
        before = relay.forwarded["up"]
        federation.start_server()
        state = federation.wait_for_end(run)
    print(f"\ndrained in {took_s:.1f} s")
    assert state["status"] == "finished", federation.logs()
    assert relay.forwarded["up"] - before < WIDE_BYTES // 10  # nothing was sent again
    assert federation.model_hash(run) == undisturbed


def test_an_upload_that_stalls_is_cut_at_the_end_of_a_drain_and_sent_again(
    federation: Federation, relay: Relay, limits: Limits, undisturbed_of: Callable[[str], str]
) -> None:
    undisturbed = undisturbed_of(WIDE)
    log = federation.sites[RELAYED].log
    at = log.stat().st_size
    drain_s = 4.0
    with limits(f"{PATIENT}\ndrain_s = {drain_s}"):
        relay.do(Link(bytes_per_s=1.5e6))
        run = submit_and_wait_for_half_an_upload(federation, relay)
        relay.do(Link(bytes_per_s=10e3))
        assert federation.server is not None
        began_s = time.monotonic()
        assert federation.server.stop(drain_s + EXIT_S) == 0
        took_s = time.monotonic() - began_s
        assert committed(federation, run) == []
        relay.mend()
        federation.start_server()
        state = federation.wait_for_end(run)
    print(f"\ndrained in {took_s:.1f} s")
    assert took_s > 0.8 * drain_s  # it was waited for
    said = log.read_text()[at:]
    assert "upload of 'update' broke off, offering it again" in said
    assert "the server ended the connection in order" in said
    assert "LocalError" not in said
    assert state["status"] == "finished", federation.logs()
    assert [record["sites"] for record in state["rounds"]] == [3]
    assert federation.model_hash(run) == undisturbed
