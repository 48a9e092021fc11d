"""Sites that meet directly: their cards, the channel to one that listens, and what such a port demands.

Invariants. A card counts only when the key that the signed member list has for its site signed exactly its bytes. A
channel trusts the one certificate that the card names, under the site's own name, and nothing else; a port takes no
connection without a certificate of the federation, and the key of that is on the caller's card. So neither the server
nor whoever holds the online CA's key can stand between two sites or in the place of one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from google.protobuf.message import DecodeError

from atoll.transport.credentials import Options, server_options, tls_options
from atoll.transport.identity import Identity, private_pem, utc_now
from atoll.transport.member_certificate import read_certificate
from atoll.wire.errors import Malformed, Stranger, TooLarge, Unavailable, from_rpc
from atoll.wire.frames import FRAME_HEADER, MAX_FRAME_BYTES
from atoll.wire.gossip_pb2 import Card, MeetReply, MeetRequest, PeerCard

MEET_METHOD = "/atoll.wire.Peer/Meet"
MAX_CARD_BYTES = 4 << 10
MAX_CERTIFICATE_BYTES = 2 << 10
MAX_ADDRESS_CHARACTERS = 261  # a DNS name of 255, a colon, a port

_CONTEXT = b"atoll/peer-card/1\0"
# The key is in memory only and made anew at each start: its certificate need not end before the process does.
_VALID = timedelta(days=3650)
_BACKDATE = timedelta(days=1)  # a neighbour's clock may be behind


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerKeys:
    """What a site shows to those who call it."""

    certificate_der: bytes
    certificate_pem: bytes
    private_key_pem: bytes = field(repr=False)


def name_of_peer(site: str) -> str:
    """The name that a site has in the certificate of its port."""
    return f"{site}.peer.atoll"


def make_listener_keys(site: str) -> ListenerKeys:
    """A fresh key, and a certificate that it signs itself; the card says that it is the site's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Atoll peer")])
    now = utc_now()
    certificate = (
        x509.CertificateBuilder(
            issuer_name=name,
            subject_name=name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _BACKDATE,
            not_valid_after=now + _VALID,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name_of_peer(site))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return ListenerKeys(
        certificate_der=certificate.public_bytes(Encoding.DER),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        private_key_pem=private_pem(key),
    )


def sign_card(identity: Identity, *, zone: str, address: str = "", certificate_der: bytes = b"") -> PeerCard:
    """The card of a site, for as long as it listens and has this client certificate.

    Args:
        zone: its label; "" where it has none.
        address: "host:port" under which others reach it; "" where it does not listen.
    """
    assert identity.signing_key is not None  # every site has one
    card = Card(
        federation=identity.federation,
        site=identity.name,
        zone=zone,
        address=address,
        certificate=certificate_der,
        client_key=read_certificate(identity.certificate_pem).key_sha256,
    )
    data = card.SerializeToString(deterministic=True)
    return PeerCard(card=data, signature=identity.signing_key.sign(_CONTEXT + data))


def read_card(signed: PeerCard, *, site: str, federation: str, signing_key: bytes | None) -> Card:
    """The card of `site`.

    Args:
        signing_key: of the site, from the signed member list; None where it is no active member.

    Raises:
        Stranger: it is no member, or another key signed the card.
        Malformed: the card is another site's, or breaks its rules.
        TooLarge: it is too long.
    """
    if len(signed.card) > MAX_CARD_BYTES:
        raise TooLarge("a peer's card is too long", site=site, value=len(signed.card), bound=MAX_CARD_BYTES)
    if signing_key is None:
        raise Stranger(f"{site} is no active member on the signed list: it is met by nobody", site=site)
    try:
        Ed25519PublicKey.from_public_bytes(signing_key).verify(signed.signature, _CONTEXT + signed.card)
    except (ValueError, InvalidSignature):
        raise Stranger(
            f"the card of {site} is not signed by its key on the member list: it was changed on its way, or the server "
            "is not to be trusted",
            site=site,
            field="signature",
        ) from None
    try:
        card = Card.FromString(signed.card)
    except DecodeError:
        raise Malformed(f"the card of {site} cannot be read", site=site, field="card") from None
    if (card.site, card.federation) != (site, federation):
        raise Malformed(f"a card of {card.site[:63]} was shown as that of {site}", site=site, field="card")
    if (
        len(card.address) > MAX_ADDRESS_CHARACTERS
        or len(card.certificate) > MAX_CERTIFICATE_BYTES
        or len(card.client_key) != hashlib.sha256().digest_size
        or bool(card.address) != bool(card.certificate)
    ):
        raise Malformed(f"the card of {site} breaks its bounds", site=site, field="card")
    return card


def open_peer_channel(identity: Identity, card: Card) -> grpc.aio.Channel:
    """A mutual-TLS channel to the site that a card which `read_card` gave is of. Connects on first use.

    Raises:
        Malformed: the card's certificate is none.
    """
    try:
        pem = x509.load_der_x509_certificate(card.certificate).public_bytes(Encoding.PEM)
    except ValueError:
        raise Malformed(f"the card of {card.site} has no certificate", site=card.site, field="certificate") from None
    credentials = grpc.ssl_channel_credentials(
        root_certificates=pem,
        private_key=identity.private_key_pem,
        certificate_chain=identity.certificate_pem,
    )
    own = dict(_limited(tls_options(card.address, {})))
    own |= {"grpc.ssl_target_name_override": name_of_peer(card.site), "grpc.enable_http_proxy": 0}
    # A channel that another one's connection would serve could be one to a port that has another certificate by now.
    own["grpc.use_local_subchannel_pool"] = 1
    return grpc.aio.secure_channel(card.address, credentials, options=tuple(own.items()))


def peer_port_credentials(identity: Identity, keys: ListenerKeys) -> grpc.ServerCredentials:
    """What the port of a site shows, and that it demands a certificate of the federation."""
    pair = (keys.private_key_pem, keys.certificate_pem)
    return grpc.ssl_server_credentials([pair], root_certificates=identity.ca_pem, require_client_auth=True)


def peer_port_options() -> Options:
    """Options of the port: a caller may hold a few streams, each with a frame on its way."""
    return (*_limited(server_options()), ("grpc.max_concurrent_streams", 8))


def _limited(options: Options) -> Options:
    most = MAX_FRAME_BYTES + FRAME_HEADER.size
    sizes = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    return (*(option for option in options if option[0] not in sizes), *((size, most) for size in sizes))


async def meet(channel: grpc.aio.Channel, meeting: str, timeout_s: float) -> MeetReply:
    """What the neighbour has of this site's model; also the proof that the two can reach each other.

    Raises:
        RemoteError: it refuses, or cannot be reached.
    """
    method: Any = channel.unary_unary(
        MEET_METHOD, request_serializer=MeetRequest.SerializeToString, response_deserializer=MeetReply.FromString
    )
    try:
        reply: MeetReply = await method(MeetRequest(meeting=meeting), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Unavailable(f"no answer within {timeout_s:g} s") from None
        raise from_rpc(error) from None
    return reply


def meet_handler(answer: Any) -> grpc.GenericRpcHandler:
    """The method as a handler of a `grpc.aio` server.

    Args:
        answer: awaitable; takes the request and the context, gives the reply.
    """
    service, _, name = MEET_METHOD.removeprefix("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=MeetRequest.FromString, response_serializer=MeetReply.SerializeToString
    )
    return grpc.method_handlers_generic_handler(service, {name: handler})
