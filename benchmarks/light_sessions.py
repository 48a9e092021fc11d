"""Sessions of many sites in one process: the site's side of the protocol before the server's session and its sum."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.round_sum import RoundSum
from atoll.privacy.secagg.agreement import Opening, Own, Terms, agree, counters
from atoll.privacy.secagg.fixed_point import Quantiser
from atoll.privacy.secagg.keys import Mask
from atoll.privacy.secagg.masks import add_masks
from atoll.server.masked_sum import MaskedSum
from atoll.server.secure_session import At
from atoll.simulations.sessions import PlayedSession, SessionSites, member_list
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.members_pb2 import MemberList

RUN = "01JD0000000000000000000000"


class Inputs:
    """What sites put in: the same values at each, rounded by its own lot, and their sum as a naive one of integers."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.values = np.random.default_rng(1).normal(0, 0.01, terms.num_values).astype(np.float32)
        self.levels: NDArray[np.int64] = np.zeros(terms.num_values, dtype=np.int64)

    def write(self, index: int, masks: Sequence[Sequence[Mask]]) -> bytes:
        """The masked input of a site."""
        terms = self._terms
        exact = np.array(counters(terms, terms.max_weight, {}), dtype="<u8")
        levels = np.empty(terms.num_values, dtype=f"<u{terms.bits // 8}")
        key = hashlib.sha256(b"rounding %d" % index).digest()
        Quantiser(key, scale=terms.scale, bits=terms.bits).write(self.values, 0, levels)
        self.levels += levels.view(f"<i{terms.bits // 8}")
        for lane, streams in zip((exact, levels), masks, strict=True):
            add_masks(lane, 0, streams)
        return exact.tobytes() + levels.tobytes()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One session, and the fold of as many plain updates."""
    manifest = Manifest.build([("w", "float32", (options.parameters,), "parameter")])
    layout = update_layout(manifest, Native(Native.Options()), "mean")
    keys = {f"site-{number:05d}": Ed25519PrivateKey.generate() for number in range(options.sites)}
    terms = _terms(options, manifest, layout, member_list(keys))
    inputs, total = Inputs(terms), MaskedSum(layout, terms)
    drops = dict.fromkeys(range(options.drops), At.INPUTS)
    session = PlayedSession(terms, SessionSites(terms, list(keys.values()), inputs.write), total, drops)
    began_s = time.perf_counter()
    session.fix()
    counted, _, _ = session.finish()
    seconds = time.perf_counter() - began_s
    found = torch.empty(terms.num_values, dtype=torch.float64)
    total.difference(0, found)
    factor = terms.quantum * (terms.max_weight / counted.weight)
    senders = options.sites - options.drops
    plain_s = _plain(layout, inputs.values, senders)
    return {
        "sites": options.sites,
        "parameters": options.parameters,
        "drops": options.drops,
        "light": True,
        "threat": options.threat,
        "threshold": terms.plan.parameters.threshold,
        "degree": terms.plan.parameters.degree,
        "seconds_per_round": round(seconds, 3),
        "plain_seconds_per_round": round(plain_s, 3),
        "ratio_to_plain": round(seconds / plain_s, 3),
        "server_seconds": round(session.server_s, 3),
        "sum_exact": bool((found.numpy() == inputs.levels * factor).all())
        and counted.weight == senders * terms.max_weight,
        "bytes_per_parameter": round(session.bytes_up / senders / options.parameters, 4),
        "message_bytes_per_site": session.message_bytes // options.sites,
    }


def _terms(options: argparse.Namespace, manifest: Manifest, layout: UpdateLayout, members: MemberList) -> Terms:
    section = {"threat": options.threat, "corrupt": options.corrupt, "dropped": options.dropped, "metrics": []}
    section = {key: value for key, value in section.items() if value is not None}
    job = parse_job({"job": {"name": "light", "app": "light", "rounds": 1}, "privacy": {"secure_aggregation": section}})
    opening = Opening(
        run=RUN,
        round=1,
        session=1,
        sites=tuple(member.site for member in members.members),
        member_list_version=1,
        max_weight=100,
        base_version=0,
        digests={0: "00" * 32},
    )
    own = Own(
        job=job,
        app_hash="00" * 32,
        schema_hash=manifest.schema_hash,
        num_values=layout.num_values,
        members=members,
    )
    return agree(opening, own)


def _plain(layout: UpdateLayout, values: NDArray[np.float32], num_sites: int) -> float:
    """Seconds to check and fold as many updates, without masks."""
    payload = layout.header + values.tobytes()
    total = RoundSum(layout, num_sites=num_sites, max_weight=100, bound=1024.0)
    began_s = time.perf_counter()
    for number in range(num_sites):
        total.check(payload, 100)
        total.fold(f"site-{number:05d}", payload, 100)
    return time.perf_counter() - began_s
