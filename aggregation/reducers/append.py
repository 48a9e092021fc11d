"""A reducer for payloads that nobody looks into: the next version is the last one with the round's payloads behind it.

They go in by the names of their sites, so the order of arrival changes no byte. Opaque bytes have no mean, no
difference and no bound, so nothing else of a strategy applies to them: `require_alone` says what is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from atoll.aggregation.blocks import byte_view
from atoll.aggregation.compositions import Composition
from atoll.aggregation.layout import UpdateLayout
from atoll.aggregation.reducers.reduction import NO_METRICS, Metrics, RoundTerms
from atoll.aggregation.reducers.spooled import kept_copy
from atoll.wire.errors import BadUpdate, ConfigError, TooLarge
from atoll.wire.job import StrategySection, Strict
from atoll.wire.payload_list import LENGTH_BYTES, prefix_of
from atoll.wire.tensors import Buffer


class Append:
    """Appends what each site sends to what the run has, such as boosted trees, one of each site and round.

    Nothing is computed. The trees of the example are those of XGBoost (Chen and Guestrin 2016, arXiv:1603.02754).
    Memory: none that grows; disk: every payload of the round.
    """

    class Options(Strict):
        max_bytes: int = Field(default=1 << 20, ge=1, le=1 << 30)  # of one site's payload of one round
        max_version_bytes: int = Field(default=1 << 30, ge=1, le=1 << 40)  # of all payloads of a run together

        @model_validator(mode="after")
        def _one_fits(self) -> Append.Options:
            if self.max_bytes >= self.max_version_bytes:
                raise ValueError(
                    f"max_version_bytes is more than max_bytes ({self.max_bytes}), else no version has room"
                )
            return self

    def __init__(self, options: Options) -> None:
        self.name = "append"
        self.options = options

    needs: Literal["sum", "all"] = "all"
    fewest_updates = 1

    def mixed(self, num_updates: int) -> int:
        """One: every site's payload stands there by itself, for all sites to read."""
        return 1

    def init(self, layout: UpdateLayout, terms: RoundTerms) -> Appending:
        return Appending(layout, terms, self.options)


class Appending:
    """The payloads of one round, kept in files without a name."""

    def __init__(self, layout: UpdateLayout, terms: RoundTerms, options: Append.Options) -> None:
        self.layout = layout
        self._terms = terms
        self._options = options
        self._kept: dict[str, Buffer] = {}
        self._lock = threading.Lock()

    @property
    def num_updates(self) -> int:
        return len(self._kept)

    @property
    def sum_weights(self) -> int:
        return len(self._kept)

    def check(
        self,
        payload: Buffer,
        weight: int,
        *,
        site: str = "",
        round: int = 0,
        crc32: int | None = None,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        """Returns where the payload is within its bound. Raises TooLarge."""
        require_fits(byte_view(payload).numel(), self._options, site=site, round=round)

    def fold(
        self, site: str, payload: Buffer, weight: int, metrics: Metrics = NO_METRICS, *, scale: float = 1.0
    ) -> None:
        with self._lock:
            if site in self._kept or len(self._kept) >= self._terms.num_sites or scale != 1.0:
                raise ValueError(f"no room for a payload of {site}: it is in, or nobody waits for it, or it is stale")
            self._kept[site] = kept_copy(payload, self._terms.spool)

    def merge(self, other: Self) -> None:
        with self._lock:
            if set(self._kept) & set(other._kept):
                raise ValueError("a site is in both")
            self._kept.update(other._kept)

    def difference(self, index: int, out_P: Tensor) -> None:
        raise ValueError("a list of payloads has no values")

    def raw(self, name: str) -> Tensor:
        raise ValueError("a list of payloads has no tensors")

    # --- the next version -------------------------------------------------------------------------------------------

    def version_bytes(self, base_bytes: int) -> int:
        """Length of the next version, which grows from one of `base_bytes`.

        Raises:
            BadUpdate: it is over the job's bound.
        """
        total = base_bytes + sum(LENGTH_BYTES + byte_view(kept).numel() for kept in self._kept.values())
        most = self._options.max_version_bytes
        if total > most:
            raise BadUpdate(
                f"the next version would have {total} bytes, the job allows {most}; raise "
                "strategy.reducer.max_version_bytes, or let the run have fewer rounds",
                field="strategy.reducer.max_version_bytes",
                value=total,
                bound=most,
            )
        return total

    def write(self, base: Buffer, out: Buffer) -> None:
        """Writes the bytes of the next version, of `version_bytes`, into `out`."""
        old, new = byte_view(base), byte_view(out)
        new[: old.numel()].copy_(old)
        position = old.numel()
        for _, kept in sorted(self._kept.items()):
            payload = byte_view(kept)
            for part in (byte_view(bytearray(prefix_of(payload.numel()))), payload):
                new[position : position + part.numel()].copy_(part)
                position += part.numel()


def require_fits(num_bytes: int, options: Append.Options, *, site: str = "", round: int = 0) -> None:
    """Returns where a payload of so many bytes may travel.

    Raises:
        TooLarge: it is over the job's bound, or empty; names site, round, size and bound.
    """
    if 1 <= num_bytes <= options.max_bytes:
        return
    whose = f" of {site}, round {round}," if site else ""
    raise TooLarge(
        f"payload{whose} has {num_bytes} bytes, the job allows 1 to {options.max_bytes}; raise "
        "strategy.reducer.max_bytes, or have the app make it smaller",
        site=site,
        round=round,
        field="strategy.reducer.max_bytes",
        value=num_bytes,
        bound=f"1 to {options.max_bytes}",
    )


_REASONS: Final[Mapping[str, str]] = {
    "rule": "a rule changes steps of an optimizer, and an opaque app has none that Atoll could see",
    "codec": "a codec encodes numbers, and payloads travel as they are",
    "optimizer": "an optimizer moves tensors by a mean difference, and opaque bytes have neither",
    "personal": "an opaque app has no model that Atoll could keep a second one of",
    "download": "a codec of downloads encodes tensors, and versions are lists of payloads",
    "local": "names of tensors mean nothing in a list of payloads",
    "parameters": "a list of payloads has no parameters",
    "work": "an opaque app decides by itself what a round's work is, by its own [app] values",
    "buffers": "a list of payloads has no buffers",
    "sum": "payloads are not summed",
}


def require_alone(section: StrategySection, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Returns where a job combines `append` with nothing that needs numbers.

    Args:
        wanted: kind and options of each part.

    Raises:
        ConfigError: names both keys and the reason.
    """
    nothing, default = Composition(summary=""), StrategySection()
    for name, reason in _REASONS.items():
        value = wanted.get(name, getattr(section, name))
        if value == (nothing.part(name) if name in wanted else getattr(default, name)):
            continue
        key, found = f"strategy.{name}", value.get("kind") if isinstance(value, Mapping) else value
        raise ConfigError(
            f"{key} = {str(found)!r} with strategy.reducer = 'append': {reason}; leave {key} out",
            key=key,
            value=str(found),
            bound=reason,
        )
