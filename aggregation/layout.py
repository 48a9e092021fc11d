"""Where each tensor of a model stands in the bytes of an update, and how it is combined.

An update is a header of 64 bytes, then one region for each tensor that travels, in manifest order:

* **mean**: floating and complex tensors, controls among them, as the difference to the base model, encoded by the codec. Their values,
  one after the other, form the flat vector that is summed.
* **max**, **first**: tensors of other dtypes, and float buffers under the policy "first", as raw values. Combined to
  the elementwise maximum, or to those of the site whose name sorts first.
* absent: buffers under the policy "local" (and other dtypes with them), and tensors whose name matches a pattern of
  `local`: the global model keeps its own, and every site its own.

The header names the layout by hash, so an update made for another model, codec or policy is refused, whatever its
length. Invariant: regions are aligned to their encoding and follow one another; the bytes between them are zero.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from atoll.aggregation.codecs.casts import SUMMABLE, native_encoding
from atoll.aggregation.codecs.encoding import Codec, Encoding, is_sparse
from atoll.wire.errors import ConfigError
from atoll.wire.manifest import DTYPE_BYTES, Manifest, TensorSpec

Buffers = Literal["mean", "local", "first"]
Choice = Literal["max", "first"]

MAGIC = b"ATOLLUP1"
HEADER_BYTES = 64  # magic, SHA-256 of the layout, zeros: one cache line, so that regions keep their alignment
_UNORDERED = frozenset({"float8_e8m0fnu", "float4_e2m1fn_x2"})  # dtypes that have no maximum in any library


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanEntry:
    """A tensor whose difference is summed: values `index` to `index` + `num_values` of the flat vector."""

    spec: TensorSpec
    encoding: Encoding
    index: int
    num_values: int
    offset: int  # of its region in the update, bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEntry:
    """A tensor whose values travel as they are."""

    spec: TensorSpec
    choice: Choice
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Neighbouring mean entries whose regions can be read as one; small tensors then cost no block of their own."""

    encoding: Encoding
    index: int
    num_values: int
    offset: int
    num_bytes: int
    low_index: int  # place in the vector of second limbs; meaningless where the encoding has one limb


@dataclass(frozen=True)  # not slotted: the properties are worked out once and kept
class UpdateLayout:
    """What an update of a run is made of. Made by `update_layout`."""

    manifest: Manifest
    codec_name: str
    buffers: Buffers
    means: tuple[MeanEntry, ...]
    raws: tuple[RawEntry, ...]
    absent: tuple[TensorSpec, ...]
    num_bytes: int

    @cached_property
    def num_values(self) -> int:
        """Length of the flat vector."""
        return sum(entry.num_values for entry in self.means)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return _joined(self.means)

    @cached_property
    def num_low_values(self) -> int:
        """Length of the vector of second limbs."""
        return sum(segment.num_values for segment in self.segments if segment.encoding.two_limbs)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Start and stop of the bytes between regions."""
        entries: list[MeanEntry | RawEntry] = [*self.means, *self.raws]
        found, end = [], HEADER_BYTES
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.offset > end:
                found.append((end, entry.offset))
            end = entry.offset + entry.num_bytes
        return tuple(found)

    @cached_property
    def header(self) -> bytes:
        """The first bytes of every update of this layout."""
        lines: list[list[str | int]] = [[self.manifest.schema_hash, self.codec_name, self.buffers]]
        lines += [[e.spec.name, "mean", e.encoding.name, e.index, e.offset, e.num_bytes] for e in self.means]
        lines += [[e.spec.name, e.choice, "raw", e.offset, e.num_bytes] for e in self.raws]
        digest = hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).digest()
        return (MAGIC + digest).ljust(HEADER_BYTES, b"\x00")


def update_layout(
    manifest: Manifest,
    codec: Codec,
    buffers: Buffers,
    local: Sequence[str] = (),
    *,
    only: Collection[str] | None = None,
) -> UpdateLayout:
    """The layout that every party of a run derives from the model, the codec and the policies.

    Args:
        local: patterns (as `fnmatch` has them) of names of tensors that stay at their site.
        only: names of the tensors that this update carries, where it does not carry all that travel.

    Raises:
        ConfigError: a pattern matches no tensor, or nothing is left to travel.
    """
    at_site = matching(manifest, local)
    means: list[MeanEntry] = []
    raws: list[RawEntry] = []
    absent: list[TensorSpec] = []
    end, index = HEADER_BYTES, 0
    for spec in manifest:
        elsewhere = spec.name in at_site or (only is not None and spec.name not in only)
        choice = "absent" if elsewhere else _choice(spec, buffers)
        if choice == "mean":
            encoding, num_values = _encoding(spec, codec), num_reals(spec)
            offset, num_bytes = _aligned(end, encoding.alignment), encoding.num_bytes(num_values)
            means.append(
                MeanEntry(
                    spec=spec, encoding=encoding, index=index, num_values=num_values, offset=offset, num_bytes=num_bytes
                )
            )
            index += num_values
        elif choice == "absent":
            absent.append(spec)
            continue
        else:
            offset, num_bytes = _aligned(end, DTYPE_BYTES[spec.dtype]), spec.num_bytes
            raws.append(RawEntry(spec=spec, choice=choice, offset=offset, num_bytes=num_bytes))
        end = offset + num_bytes
    return UpdateLayout(
        manifest=manifest,
        codec_name=codec.name,
        buffers=buffers,
        means=tuple(means),
        raws=tuple(raws),
        absent=tuple(absent),
        num_bytes=end,
    )


def matching(manifest: Manifest, patterns: Sequence[str]) -> frozenset[str]:
    """Names of the model's tensors that match one of the patterns (as `fnmatch` has them).

    Raises:
        ConfigError: a pattern matches none, or no parameter is left.
    """
    names = [spec.name for spec in manifest if spec.role != "control"]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ConfigError(
                f"strategy.local: {pattern!r} matches no tensor of the model{hint}", key="strategy.local", value=pattern
            )
        found.update(matching)
    if found and not any(spec.role == "parameter" and spec.name not in found for spec in manifest):
        raise ConfigError(
            "strategy.local: every parameter would stay at its site, and nothing be learnt together",
            key="strategy.local",
            value=", ".join(patterns),
        )
    return frozenset(found)


def _choice(spec: TensorSpec, buffers: Buffers) -> Literal["mean", "max", "first", "absent"]:
    summable = spec.dtype in SUMMABLE
    if summable and spec.role in ("parameter", "control"):
        return "mean"
    if buffers == "local":
        return "absent"
    if buffers == "first" or spec.dtype in _UNORDERED:
        return "first"
    return "mean" if summable else "max"


def _encoding(spec: TensorSpec, codec: Codec) -> Encoding:
    """How a tensor travels. Under a sparse codec statistics go whole: no later round makes up for what is left of them.

    A control that is one number travels exactly: it may be a factor of all the others, and saves nothing.
    """
    whole = (spec.role == "buffer" and is_sparse(codec)) or (spec.role == "control" and spec.num_elements == 1)
    return native_encoding(spec.dtype) if whole else codec.encoding(spec.dtype)


def num_reals(spec: TensorSpec) -> int:
    """Real numbers in a tensor: two for each complex one."""
    return spec.num_elements * (2 if spec.dtype.startswith("complex") else 1)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _joined(means: Sequence[MeanEntry]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    low_index = 0
    for entry in means:
        last = segments[-1] if segments else None
        if (
            last is not None
            and entry.encoding.group == 1
            and entry.encoding == last.encoding
            and last.offset + last.num_bytes == entry.offset
        ):
            segments[-1] = Segment(
                encoding=last.encoding,
                index=last.index,
                num_values=last.num_values + entry.num_values,
                offset=last.offset,
                num_bytes=last.num_bytes + entry.num_bytes,
                low_index=last.low_index,
            )
        else:
            segments.append(
                Segment(
                    encoding=entry.encoding,
                    index=entry.index,
                    num_values=entry.num_values,
                    offset=entry.offset,
                    num_bytes=entry.num_bytes,
                    low_index=low_index,
                )
            )
        if entry.encoding.two_limbs:
            low_index += entry.num_values
    return tuple(segments)
