"""A version on its way to the sites: what a codec leaves of it, the same for every site."""

from __future__ import annotations

import pytest
import torch
from contracts.updates import EVERY_DTYPE, SMALL, codec, random_state
from torch import Tensor

from atoll.aggregation.blocks import reals
from atoll.aggregation.download import Download
from atoll.aggregation.strategy import require_regions_allowed, resolve
from atoll.wire.errors import BadUpdate, ConfigError
from atoll.wire.job import parse_job
from atoll.wire.manifest import Manifest
from atoll.wire.tensors import views, write_state

RELATIVE_ERROR = {"native": 0.0, "float32": 2**-24, "bfloat16": 2**-8, "int8": 1 / 126}


def written(manifest: Manifest, seed: int = 1) -> tuple[dict[str, Tensor], bytearray]:
    state, data = random_state(manifest, seed), bytearray(manifest.num_bytes)
    write_state(manifest, state, data)
    return state, data


def passed(download: Download, manifest: Manifest, data: bytearray, version: int = 4) -> bytearray:
    """The model as a site has it."""
    payload, out = bytearray(download.num_bytes), bytearray(manifest.num_bytes)
    download.write(data, version, payload)
    download.read(payload, out)
    return out


@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_parameters_come_within_the_codecs_error_and_the_rest_as_it_is(name: str) -> None:
    manifest = Manifest.build(SMALL)
    state, data = written(manifest)
    there = views(manifest, passed(Download(manifest, codec(name), 3), manifest, data), writable=False)
    for spec in manifest:
        sent, found = state[spec.name], there[spec.name]
        if spec.role == "buffer" or not sent.numel():
            assert torch.equal(sent, found)
            continue
        own_error = 0.0 if name == "native" else torch.finfo(sent.dtype).eps / 2
        most = sent.abs().max().item() if name == "int8" else sent.abs()
        assert ((found.double() - sent.double()).abs() <= (RELATIVE_ERROR[name] + own_error) * most).all()


def test_native_carries_every_dtype_without_loss() -> None:
    entries = [entry for entry in EVERY_DTYPE if not entry[1].startswith("float8_e")]
    manifest = Manifest.build(entries)
    _, data = written(manifest)
    assert passed(Download(manifest, codec("native"), 0), manifest, data) == data


@pytest.mark.parametrize("name", RELATIVE_ERROR)
def test_every_dtype_passes_every_codec(name: str) -> None:
    manifest = Manifest.build(EVERY_DTYPE)
    _, data = written(manifest)
    there = views(manifest, passed(Download(manifest, codec(name), 0), manifest, data), writable=False)
    floats = [there[spec.name] for spec in manifest if spec.dtype in ("float64", "float32", "complex64", "bfloat16")]
    assert all(torch.isfinite(reals(tensor)).all() for tensor in floats)


def test_bytes_follow_from_seed_and_version() -> None:
    manifest = Manifest.build(SMALL)
    _, data = written(manifest)

    def payload(seed: int, version: int) -> bytes:
        download = Download(manifest, codec("int8"), seed)
        out = bytearray(download.num_bytes)
        download.write(data, version, out)
        return bytes(out)

    assert payload(1, 4) == payload(1, 4)
    assert payload(1, 4) != payload(1, 5)
    assert payload(1, 4) != payload(2, 4)


def test_a_payload_of_another_model_or_codec_is_refused() -> None:
    manifest, other = Manifest.build(SMALL), Manifest.build([("w", "float32", (3,), "parameter")])
    download = Download(manifest, codec("bfloat16"), 0)
    out = bytearray(manifest.num_bytes)
    _, data = written(manifest)
    payload = bytearray(download.num_bytes)
    download.write(data, 0, payload)
    for wrong in (payload[:-1], b"", bytes(len(payload))):
        with pytest.raises(BadUpdate, match="another model or codec"):
            download.read(wrong, out)
    with pytest.raises(BadUpdate, match="another model or codec"):
        Download(other, codec("bfloat16"), 0).read(payload, bytearray(other.num_bytes))


def test_a_value_that_the_codec_cannot_write_names_its_tensor() -> None:
    manifest = Manifest.build([("w", "float64", (3,), "parameter")])
    data = bytearray(manifest.num_bytes)
    write_state(manifest, {"w": torch.tensor([1.0, 1e300, 0.0], dtype=torch.float64)}, data)
    download = Download(manifest, codec("float32"), 0)
    with pytest.raises(BadUpdate, match='"w"'):
        download.write(data, 0, bytearray(download.num_bytes))


def test_a_job_names_it_and_a_region_refuses_it() -> None:
    table = {"job": {"name": "a", "app": "a", "rounds": 1}, "strategy": {"download": {"kind": "bfloat16"}}}
    job = parse_job(table)
    strategy = resolve(job)
    assert strategy.download is not None
    assert (strategy.download.name, strategy.codec.name) == ("bfloat16", "native")
    with pytest.raises(ConfigError, match=r"strategy\.download = 'bfloat16' with regions = 'north': .*in full"):
        require_regions_allowed(job, ["north"])
    with pytest.raises(ConfigError, match=r"strategy\.download\.kind = 'int9' is not known; did you mean 'int8'"):
        resolve(parse_job({**table, "strategy": {"download": {"kind": "int9"}}}))
