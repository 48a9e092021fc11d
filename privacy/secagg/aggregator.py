"""The server's side of a session: it passes on what sites say, and takes the masks off the sum.

It learns the sum and who took part. Whatever it changes on the way is refused by the sites, who check signatures of
keys that are not the server's to give. Invariant: nothing of a sum leaves before every seed and key that it takes was
rebuilt and compared with what its owner had sent; with too few good shares the session is given up, and nothing is
published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from atoll.privacy.secagg import keys, shamir
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.messages import (
    Kind,
    Phase,
    PublicKeys,
    ShareItem,
    Survivors,
    body,
    decode_revealed,
    verify,
)
from atoll.privacy.secagg.plan import SessionPlan
from atoll.privacy.secagg.site import commitment, pair_masks, self_masks
from atoll.wire.errors import Malformed, NotAllowed, TooFewSites


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorState:
    """What sites have said, by site, as the bytes that they sent, and what was decided from it."""

    advertised: Mapping[int, bytes] = field(default_factory=dict)
    nonces: Mapping[int, bytes] = field(default_factory=dict)
    shared: Mapping[int, Mapping[int, bytes]] = field(default_factory=dict)  # by owner, then receiver
    inputs: Mapping[int, bytes] = field(default_factory=dict)
    survivors: bytes = b""  # asked to be confirmed: from here on U1 and U2 are fixed
    confirmed: Mapping[int, bytes] = field(default_factory=dict)
    unmasked: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def sharing(self) -> frozenset[int]:
        """U1."""
        return frozenset(self.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """What must be added to the sum of masked inputs, and who lied about a share."""

    masks: tuple[tuple[Mask, ...], ...]  # by lane
    liars: Mapping[int, str] = field(default_factory=dict)  # site -> what it did


def take_advertised(plan: SessionPlan, state: AggregatorState, sender: int, data: bytes) -> AggregatorState:
    """Keys of a site. Raises Malformed, or NotAllowed where it had sent others."""
    message = verify(plan, Phase.ADVERTISE_KEYS, data)
    _require_sender(plan, message.sender, sender)
    PublicKeys.decode(message.body)
    return replace(state, advertised=_once(plan, state.advertised, sender, data))


def take_nonce(plan: SessionPlan, state: AggregatorState, sender: int, nonce: bytes) -> AggregatorState:
    """The opened nonce of a site. Raises Malformed where it is not what it had committed to."""
    public = _public(state)
    if sender not in public or hashlib.sha256(nonce).digest() != public[sender].commitment:
        name = plan.roster[sender].site
        raise Malformed(f"the nonce of {name} is not what it committed to", site=name, field="ring")
    return replace(state, nonces={**state.nonces, sender: nonce})


def take_shared(
    plan: SessionPlan, state: AggregatorState, sender: int, messages: tuple[bytes, ...], ring: bytes = b""
) -> AggregatorState:
    """Sealed shares of a site, one for each of its neighbours.

    Raises:
        Malformed: one is missing or twice, or they name different seeds.
        NotAllowed: it had sent others.
    """
    near = plan.neighbours(sender, ring) & state.advertised.keys()
    items: dict[int, bytes] = {}
    seeds = set()
    for data in messages:
        message = verify(plan, Phase.SHARE_KEYS, data)
        _require_sender(plan, message.sender, sender)
        item = ShareItem.decode(message.body)
        items[item.receiver] = data
        seeds.add(item.seed_hash)
    if items.keys() != near or len(messages) != len(near) or len(seeds) != 1:
        name = plan.roster[sender].site
        raise Malformed(f"{name} did not send one share to each neighbour", site=name, field="shares")
    known = state.shared.get(sender)
    if known is not None and dict(known) != items:
        raise _changed(plan, sender)
    return replace(state, shared={**state.shared, sender: items})


def take_input(plan: SessionPlan, state: AggregatorState, sender: int, data: bytes, digest: bytes) -> AggregatorState:
    """A masked input that is whole; `digest` is its SHA-256 as the server has worked it out.

    Raises:
        Malformed: the site declared another one.
        NotAllowed: it declared two, has no part in the session, or is too late.
    """
    message = verify(plan, Phase.MASKED_INPUT, data)
    _require_sender(plan, message.sender, sender)
    name = plan.roster[sender].site
    if message.body != digest:
        raise Malformed(f"the masked input of {name} is not the one that it declared", site=name, field="root")
    if sender not in state.sharing or (state.survivors and sender not in state.inputs):
        raise NotAllowed(f"{name} has no part in the session, or comes too late", site=name)
    return replace(state, inputs=_once(plan, state.inputs, sender, data))


def fix_survivors(plan: SessionPlan, state: AggregatorState) -> AggregatorState:
    """Decides that the sum is of those whose inputs are in.

    Raises:
        TooFewSites: they are too few, or of too few organisations.
    """
    if state.survivors:
        return state
    surviving = frozenset(state.inputs)
    fewest = max(plan.parameters.threshold, plan.fewest_survivors)
    organisations = plan.organisations(surviving)
    if organisations < fewest:
        raise TooFewSites(
            f"inputs of {len(surviving)} sites of {organisations} organisations came, wanted {fewest} organisations",
            round=plan.round,
            field="sites",
            value=organisations,
            bound=fewest,
        )
    roots = {site: body(data) for site, data in state.inputs.items()}
    told = Survivors(sharing=state.sharing, surviving=surviving, roots=roots)
    return replace(state, survivors=told.encode(plan.parameters.num_sites))


def take_confirmation(plan: SessionPlan, state: AggregatorState, sender: int, data: bytes) -> AggregatorState:
    """A survivor's signature under the survivors. Raises Malformed."""
    message = verify(plan, Phase.CONSISTENCY, data)
    _require_sender(plan, message.sender, sender)
    if not state.survivors or message.body != hashlib.sha256(state.survivors).digest():
        name = plan.roster[sender].site
        raise Malformed(f"{name} confirms other survivors", site=name, field="survivors")
    return replace(state, confirmed=_once(plan, state.confirmed, sender, data))


def take_unmasked(plan: SessionPlan, state: AggregatorState, sender: int, data: bytes) -> AggregatorState:
    """Shares that a survivor reveals. Raises Malformed."""
    message = verify(plan, Phase.UNMASK, data)
    _require_sender(plan, message.sender, sender)
    decode_revealed(message.body)
    return replace(state, unmasked=_once(plan, state.unmasked, sender, data))


def unmasking(plan: SessionPlan, state: AggregatorState, ring: bytes = b"") -> Unmasking:
    """The masks that take all others off the sum, from shares of at least `threshold` holders of each secret.

    Raises:
        TooFewSites: of some secret there are too few good shares yet; names its owner and who lied.
    """
    told = Survivors.decode(state.survivors, plan.parameters.num_sites)
    shares = _shares(state)
    public = {site: one.masking for site, one in _public(state).items()}
    liars: dict[int, str] = {}
    found: list[tuple[Mask, ...]] = []
    for owner in sorted(told.sharing):
        survives = owner in told.surviving
        kind = Kind.SEED if survives else Kind.KEY
        secret = _rebuilt(plan, state, owner, kind, shares.get((owner, kind), {}), liars)
        if survives:
            found.append(tuple(mask.opposite for mask in self_masks(plan, owner, secret)))
            continue
        # What the owner itself would have added is the opposite of what its neighbours did.
        near = plan.neighbours(owner, ring) & told.surviving
        found.extend(pair_masks(plan, owner, other, secret, public) for other in sorted(near))
    return Unmasking(masks=tuple(zip(*found, strict=True)), liars=liars)


def _shares(state: AggregatorState) -> dict[tuple[int, Kind], dict[int, bytes]]:
    """Revealed shares by owner and kind, then holder."""
    shares: dict[tuple[int, Kind], dict[int, bytes]] = {}
    for holder, data in state.unmasked.items():
        for one in decode_revealed(body(data)):
            shares.setdefault((one.owner, one.kind), {})[holder] = one.share
    return shares


def _rebuilt(
    plan: SessionPlan,
    state: AggregatorState,
    owner: int,
    kind: Kind,
    shares: Mapping[int, bytes],
    liars: dict[int, str],
) -> bytes:
    """The secret of an owner; whoever sent a share that it did not get goes to `liars`."""

    def tried(some: Mapping[int, bytes]) -> bytes | None:
        try:
            found = shamir.rebuild({holder + 1: share for holder, share in some.items()}, plan.parameters.threshold)
        except ValueError:
            return None
        return found if _is_of(state, owner, kind, found) else None

    good = dict(shares)
    secret = tried(good)
    if secret is None:
        for holder, share in shares.items():
            if not _committed(plan, state, owner, holder, kind, share):
                del good[holder]
                if holder != owner:  # of what it keeps for itself there is no commitment
                    liars[holder] = f"revealed another share of {plan.roster[owner].site} than it was given"
        secret = tried(good)
    if secret is None:
        name, threshold = plan.roster[owner].site, plan.parameters.threshold
        if len(good) >= threshold:
            liars[owner] = "shared other secrets than it had sent hashes and keys of"
        raise TooFewSites(
            f"{len(good)} good shares of {name}, the threshold is {threshold}; nothing is published"
            + "".join(f"; {plan.roster[site].site} {what}" for site, what in sorted(liars.items())),
            round=plan.round,
            field="shares",
            value=len(good),
            bound=threshold,
        )
    return secret


def _is_of(state: AggregatorState, owner: int, kind: Kind, secret: bytes) -> bool:
    """Whether a secret is the one that its owner had sent the hash, or the public key, of."""
    if kind is Kind.SEED:
        return hashlib.sha256(secret).digest() == _seed_hash(state, owner)
    return keys.public_key(secret) == PublicKeys.decode(body(state.advertised[owner])).masking


def _committed(plan: SessionPlan, state: AggregatorState, owner: int, holder: int, kind: Kind, share: bytes) -> bool:
    """Whether a share is the one that its owner gave to its holder."""
    data = state.shared[owner].get(holder)
    if data is None:
        return False
    item = ShareItem.decode(body(data))
    wanted = item.seed_commitment if kind is Kind.SEED else item.key_commitment
    return commitment(plan, owner, holder, kind, share) == wanted


def _seed_hash(state: AggregatorState, owner: int) -> bytes:
    data = next(iter(state.shared[owner].values()))
    return ShareItem.decode(body(data)).seed_hash


def _public(state: AggregatorState) -> dict[int, PublicKeys]:
    return {site: PublicKeys.decode(body(data)) for site, data in state.advertised.items()}


def _once(plan: SessionPlan, known: Mapping[int, bytes], sender: int, data: bytes) -> Mapping[int, bytes]:
    if known.get(sender, data) != data:
        raise _changed(plan, sender)
    return {**known, sender: data}


def _changed(plan: SessionPlan, sender: int) -> NotAllowed:
    name = plan.roster[sender].site
    return NotAllowed(f"{name} has said something else in this phase before", site=name)


def _require_sender(plan: SessionPlan, found: int, sender: int) -> None:
    if found != sender:
        name = plan.roster[sender].site
        raise Malformed(f"{name} sent a message of {plan.roster[found].site}", site=name, field="sender")
