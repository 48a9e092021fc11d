"""What networks do to an upload and to a silent line, by a relay before site-2: the same bytes, and little sent twice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
from chaos.conftest import JOB, PATIENT, RELAYED, Limits, alter, reach_by, require_undisturbed, restore
from chaos.relay import Away, Cut, Link, LoseAnswers, Relay, Silence
from chaos.shaped import shaped_pair
from integration.federation import Federation, command
from integration.trial import trial_job

WIDE = trial_job(rounds=1, values="hidden = 64000", work="epochs = 1, batch_size = 64")
WIDE_BYTES = 4 * (30 * 64000 + 64000 + 2 * 64000 + 2)  # 8.4 MB: an update of many frames
NARROW = trial_job(rounds=1, values="hidden = 4000", work="epochs = 1, batch_size = 64")
NARROW_BYTES = 4 * (30 * 4000 + 4000 + 2 * 4000 + 2)  # 0.5 MB
RESUMING = f"{PATIENT}\nmax_frame_bytes = 262144"
KEEPALIVE_S = 3.0  # in the scaled version; as shipped a line is tried after 30 s and given up 20 s later


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Cut(direction="up", after_bytes=round(0.6 * WIDE_BYTES)), id="cut-at-60-percent"),
        pytest.param(LoseAnswers(after_bytes=WIDE_BYTES - (64 << 10)), id="last-acknowledgement-lost"),
    ],
)
def test_an_upload_that_breaks_off_is_taken_up_where_it_was(
    federation: Federation, relay: Relay, limits: Limits, undisturbed_of: Callable[[str], str], fault: Cut | LoseAnswers
) -> None:
    undisturbed = undisturbed_of(WIDE)
    with limits(RESUMING):
        before = relay.forwarded["up"]
        relay.do(Link(bytes_per_s=20e6))  # so that the end of an upload is not in the buffers of both ends
        relay.do(fault)
        run = federation.submit(WIDE)
        federation.wait_for(lambda: relay.struck, "the fault strikes")
        struck_at = relay.forwarded["up"]
        state = federation.wait_for_end(run)
    assert state["status"] == "finished", federation.logs()
    sent, sent_again = struck_at - before, relay.forwarded["up"] - struck_at
    print(f"\n{fault}: {sent} bytes up before, {sent_again} after; the update has {WIDE_BYTES}")
    assert sent_again < 0.5 * WIDE_BYTES
    [record] = state["rounds"]
    assert (record["sites"], record["missing"]) == (3, {})  # three sites, three copies: none counted twice
    assert record["bytes_up"] < 3.1 * WIDE_BYTES
    assert federation.model_hash(run) == undisturbed


def test_a_slow_and_lossy_link(federation: Federation, relay: Relay, undisturbed_of: Callable[[str], str]) -> None:
    """20 Mbit/s, 200 ms there and back, 1 % loss.

    Rate by a token bucket on a pair of interfaces between two network namespaces, where this machine makes them (root,
    iproute2, the kernel's `tbf`); delay and loss by the relay. Where it does not, the relay does all three.
    """
    undisturbed = undisturbed_of(NARROW)
    settings = federation.home(RELAYED) / "site.toml"
    federation.sites[RELAYED].stop()
    with shaped_pair(bits_per_s=20_000_000) as pair:
        line = Relay(federation.ports[0], host=pair.address if pair else "127.0.0.1").start()
        try:
            line.do(Link(delay_s=0.1, loss=0.01, bytes_per_s=math.inf if pair else 20e6 / 8, seed=1))
            reach_by(settings, line.port, line.host)
            arguments = [*(pair.prefix if pair else ()), *command(["site", "run", "--home", federation.home(RELAYED)])]
            federation.sites[RELAYED] = federation.start_program(RELAYED, arguments, no_proxy="*")
            state = federation.finish(NARROW)
            print(f"\nrate by {'the kernel' if pair else 'the relay'}: {state['rounds']}")
            federation.sites[RELAYED].stop()
        finally:
            line.close()
            reach_by(settings, relay.port)
            federation.start_site(RELAYED)
    assert line.forwarded["up"] > NARROW_BYTES
    assert [record["sites"] for record in state["rounds"]] == [3]
    assert federation.model_hash(state["run"]) == undisturbed


@pytest.mark.parametrize("for_s", [1.0, pytest.param(60.0, marks=pytest.mark.chaos)])
def test_a_link_that_is_down_for_a_while_is_waited_for(
    federation: Federation, relay: Relay, undisturbed: str, for_s: float
) -> None:
    federation.fault(RELAYED).write_text("slow 0.3")
    log = federation.sites[RELAYED].log
    at = log.stat().st_size
    try:
        run = federation.submit(JOB)
        federation.wait_until(run, lambda state: any(site["state"] == "training" for site in state["sites"]))
        relay.do(Away(for_s=for_s))
        federation.wait_for(lambda: "trying again in" in log.read_text()[at:], "the site notices")
    finally:
        federation.fault(RELAYED).unlink()
    require_undisturbed(federation, run, undisturbed)


@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=pytest.mark.chaos)], ids=["scaled", "as-shipped"])
def test_a_half_open_connection_is_noticed_by_both_ends(
    federation: Federation, relay: Relay, undisturbed: str, scaled: bool
) -> None:
    """Nothing comes through any more and nobody is told. The bound: a keepalive's interval and timeout, and some.

    The site gives its stream up and opens another one, which takes the place of the old one at the server.
    """
    within_s = (2 * KEEPALIVE_S if scaled else 50.0) + 10.0
    if scaled:
        alter(federation, "server", RELAYED, keepalive_s=KEEPALIVE_S)
    federation.fault(RELAYED).write_text("slow 0.5")
    try:
        run = federation.submit(JOB)
        federation.wait_until(run, lambda state: any(site["state"] == "training" for site in state["sites"]))
        assert federation.server is not None
        logs = {"site": federation.sites[RELAYED].log, "server": federation.server.log}
        starts = {name: log.stat().st_size for name, log in logs.items()}
        relay.do(Silence())
        began_s = time.monotonic()
        signs = {"site": "trying again in", "server": f"{RELAYED} attached"}
        for name, sign in signs.items():
            federation.wait_for(
                lambda name=name, sign=sign: sign in logs[name].read_text()[starts[name] :],  # type: ignore[misc]
                f"the {name} notices",
            )
            took_s = time.monotonic() - began_s
            print(f"\nnoticed by the {name} after {took_s:.1f} s")
            assert took_s < within_s
        federation.fault(RELAYED).unlink()
        state = federation.wait_for_end(run)
    finally:
        federation.fault(RELAYED).unlink(missing_ok=True)
        if scaled:
            restore(federation, "server", RELAYED)
    assert state["status"] == "finished", federation.logs()
    assert federation.model_hash(run) == undisturbed
