"""The first message each way: which protocol two ends speak, and which optional abilities both have.

Rules of evolution: a protocol version never changes its meaning; fields and features that an end does not know are
ignored, so whatever an older peer may not understand is a feature, and whatever it must not ignore is a new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll import __version__
from atoll.wire.control_pb2 import Capacity, Hello, TaskKey, Welcome
from atoll.wire.errors import Incompatible, Malformed, TooLarge
from atoll.wire.gossip_pb2 import PeerCard
from atoll.wire.names import check_site_name

PROTOCOL_MIN, PROTOCOL_MAX = 1, 1
# A site that is a region says this, a server that can add a region's partial sums does (docs/trees.md).
REGION = "region/1"
# Both say this: granted bytes may go over the port that the Welcome names (transport/bulk.py).
BULK = "bulk/1"
# A site that takes part in sessions of secure aggregation says this (docs/secure-aggregation.md).
SECAGG = "secagg/1"
SOFTWARE = f"atoll {__version__}"

MAX_FEATURES = 256
MAX_FEATURE_CHARACTERS = 64
MAX_LABELS = 32
MAX_LABEL_CHARACTERS = 63
MAX_SOFTWARE_CHARACTERS = 128  # "atoll 0.1.0" with room for what a packager adds
MAX_RUNS_AT_ONCE = 64  # as site.toml takes it
RUN_ID_CHARACTERS, TASK_ID_CHARACTERS = 26, 96  # as wire/names.py has them
MAX_LISTED = 100_000  # runs, tasks or updates in one Hello: far above any site, far below the 4 MB of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one end speaks."""

    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    features: frozenset[str] = frozenset()


OURS = Abilities(features=frozenset({REGION, BULK, SECAGG}))  # of a server
OF_A_SITE = Abilities(features=frozenset({BULK, SECAGG}))
IN_PLAIN_TEXT = Abilities(features=frozenset({BULK}))  # of a site without a signing key; all else needs no feature


def abilities_of_site(*, is_region: bool, is_signing: bool) -> Abilities:
    """What a site says that it can do. A region masks nothing; without a signing key nobody would believe a site."""
    if is_region:
        return Abilities(features=frozenset({REGION, BULK}))
    return OF_A_SITE if is_signing else IN_PLAIN_TEXT


def make_hello(
    capacity: Capacity,
    *,
    held_updates: Iterable[TaskKey] = (),
    open_tasks: Iterable[TaskKey] = (),
    joined_runs: Iterable[str] = (),
    member_list_version: int = 0,
    card: PeerCard | None = None,
    ours: Abilities = IN_PLAIN_TEXT,
) -> Hello:
    """What a site says first: what it speaks, has room for, and has under way."""
    return Hello(
        protocol_min=ours.protocol_min,
        protocol_max=ours.protocol_max,
        features=sorted(ours.features),
        software=SOFTWARE,
        capacity=capacity,
        held_updates=held_updates,
        open_tasks=open_tasks,
        joined_runs=joined_runs,
        member_list_version=member_list_version,
        card=card,
    )


def choose(hello: Hello, ours: Abilities = OURS) -> tuple[int, tuple[str, ...]]:
    """The highest protocol version that both ends speak, and the features that both have, sorted.

    Raises:
        Incompatible: there is no such version; says which end to upgrade.
        Malformed: the range is upside down, or the capacity is out of bounds.
        TooLarge: more features, labels, runs or tasks than any site has, or longer names.
    """
    _check_hello(hello)
    protocol = min(hello.protocol_max, ours.protocol_max)
    if protocol < max(hello.protocol_min, ours.protocol_min):
        behind = "the site" if hello.protocol_max < ours.protocol_min else "the server"
        raise Incompatible(
            f"the site ({hello.software[:40]!r}) speaks protocol {hello.protocol_min} to {hello.protocol_max}, the "
            f"server ({SOFTWARE!r}) {ours.protocol_min} to {ours.protocol_max}; upgrade {behind}",
            field="protocol",
            value=f"{hello.protocol_min} to {hello.protocol_max}",
            bound=f"{ours.protocol_min} to {ours.protocol_max}",
        )
    return protocol, tuple(sorted(ours.features.intersection(hello.features)))


def make_welcome(
    chosen: tuple[int, tuple[str, ...]],
    *,
    federation: str,
    heartbeat_s: int,
    lease_s: int,
    max_frame_bytes: int,
    bulk_port: int = 0,
) -> Welcome:
    """What the server answers; `chosen` comes from `choose`.

    Args:
        bulk_port: where it listens for bulk lines; 0: nowhere.
    """
    protocol, features = chosen
    return Welcome(
        protocol=protocol,
        features=features,
        federation=federation,
        server_software=SOFTWARE,
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        max_frame_bytes=max_frame_bytes,
        bulk_port=bulk_port if BULK in features else 0,
    )


def check_welcome(welcome: Welcome, ours: Abilities = OURS) -> tuple[int, tuple[str, ...]]:
    """The protocol version and the features of this stream, as the server chose them.

    Raises:
        Incompatible: the server chose a version that this site does not speak.
        Malformed: no time between heartbeats, a lease that is not longer than it, or a federation without a name.
        TooLarge: more features than any server has, or longer texts.
    """
    check_site_name(welcome.federation, "federation")
    _check_texts(welcome.features, welcome.server_software)
    if not ours.protocol_min <= welcome.protocol <= ours.protocol_max:
        raise Incompatible(
            f"the server ({welcome.server_software[:40]!r}) chose protocol {welcome.protocol}, this site speaks "
            f"{ours.protocol_min} to {ours.protocol_max}; upgrade one of the two",
            field="protocol",
            value=welcome.protocol,
            bound=f"{ours.protocol_min} to {ours.protocol_max}",
        )
    if not 0 < welcome.heartbeat_s < welcome.lease_s:
        raise Malformed(
            f"the server wants a heartbeat every {welcome.heartbeat_s} s with a lease of {welcome.lease_s} s; the lease "
            "must be longer than the heartbeat; correct the server's limits",
            field="heartbeat_s",
            value=welcome.heartbeat_s,
            bound=f"1 to {welcome.lease_s} s",
        )
    return welcome.protocol, tuple(sorted(ours.features.intersection(welcome.features)))


def require_regions_taken(welcome: Welcome) -> None:
    """Returns where the server that said `welcome` takes a region as a site.

    Raises:
        Incompatible: it is of a version that knows no trees.
    """
    if REGION not in welcome.features:
        raise Incompatible(
            f"the upper server ({welcome.server_software[:40]!r}) takes no regions, only sites: upgrade it, or let the "
            "sites of this region join it themselves",
            field="features",
            value=", ".join(welcome.features)[:200],
            bound=REGION,
        )


def _check_hello(hello: Hello) -> None:
    if not 1 <= hello.protocol_min <= hello.protocol_max:
        raise Malformed(
            f"protocol range {hello.protocol_min} to {hello.protocol_max} is none; versions count from 1",
            field="protocol_min",
            value=hello.protocol_min,
            bound=f"1 to {hello.protocol_max}",
        )
    runs_at_once = hello.capacity.runs_at_once
    if not 1 <= runs_at_once <= MAX_RUNS_AT_ONCE:
        raise Malformed(
            f"a site works on 1 to {MAX_RUNS_AT_ONCE} runs at once, not {runs_at_once}: correct its site.toml",
            field="capacity.runs_at_once",
            value=runs_at_once,
            bound=f"1 to {MAX_RUNS_AT_ONCE}",
        )
    _check_texts(hello.features, hello.software)
    _check_count("capacity.labels", len(hello.capacity.labels), MAX_LABELS)
    _check_count("held_updates", len(hello.held_updates), MAX_LISTED)
    _check_count("open_tasks", len(hello.open_tasks), MAX_LISTED)
    _check_count("joined_runs", len(hello.joined_runs), MAX_LISTED)
    for run in hello.joined_runs:
        _check_count("joined_runs", len(run), RUN_ID_CHARACTERS)
    for field, keys in (("held_updates", hello.held_updates), ("open_tasks", hello.open_tasks)):
        for key in keys:
            _check_count(field, len(key.run), RUN_ID_CHARACTERS)
            _check_count(field, len(key.task), TASK_ID_CHARACTERS)
    for pair in hello.capacity.labels.items():
        _check_count("capacity.labels", max(map(len, pair)), MAX_LABEL_CHARACTERS)


def _check_texts(features: Sequence[str], software: str) -> None:
    _check_count("features", len(features), MAX_FEATURES)
    for feature in features:
        _check_count("features", len(feature), MAX_FEATURE_CHARACTERS)
    _check_count("software", len(software), MAX_SOFTWARE_CHARACTERS)


def _check_count(field: str, found: int, bound: int) -> None:
    if found > bound:
        raise TooLarge(
            f"the peer's first message: {field}: {found} is over the limit of {bound}",
            field=field,
            value=found,
            bound=bound,
        )
