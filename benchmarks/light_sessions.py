"""Sessions of many sites in one process: the site's side of the protocol before the server's session and its sum."""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from atoll.aggregation.codecs.casts import Native
from atoll.aggregation.layout import UpdateLayout, update_layout
from atoll.aggregation.round_sum import RoundSum
from atoll.privacy.secagg import site
from atoll.privacy.secagg.agreement import Opening, Own, Terms, agree, counters
from atoll.privacy.secagg.fixed_point import Quantiser
from atoll.privacy.secagg.masks import add_masks
from atoll.privacy.secagg.messages import read_bitmap
from atoll.privacy.secagg.site import Secrets, SiteState
from atoll.server.masked_sum import MaskedSum
from atoll.server.secure_session import At, SecureSession
from atoll.wire import control_pb2 as pb
from atoll.wire import secure_pb2
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.members_pb2 import ACTIVE, Member, MemberList

RUN = "01JD0000000000000000000000"


class Sites:
    """All sites of a session. Those of `dropping` send no input."""

    def __init__(self, terms: Terms, keys: list[Ed25519PrivateKey], dropping: int) -> None:
        self.terms = terms
        self.keys = keys
        self.dropping = set(range(dropping))
        self.states: dict[int, SiteState] = {}
        self.values = np.random.default_rng(1).normal(0, 0.01, terms.num_values).astype(np.float32)
        self.inputs: dict[int, bytes] = {}
        self.naive: NDArray[np.int64] = np.zeros(terms.num_values, dtype=np.int64)
        self.bytes_up = 0

    def levels(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        """Of its update: the same values at every site, rounded by its own lot."""
        levels = np.empty(self.terms.num_values, dtype=f"<u{self.terms.bits // 8}")
        key = hashlib.sha256(b"rounding %d" % index).digest()
        Quantiser(key, scale=self.terms.scale, bits=self.terms.bits).write(self.values, 0, levels)
        return levels

    def answer(self, index: int, step: pb.SecureStep) -> dict[str, Any]:
        plan, state, key = self.terms.plan, self.states.get(index), self.keys[index]
        kind = step.WhichOneof("step")
        if kind == "plan":
            self.states[index] = site.advertise(plan, index, Secrets.draw(), key)
            return {"advertised": self.states[index].advertised}
        assert state is not None  # the plan comes first
        match kind:
            case "keys":
                state = site.take_keys(plan, state, list(step.keys.advertised))
                if not plan.parameters.complete:
                    self.states[index] = state
                    return {"ring_nonce": site.open_ring(state)}
                self.states[index] = site.share(plan, state, key)
                return {"shared": secure_pb2.SecureShared(items=self.states[index].shared)}
            case "ring":
                state = site.take_ring(plan, state, {one.site: one.nonce for one in step.ring.nonces})
                self.states[index] = site.share(plan, state, key)
                return {"shared": secure_pb2.SecureShared(items=self.states[index].shared)}
            case "shares":
                return self._input(index, state, step)
            case "survivors":
                self.states[index] = site.confirm(plan, state, step.survivors, key)
                return {"confirmation": self.states[index].consistency}
            case _:
                self.states[index] = site.unmask(plan, state, list(step.confirmations.confirmed), key)
                return {"unmasked": self.states[index].unmasked}

    def _input(self, index: int, state: SiteState, step: pb.SecureStep) -> dict[str, Any]:
        plan = self.terms.plan
        sharing = read_bitmap(step.shares.sharing, self.terms.num_sites)
        state = site.take_shares(plan, state, sharing, list(step.shares.items))
        exact = np.array(counters(self.terms, self.terms.max_weight, {}), dtype="<u8")
        levels = self.levels(index)
        self.naive += levels.view(f"<i{self.terms.bits // 8}")
        for lane, masks in zip((exact, levels), site.masks(plan, state), strict=True):
            add_masks(lane, 0, masks)
        masked = exact.tobytes() + levels.tobytes()
        self.inputs[index] = masked
        self.states[index] = site.send_input(plan, state, hashlib.sha256(masked).digest(), self.keys[index])
        return {"input": secure_pb2.SecureInput(declared=self.states[index].input)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One session, and the fold of as many plain updates."""
    manifest = Manifest.build([("w", "float32", (options.parameters,), "parameter")])
    layout = update_layout(manifest, Native(Native.Options()), "mean")
    keys = [Ed25519PrivateKey.generate() for _ in range(options.sites)]
    terms = _terms(options, manifest, layout, keys)
    sites = Sites(terms, keys, options.drops)
    total, session = MaskedSum(layout, terms), SecureSession(terms=terms)
    began_s, at_server_s = time.perf_counter(), 0.0
    while session.at is not At.UNMASKING or session.awaited:
        for index in sorted(session.awaited):
            if session.at is At.INPUTS and index in sites.dropping:
                session = session.without(index, "drops out")
                continue
            for parts in session.steps_for(index):
                answer = pb.SecureAnswer(**sites.answer(index, pb.SecureStep(**parts)))
                sites.bytes_up += answer.ByteSize()
                step_s = time.perf_counter()
                if session.at is At.INPUTS:
                    masked = sites.inputs.pop(index)
                    sites.bytes_up += len(masked)
                    session = session.take_input(index, answer.input.declared, hashlib.sha256(masked).digest())
                    total.add(masked)
                else:
                    session = session.take(index, answer)
                at_server_s += time.perf_counter() - step_s
        step_s = time.perf_counter()
        session = session.close() if session.at is not At.UNMASKING else session
        at_server_s += time.perf_counter() - step_s
    step_s = time.perf_counter()
    counted = total.unmask(session.unmasking().masks)
    unmask_s = time.perf_counter() - step_s
    seconds = time.perf_counter() - began_s
    found = torch.empty(terms.num_values, dtype=torch.float64)
    total.difference(0, found)
    factor = terms.quantum * (terms.max_weight / counted.weight)
    senders = options.sites - options.drops
    plain_s = _plain(layout, sites.values, senders)
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
        "server_seconds": round(at_server_s + unmask_s, 3),
        "unmask_seconds": round(unmask_s, 3),
        "sum_exact": bool((found.numpy() == sites.naive * factor).all())
        and counted.weight == senders * terms.max_weight,
        "bytes_per_parameter": round(sites.bytes_up / senders / options.parameters, 4),
    }


def _terms(
    options: argparse.Namespace, manifest: Manifest, layout: UpdateLayout, keys: list[Ed25519PrivateKey]
) -> Terms:
    section = {"threat": options.threat, "corrupt": options.corrupt, "dropped": options.dropped, "metrics": []}
    section = {key: value for key, value in section.items() if value is not None}
    job = parse_job({"job": {"name": "light", "app": "light", "rounds": 1}, "privacy": {"secure_aggregation": section}})
    names = tuple(f"site-{number:05d}" for number in range(options.sites))
    members = [
        Member(site=name, organisation=name, signing_key=key.public_key().public_bytes_raw(), status=ACTIVE)
        for name, key in zip(names, keys, strict=True)
    ]
    opening = Opening(
        run=RUN,
        round=1,
        session=1,
        sites=names,
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
        members=MemberList(federation="light", version=1, members=members),
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
