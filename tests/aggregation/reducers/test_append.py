"""The reducer of opaque payloads: in the order of sites, within its bounds, and with nothing that needs numbers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from atoll.aggregation import compositions, parts
from atoll.aggregation.layout import update_layout
from atoll.aggregation.reducers.append import Append, Appending
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.strategy import require_regions_allowed, resolve
from atoll.wire.errors import BadManifest, BadUpdate, ConfigError, TooLarge
from atoll.wire.job import parse_job
from atoll.wire.payload_list import MAGIC, is_list, manifest_of, payloads_in

SITES = {"a": b"one", "b": b"three", "c": b"fifth"}


def opened(spool: Path | None = None, **options: int) -> Appending:
    strategy = resolve(job())
    layout = update_layout(manifest_of(len(MAGIC)), strategy.codec, strategy.buffers)
    terms = RoundTerms(num_sites=len(SITES), max_weight=1, bound=1.0, spool=spool)
    return Append(Append.Options(**options)).init(layout, terms)


def job(**strategy: Any) -> Any:
    return parse_job({"job": {"name": "x", "app": "x", "rounds": 2}, "strategy": {"kind": "bagging", **strategy}})


def refusal(strategy: dict[str, Any]) -> ConfigError | None:
    try:
        resolve(job(**strategy))
    except ConfigError as error:
        return error
    return None


def version(kept: Appending, base: bytes = MAGIC) -> bytes:
    out = bytearray(kept.version_bytes(len(base)))
    kept.write(base, out)
    return bytes(out)


@pytest.mark.parametrize("in_files", [True, False])
def test_payloads_stand_in_the_order_of_their_sites(tmp_path: Path, in_files: bool) -> None:
    order = list(SITES)
    random.Random(3).shuffle(order)
    assert order != sorted(order)
    first = opened(tmp_path / "spool" if in_files else None)
    for site in order:
        first.check(SITES[site], 1, site=site, round=1)
        first.fold(site, SITES[site], 1)
    made = version(first)
    assert payloads_in(made) == [b"one", b"three", b"fifth"]
    assert is_list(manifest_of(len(made)))
    second = opened()
    second.fold("b", b"again", 1)
    assert payloads_in(version(second, made)) == [b"one", b"three", b"fifth", b"again"]
    with pytest.raises(ValueError, match="no room for a payload of b"):
        second.fold("b", b"again", 1)


def test_sizes_are_bounded() -> None:
    kept = opened(max_bytes=5, max_version_bytes=40)
    for payload in (b"", b"sixsix"):
        with pytest.raises(
            TooLarge, match=f"payload of c, round 2, has {len(payload)} bytes, the job allows 1 to 5"
        ) as e:
            kept.check(payload, 1, site="c", round=2)
        assert (e.value.site, e.value.round, e.value.bound) == ("c", 2, "1 to 5")
    for site, payload in SITES.items():
        kept.fold(site, payload, 1)
    with pytest.raises(BadUpdate, match="would have 45 bytes, the job allows 40; raise"):
        version(kept)


@pytest.mark.parametrize("data", [b"", b"ATOLLPL", b"ATOLLUP1", MAGIC + b"\x01", MAGIC + bytes([4] + [0] * 7) + b"abc"])
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(BadManifest, match="fetch it again"):
        payloads_in(data)


def test_every_other_part_is_refused_with_its_reason() -> None:
    """Each kind of each part beside `append`: its own default goes, all else does not."""
    plain = compositions.Composition(summary="")
    required: dict[str, dict[str, Any]] = {
        "fedprox": {"mu": 0.1},
        "buffered": {"k": 1},
        "every_steps": {"steps": 2},
        "hierarchical": {"label": "region", "groups": ["north", "south"], "rounds": 1},
        "gossip": {"zone": "reef"},
    }
    allowed = []
    for part in ("rule", "codec", "optimizer", "schedule"):
        for kind in parts.BUILT_IN[part]:
            error = refusal({part: {"kind": kind, **required.get(kind, {})}})
            if error is None:
                allowed.append((part, kind))
            else:
                assert "append" in str(error)
                assert error.key == f"strategy.{part}"
    assert allowed == [(part, plain.part(part)["kind"]) for part in ("rule", "codec", "optimizer", "schedule")]
    with pytest.raises(ConfigError, match="opaque bytes have neither"):
        resolve(job(optimizer={"kind": "sgd", "lr": 0.5}))
    others = {
        "download": {"kind": "int8"},
        "local": ["*"],
        "work": {"steps": 2},
        "buffers": "first",
        "sum": {"bound": 2},
    }
    for name, value in others.items():
        with pytest.raises(
            ConfigError, match=rf"strategy\.{name} = .* with strategy\.reducer = 'append': .*leave"
        ) as e:
            resolve(job(**{name: value}))
        assert e.value.key == f"strategy.{name}"
    for one, two in itertools.combinations(others, 2):
        with pytest.raises(ConfigError):
            resolve(job(**{one: others[one], two: others[two]}))


def test_sites_are_told_that_each_payload_stands_by_itself() -> None:
    assert resolve(job()).reducer.mixed(50) == 1
    with pytest.raises(ConfigError, match="a region sends the sum of its sites' updates"):
        require_regions_allowed(job(), ["north"])
