"""The controls of the tests in this folder: a site without one of its guards lets the lie through that the guard is for.

Each attack is refused by the site as it is, and taken by one whose guard was cut out of the source. So a test here that
stopped to catch a lie would be seen, and so would a guard that nothing hangs on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from samples.secagg_session import Session, inputs, plan_of
from samples.secure_sites import federation, serve

from atoll.client.revealed import Revealed
from atoll.privacy.secagg import aggregator, messages, site
from atoll.privacy.secagg.messages import Phase, PublicKeys, Survivors, sign, verify
from atoll.privacy.secagg.site import Secrets
from atoll.wire.errors import Malformed, NotAllowed

EVERYBODY = set(range(5))
Attack = Callable[[Any], object]
"""Does it to a site, whose module it gets. Raises where the site refuses."""


def at(phase: str, *, attempt: int = 1, fewest: int = 3) -> Session:
    """A session of five honest sites up to a phase."""
    session = Session(plan_of(5, attempt=attempt, fewest=fewest))
    session.advertise(EVERYBODY)
    if phase != "keys":
        session.share(EVERYBODY)
    if phase in ("inputs", "confirmed"):
        session.send_inputs(EVERYBODY, inputs(session.plan))
    if phase == "confirmed":
        session.confirm(EVERYBODY)
    return session


def without(session: Session, left_out: set[int]) -> bytes:
    there = {index: data for index, data in session.server.inputs.items() if index not in left_out}
    return aggregator.fix_survivors(session.plan, replace(session.server, inputs=there, survivors=b"")).survivors


def keys_with(session: Session, index: int, message: bytes) -> list[bytes]:
    return [message if other == index else data for other, data in session.server.advertised.items()]


# --- attacks ------------------------------------------------------------------------------------------------------------


def swapped_keys(module: Any) -> object:
    """The server puts keys of its own in the place of site 3's."""
    session = at("keys")
    forged = PublicKeys(sealing=b"\x01" * 32, masking=b"\x02" * 32, commitment=bytes(32)).encode()
    message = sign(session.plan, Phase.ADVERTISE_KEYS, 3, forged, Ed25519PrivateKey.generate()).data
    return module.take_keys(session.plan, session.states[0], keys_with(session, 3, message))


def other_plan(change: Callable[[Any], Any]) -> Attack:
    """Site 4 is told another plan, and its keys are handed to site 0 as if it had not been."""

    def attack(module: Any) -> object:
        session = at("keys")
        other = site.advertise(change(session.plan), 4, Secrets.draw(), session.keys[4]).advertised
        return module.take_keys(session.plan, session.states[0], keys_with(session, 4, other))

    return attack


def ghost(module: Any) -> object:
    """A site that no signed list has takes the place of site 4 in what site 0 is told."""
    session, key = at("keys"), Ed25519PrivateKey.generate()
    member = replace(session.plan.roster[4], site="site-ghost", signing_key=key.public_key().public_bytes_raw())
    told = replace(session.plan, roster=(*session.plan.roster[:4], member))
    message = site.advertise(told, 4, Secrets.draw(), key).advertised
    return module.take_keys(session.plan, session.states[0], keys_with(session, 4, message))


def replayed_keys(module: Any) -> object:
    """A second attempt with the keys of the first."""
    old, new = at("keys"), at("keys", attempt=2)
    return module.take_keys(new.plan, new.states[0], keys_with(new, 3, old.server.advertised[3]))


def one_key_twice(module: Any) -> object:
    session = at("keys")
    stolen = verify(session.plan, Phase.ADVERTISE_KEYS, session.server.advertised[2]).body
    copied = sign(session.plan, Phase.ADVERTISE_KEYS, 3, stolen, session.keys[3]).data
    return module.take_keys(session.plan, session.states[0], keys_with(session, 3, copied))


def own_keys_changed(module: Any) -> object:
    session = at("keys")
    return module.take_keys(session.plan, session.states[0], list(session.server.advertised.values())[1:])


def second_list(module: Any) -> object:
    session = at("shares")
    return module.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def few_sites(module: Any) -> object:
    """A cohort below the minimum."""
    session = Session(plan_of(5, fewest=5))
    session.advertise({0, 1, 2, 3})
    return module.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def few_organisations(module: Any) -> object:
    plan = plan_of(5)
    session = Session(replace(plan, roster=tuple(replace(member, organisation="one") for member in plan.roster)))
    session.advertise(EVERYBODY)
    return module.take_keys(session.plan, session.states[0], list(session.server.advertised.values()))


def share_left_out(module: Any) -> object:
    session = at("shares")
    return module.take_shares(session.plan, session.states[0], session.server.sharing, session.delivery(0)[1:])


def masks_too_early(module: Any) -> object:
    """Steps in another order: the input is asked for before it is known who shares, so only its own mask would hide it."""
    session = at("shares")
    return module.masks(session.plan, session.states[0])


def second_input(module: Any) -> object:
    session = at("inputs")
    return module.send_input(session.plan, session.states[0], bytes(32), session.keys[0])


def both_shares(module: Any) -> object:
    """All survive, and then site 4 has dropped out: its seed first, its key after."""
    session = at("inputs")
    state = site.confirm(session.plan, session.states[0], without(session, set()), session.keys[0])
    after = module.confirm(session.plan, state, without(session, {4}), session.keys[0])
    assert Survivors.decode(after.survivors, 5).surviving == EVERYBODY - {4}
    return after


def lone_survivor(module: Any) -> object:
    session = at("inputs")
    told = Survivors(sharing=session.server.sharing, surviving=frozenset({0}), roots={0: session.states[0].input_root})
    return module.confirm(session.plan, session.states[0], told.encode(5), session.keys[0])


def other_root(module: Any) -> object:
    """The server has another input of this site in its sum."""
    session = at("inputs")
    told = Survivors.decode(without(session, set()), 5)
    changed = replace(told, roots={**told.roots, 0: bytes(32)})
    return module.confirm(session.plan, session.states[0], changed.encode(5), session.keys[0])


def different_survivors(module: Any) -> object:
    """Sites 0 and 1 hear that all survive, 2 and 3 that site 4 does not."""
    session = at("inputs")
    for index in range(4):
        told = without(session, set() if index < 2 else {4})
        session.states[index] = site.confirm(session.plan, session.states[index], told, session.keys[index])
    confirmed = [session.states[index].consistency for index in range(4)]
    return module.unmask(session.plan, session.states[0], confirmed, session.keys[0])


def few_confirmations(module: Any) -> object:
    session = at("confirmed")
    return module.unmask(session.plan, session.states[0], list(session.server.confirmed.values())[:2], session.keys[0])


def confirmed_by_nobody(module: Any) -> object:
    """Shares are asked for with confirmations that the server has signed."""
    session, body = at("confirmed"), messages.body
    forged = [
        sign(session.plan, Phase.CONSISTENCY, index, body(data), Ed25519PrivateKey.generate()).data
        for index, data in session.server.confirmed.items()
    ]
    return module.unmask(session.plan, session.states[0], forged, session.keys[0])


# --- guards -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is cut out: text of a module, and what stands in its place."""

    module: ModuleType
    old: str
    new: str


SIGNATURE = Guard(module=messages, old="        key.verify(signature, _context(phase) + start)\n", new="        pass\n")
ENVELOPE = Guard(
    module=messages, old="    if data[: _ENVELOPE.size] != _envelope(plan, phase, sender):", new="    if False:"
)
ENOUGH = Guard(module=site, old="    if organisations < fewest:", new="    if False:")

CONTROLS: dict[str, tuple[Attack, tuple[Guard, ...]]] = {
    "keys of the server's own": (swapped_keys, (SIGNATURE,)),
    "a ghost site": (ghost, (SIGNATURE, ENVELOPE)),
    "another model": (other_plan(lambda plan: replace(plan, bound_to={"base": "11" * 32})), (ENVELOPE,)),
    "a replayed round": (other_plan(lambda plan: replace(plan, round=6)), (ENVELOPE,)),
    "a changed threshold": (
        other_plan(lambda plan: replace(plan, parameters=replace(plan.parameters, threshold=2))),
        (ENVELOPE,),
    ),
    "a second attempt with old keys": (replayed_keys, (ENVELOPE,)),
    "one key twice": (one_key_twice, (Guard(module=site, old="    if len(set(every)) != len(every):", new="    if False:"),)),
    "without its own keys": (
        own_keys_changed,
        (Guard(module=site, old="    if own != [state.advertised] or len(public) != len(taken):", new="    if False:"),),
    ),
    "a second list of keys": (second_list, (Guard(module=site, old="    if state.public:\n", new="    if False:\n"),)),
    "too few sites": (few_sites, (ENOUGH,)),
    "one organisation": (few_organisations, (ENOUGH,)),
    "a share left out": (
        share_left_out,
        (Guard(module=site, old="    if {message.sender for message in taken} != near or len(taken) != len(near):", new="    if False:"),),
    ),
    "steps in another order": (
        masks_too_early,
        (
            Guard(
                module=site,
                old='    if not state.sharing:\n        raise NotAllowed("whom to mask with is not known before shares were taken")\n    found',
                new="    found",
            ),
        ),
    ),
    "a second input": (second_input, (Guard(module=site, old="        if root != state.input_root:", new="        if False:"),)),
    "both kinds of share": (
        both_shares,
        (Guard(module=site, old="    if state.survivors:\n        if data", new="    if state.survivors == data:\n        if data"),),
    ),
    "a single survivor": (lone_survivor, (ENOUGH,)),
    "another input in the sum": (
        other_root,
        (Guard(module=site, old="    if not state.input or told.roots[state.site] != state.input_root:", new="    if False:"),),
    ),
    "different survivors": (
        different_survivors,
        (Guard(module=site, old="        if message.body != wanted:", new="        if False:"),),
    ),
    "few confirmations": (
        few_confirmations,
        (Guard(module=site, old="    if len(counted) < plan.parameters.threshold:", new="    if False:"),),
    ),
    "confirmations by the server": (confirmed_by_nobody, (SIGNATURE,)),
}  # fmt: skip


@contextmanager
def cut_out(guards: tuple[Guard, ...]) -> Iterator[Any]:
    """The module of a site without these guards."""
    names = {module: f"{module.__name__}_mutant" for module in (messages, site)}
    made: dict[ModuleType, ModuleType] = {}
    try:
        for module, name in names.items():
            source = inspect.getsource(module)
            for guard in guards:
                if guard.module is module:
                    assert source.count(guard.old) == 1, f"{module.__name__} has no such guard any more: {guard.old}"
                    source = source.replace(guard.old, guard.new)
            made[module] = sys.modules[name] = ModuleType(name)
            exec(compile(source, name, "exec"), vars(made[module]))  # noqa: S102  source of this repository
        vars(made[site])["verify"] = vars(made[messages])["verify"]
        yield made[site]
    finally:
        for name in names.values():
            sys.modules.pop(name, None)


@pytest.mark.parametrize("lie", CONTROLS)
def test_an_honest_site_refuses_it_and_one_without_the_guard_does_not(lie: str) -> None:
    attack, guards = CONTROLS[lie]
    with pytest.raises((Malformed, NotAllowed)):
        attack(site)
    with cut_out(()) as same, pytest.raises((Malformed, NotAllowed)):
        attack(same)  # the copy alone changes nothing
    with cut_out(guards) as mutant:
        assert attack(mutant) is not None


def test_without_the_roster_rule_a_retry_without_one_site_would_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = federation(tmp_path)
    server = serve(sites)
    for phase in ("plan", "keys", "shares", "survivors", "confirmations"):
        server.go(phase)
    fewer = serve({name: one for name, one in sites.items() if name != "s4"}, session=2)
    refused = sites["s0"].hear(fewer.plan_step("s0"))
    assert refused is not None
    assert refused.WhichOneof("answer") == "refused"
    monkeypatch.setattr(Revealed, "require_same", lambda *_: None)
    taken = sites["s1"].hear(fewer.plan_step("s1"))
    assert taken is not None
    assert taken.WhichOneof("answer") == "advertised"
