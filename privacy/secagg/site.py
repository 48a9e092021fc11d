"""A site's side of a session: what it says, what it checks, and what it never reveals.

A state table without I/O: `step` functions take the state and what the server handed on, and give the next state and
the bytes to send. The state is plain values, so it can be stored (encrypted) before anything is sent; asked again, a
site answers with the bytes that it answered with, or not at all. It decides by itself which share of whom it hands out,
and hands out one kind of one site once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.privacy.secagg import keys, shamir
from atoll.privacy.secagg.graph import ring_seed
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.messages import (
    PAIR_BYTES,
    Kind,
    Phase,
    PublicKeys,
    Revealed,
    ShareItem,
    Signed,
    Survivors,
    encode_revealed,
    sign,
    verify,
)
from atoll.privacy.secagg.plan import SessionPlan
from atoll.wire.errors import Malformed, NotAllowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """What a site draws for one session and forgets with it."""

    sealing_key: bytes = field(repr=False)  # X25519 private
    masking_key: bytes = field(repr=False)  # X25519 private; dropped sites' ones are rebuilt from shares
    seed: bytes = field(repr=False)  # b_i
    ring_nonce: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> Secrets:
        return cls(
            sealing_key=secrets.token_bytes(32),
            masking_key=secrets.token_bytes(32),
            seed=secrets.token_bytes(32),
            ring_nonce=secrets.token_bytes(32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteState:
    """Where a site stands. What it has said is kept as bytes."""

    site: int
    secrets: Secrets
    advertised: bytes = b""
    ring: bytes = b""
    public: Mapping[int, PublicKeys] = field(default_factory=dict)  # of all that sent keys (U0)
    shared: tuple[bytes, ...] = ()
    held: Mapping[int, bytes] = field(
        default_factory=dict, repr=False
    )  # pair of shares, by owner; of U1 and neighbours
    sharing: frozenset[int] = frozenset()  # U1
    input: bytes = b""
    input_root: bytes = b""
    survivors: bytes = b""  # confirmed
    consistency: bytes = b""
    unmasked: bytes = b""


def advertise(plan: SessionPlan, site: int, drawn: Secrets, signing: Ed25519PrivateKey) -> SiteState:
    """The beginning: public keys, and a commitment to this site's part in the order of the ring."""
    body = PublicKeys(
        sealing=keys.public_key(drawn.sealing_key),
        masking=keys.public_key(drawn.masking_key),
        commitment=hashlib.sha256(drawn.ring_nonce).digest(),
    ).encode()
    return SiteState(site=site, secrets=drawn, advertised=sign(plan, Phase.ADVERTISE_KEYS, site, body, signing).data)


def open_ring(state: SiteState) -> bytes:
    """The nonce that this site committed to; sent once everybody's keys are there (Harary graphs only)."""
    if not state.public:
        raise NotAllowed("the ring is opened once the keys of all sites are known")
    return state.secrets.ring_nonce


def take_keys(plan: SessionPlan, state: SiteState, messages: Sequence[bytes]) -> SiteState:
    """Takes the keys of all sites that take part, this one's own among them.

    Raises:
        Malformed: one is not signed by its member of the roster, two keys are equal, or this site's own was changed.
        NotAllowed: too few sites take part.
    """
    if state.public:
        raise NotAllowed("keys were taken already; a session has one list of them")
    taken = [verify(plan, Phase.ADVERTISE_KEYS, message) for message in messages]
    public = {message.sender: PublicKeys.decode(message.body) for message in taken}
    own = [message.data for message in taken if message.sender == state.site]
    if own != [state.advertised] or len(public) != len(taken):
        raise Malformed("the list of keys has a site twice, or not this site's own keys", field="keys")
    every = [key for one in public.values() for key in (one.sealing, one.masking)]
    if len(set(every)) != len(every):
        raise Malformed("two keys in the list are the same", field="keys")
    _require_enough(plan, frozenset(public), "sent keys")
    return replace(state, public=public)


def take_ring(plan: SessionPlan, state: SiteState, nonces: Mapping[int, bytes]) -> SiteState:
    """Takes the opened nonces of all sites whose keys were taken; the ring follows from them.

    Raises:
        Malformed: one is missing, or is not what its site had committed to.
    """
    if nonces.keys() != state.public.keys():
        raise Malformed("the nonces of the ring are not of the sites that sent keys", field="ring")
    for site, nonce in nonces.items():
        if hashlib.sha256(nonce).digest() != state.public[site].commitment:
            name = plan.roster[site].site
            raise Malformed(f"the nonce of {name} is not what it committed to", site=name, field="ring")
    return replace(state, ring=ring_seed(plan.session, dict(nonces)))


def share(plan: SessionPlan, state: SiteState, signing: Ed25519PrivateKey) -> SiteState:
    """Splits this site's seed and masking key among its neighbours and itself, each part sealed for its holder."""
    if state.shared:
        return state
    drawn, near = state.secrets, _neighbours(plan, state)
    holders = sorted(near | {state.site}) if plan.parameters.complete else sorted(near)
    numbers = [site + 1 for site in holders]
    seeds = shamir.split(drawn.seed, plan.parameters.threshold, numbers)
    masking = shamir.split(drawn.masking_key, plan.parameters.threshold, numbers)
    seed_hash = hashlib.sha256(drawn.seed).digest()
    shared, held = [], dict(state.held)
    for site in holders:
        pair = (site + 1).to_bytes(3, "big") + seeds[site + 1] + masking[site + 1]
        if site == state.site:
            held[site] = pair
            continue
        nonce = secrets.token_bytes(keys.NONCE_BYTES)
        item = ShareItem(
            receiver=site,
            seed_hash=seed_hash,
            nonce=nonce,
            sealed=keys.seal(
                _sealing_key(plan, state, state.site, site), nonce, pair, _context(plan, state.site, site)
            ),
            seed_commitment=commitment(plan, state.site, site, Kind.SEED, seeds[site + 1]),
            key_commitment=commitment(plan, state.site, site, Kind.KEY, masking[site + 1]),
        )
        shared.append(sign(plan, Phase.SHARE_KEYS, state.site, item.encode(), signing).data)
    return replace(state, shared=tuple(shared), held=held)


def take_shares(plan: SessionPlan, state: SiteState, sharing: frozenset[int], messages: Sequence[bytes]) -> SiteState:
    """Takes the shares that neighbours made for this site. From here on it is fixed whom it masks with.

    Args:
        sharing: U1, the sites whose shares are out.

    Raises:
        Malformed: a share is missing, is not for this site, does not open, or is not what its owner committed to;
            names the owner.
        NotAllowed: too few sites share.
    """
    if state.sharing:
        raise NotAllowed("shares were taken already; a session has one set of them")
    if state.site not in sharing or not sharing <= state.public.keys():
        raise Malformed("sites share that sent no keys, or this one is left out", field="sharing")
    _require_enough(plan, sharing, "shared their secrets")
    near = _neighbours(plan, state) & sharing
    taken = [verify(plan, Phase.SHARE_KEYS, message) for message in messages]
    if {message.sender for message in taken} != near or len(taken) != len(near):
        raise Malformed("the shares are not those of the neighbours that share", field="shares")
    own = {state.site} & state.held.keys()
    if len(near) + len(own) < plan.parameters.threshold:
        raise NotAllowed(f"{len(near)} neighbours share, the threshold is {plan.parameters.threshold}")
    held = dict(state.held)
    for message in taken:
        held[message.sender] = _opened(plan, state, message)
    return replace(state, sharing=sharing, held=held)


def _opened(plan: SessionPlan, state: SiteState, message: Signed) -> bytes:
    owner, item = message.sender, ShareItem.decode(message.body)
    key = _sealing_key(plan, state, owner, state.site)
    pair = keys.open_sealed(key, item.nonce, item.sealed, _context(plan, owner, state.site))
    name = plan.roster[owner].site
    if item.receiver != state.site or pair is None or len(pair) != PAIR_BYTES:
        raise Malformed(f"the share of {name} does not open: it is not for this site and session", site=name)
    number, seed, masking = _parts(pair)
    if (
        number != state.site + 1
        or commitment(plan, owner, state.site, Kind.SEED, seed) != item.seed_commitment
        or commitment(plan, owner, state.site, Kind.KEY, masking) != item.key_commitment
    ):
        raise Malformed(f"the share of {name} is not what it committed to", site=name)
    return pair


def masks(plan: SessionPlan, state: SiteState) -> tuple[tuple[Mask, ...], ...]:
    """The masks of each lane of this site's input: its own, and one for each neighbour that shares.

    Raises:
        NotAllowed: it is not known yet who shares.
    """
    if not state.sharing:
        raise NotAllowed("whom to mask with is not known before shares were taken")
    found = [self_masks(plan, state.site, state.secrets.seed)]
    public = {site: one.masking for site, one in state.public.items()}
    for other in sorted(_neighbours(plan, state) & state.sharing):
        found.append(pair_masks(plan, state.site, other, state.secrets.masking_key, public))
    return tuple(zip(*found, strict=True))


def self_masks(plan: SessionPlan, site: int, seed: bytes) -> tuple[Mask, ...]:
    """The mask of each lane that a site adds by itself."""
    return tuple(Mask(key=keys.self_mask_key(plan.session, seed, site, lane)) for lane in range(len(plan.lanes)))


def pair_masks(
    plan: SessionPlan, site: int, other: int, private: bytes, public: Mapping[int, bytes]
) -> tuple[Mask, ...]:
    """The mask of each lane that `site`, whose masking key is `private`, shares with `other`: the smaller one adds it."""
    low, high = min(site, other), max(site, other)
    secret = _agreed(plan, private, public[other], other)
    pair, both = (low, high), (public[low], public[high])
    return tuple(
        Mask(key=keys.pair_mask_key(plan.session, secret, pair, both, lane), negative=site > other)
        for lane in range(len(plan.lanes))
    )


def send_input(plan: SessionPlan, state: SiteState, root: bytes, signing: Ed25519PrivateKey) -> SiteState:
    """Declares the masked input, by its SHA-256, which is on the disk.

    Raises:
        NotAllowed: another input was declared in this session, or it is not known yet who shares. Two inputs under
            the same masks would give their difference away.
    """
    if not state.sharing:
        raise NotAllowed("whom to mask with is not known before shares were taken")
    if state.input:
        if root != state.input_root:
            raise NotAllowed("another input was declared in this session; a changed one needs a new attempt")
        return state
    return replace(state, input=sign(plan, Phase.MASKED_INPUT, state.site, root, signing).data, input_root=root)


def confirm(plan: SessionPlan, state: SiteState, data: bytes, signing: Ed25519PrivateKey) -> SiteState:
    """Signs whose inputs are in, which the server tells everybody the same.

    Raises:
        NotAllowed: other survivors were confirmed before; too few are left, or of too few organisations.
        Malformed: they are not among those that share, this site is not among them, or its input is another.
    """
    if state.survivors:
        if data != state.survivors:
            raise NotAllowed("other survivors were confirmed in this session; nobody's two kinds of share come out")
        return state
    told = Survivors.decode(data, plan.parameters.num_sites)
    if told.sharing != state.sharing or not told.surviving <= told.sharing or state.site not in told.surviving:
        raise Malformed("survivors are not among those that share, or this site is not one", field="survivors")
    if not state.input or told.roots[state.site] != state.input_root:
        raise Malformed("the server has another input of this site", field="roots")
    _require_enough(plan, told.surviving, "survive")
    signed = sign(plan, Phase.CONSISTENCY, state.site, hashlib.sha256(data).digest(), signing)
    return replace(state, survivors=data, consistency=signed.data)


def unmask(
    plan: SessionPlan, state: SiteState, confirmations: Sequence[bytes], signing: Ed25519PrivateKey
) -> SiteState:
    """Reveals one share for each neighbour that shares: of its seed where it survives, of its masking key where not.

    Args:
        confirmations: CONSISTENCY messages of at least `threshold` survivors (that are neighbours, or this site);
            not looked at where the threat is semi-honest.

    Raises:
        NotAllowed: no survivors were confirmed, or too few confirm the same.
        Malformed: a confirmation is not signed, or of other survivors.
    """
    if state.unmasked:
        return state
    if not state.survivors:
        raise NotAllowed("no shares are revealed before the survivors are confirmed")
    told = Survivors.decode(state.survivors, plan.parameters.num_sites)
    near = state.held.keys()
    if plan.parameters.threat == "active":
        _require_confirmed(plan, state, told, confirmations)
    revealed = []
    for owner in sorted(near & state.sharing):
        _, seed, masking = _parts(state.held[owner])
        if owner in told.surviving:
            revealed.append(Revealed(kind=Kind.SEED, owner=owner, share=seed))
        else:
            revealed.append(Revealed(kind=Kind.KEY, owner=owner, share=masking))
    return replace(state, unmasked=sign(plan, Phase.UNMASK, state.site, encode_revealed(revealed), signing).data)


def _require_confirmed(plan: SessionPlan, state: SiteState, told: Survivors, confirmations: Sequence[bytes]) -> None:
    wanted = hashlib.sha256(state.survivors).digest()
    counted = set()
    for data in confirmations:
        message = verify(plan, Phase.CONSISTENCY, data)
        if message.body != wanted:
            name = plan.roster[message.sender].site
            raise Malformed(f"{name} was told of other survivors: the server does not tell all the same", site=name)
        if message.sender in told.surviving and (plan.parameters.complete or message.sender in state.held):
            counted.add(message.sender)
    if len(counted) < plan.parameters.threshold:
        raise NotAllowed(f"{len(counted)} survivors confirm the same, the threshold is {plan.parameters.threshold}")


def _require_enough(plan: SessionPlan, sites: frozenset[int], what: str) -> None:
    """Returns where a sum over these sites may come out."""
    fewest = max(plan.parameters.threshold, plan.fewest_survivors)
    organisations = plan.organisations(sites)
    if organisations < fewest:
        raise NotAllowed(
            f"{len(sites)} sites of {organisations} organisations {what}, wanted {fewest} organisations",
            field="sites",
            value=organisations,
            bound=fewest,
        )


def commitment(plan: SessionPlan, owner: int, holder: int, kind: Kind, share: bytes) -> bytes:
    """What an owner commits a holder's share by: a hash, which hides it since shares are uniform over the field."""
    fields = bytes([kind]) + owner.to_bytes(2, "big") + holder.to_bytes(2, "big")
    return hashlib.sha256(b"fl/sa1/share" + plan.session + fields + share).digest()


def _neighbours(plan: SessionPlan, state: SiteState) -> frozenset[int]:
    return plan.neighbours(state.site, state.ring) & state.public.keys()


def _sealing_key(plan: SessionPlan, state: SiteState, sender: int, receiver: int) -> bytes:
    other = receiver if sender == state.site else sender
    secret = _agreed(plan, state.secrets.sealing_key, state.public[other].sealing, other)
    public = (state.public[sender].sealing, state.public[receiver].sealing)
    return keys.sealing_key(plan.session, secret, sender, receiver, public)


def _agreed(plan: SessionPlan, private: bytes, public: bytes, other: int) -> bytes:
    try:
        return keys.agree(private, public)
    except ValueError:
        name = plan.roster[other].site
        raise Malformed(f"a public key of {name} is none that X25519 takes", site=name, field="keys") from None


def _context(plan: SessionPlan, sender: int, receiver: int) -> bytes:
    return plan.session + sender.to_bytes(2, "big") + receiver.to_bytes(2, "big")


def _parts(pair: bytes) -> tuple[int, bytes, bytes]:
    """Number of the holder, share of the seed, share of the masking key."""
    middle = 3 + shamir.SHARE_BYTES
    return int.from_bytes(pair[:3], "big"), pair[3:middle], pair[middle:]
