"""Faults and attackers as data: which sites fail, are slow or lie, in which rounds.

A file of them is a list of tables, and so is the argument `faults` of `atoll.simulate`::

    [[fault]]
    kind = "fail"                # nothing comes of the task
    sites = ["site-3"]
    rounds = [2, 5]
    step = 10                    # after so many optimizer steps

    [[fault]]
    kind = "sign_flip"           # its update points the other way
    share = 0.2                  # of the sites, drawn by `seed`
    from_round = 3

All draws follow from seeds, so that a run repeats. What each kind does is in `lies.py` and `conditions.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, model_validator

from atoll.simulations.clock import require_known
from atoll.wire.errors import ConfigError
from atoll.wire.explain import explain
from atoll.wire.job import Strict
from atoll.wire.toml_file import TomlFile, read_toml

Chance = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=1e6)]
Step = Annotated[int, Field(ge=0)]


class Where(Strict):
    """Whom a fault is about, and when: the named sites or a share of all, in the named rounds or a range of them."""

    model_config = ConfigDict(strict=True)

    sites: list[str] = Field(default_factory=list)
    share: Chance | None = None  # of the sites, rounded to the nearest number
    rounds: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)  # all of the range where empty
    from_round: Annotated[int, Field(ge=1)] = 1
    to_round: Annotated[int, Field(ge=1)] | None = None  # that one included
    chance: Chance = 1.0  # each time
    seed: Annotated[int, Field(ge=0)] = 0  # of all that is drawn

    @model_validator(mode="after")
    def _one_of_them(self) -> Where:
        if bool(self.sites) == (self.share is not None):
            raise ValueError("wanted either sites = [...] or share = 0.2, which says whom it is about")
        if self.to_round is not None and self.to_round < self.from_round:
            raise ValueError(f"to_round = {self.to_round} is before from_round = {self.from_round}")
        return self

    def sites_of(self, names: Sequence[str]) -> frozenset[str]:
        """Those of `names` that it is about."""
        if self.share is None:
            return frozenset[str](self.sites)
        order = np.random.default_rng(self.seed).permutation(len(names))
        return frozenset(names[int(place)] for place in order[: round(self.share * len(names))])

    def holds(self, site: str, round_: int) -> bool:
        """Whether it strikes one of its sites in a round."""
        if round_ < self.from_round or (self.to_round is not None and round_ > self.to_round):
            return False
        if self.rounds and round_ not in self.rounds:
            return False
        return self.chance == 1.0 or self._draw(site, round_) < self.chance

    def _draw(self, site: str, round_: int) -> float:
        digest = hashlib.sha256(f"atoll/fault/1\n{self.seed}\n{site}\n{round_}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2.0**64


class Fail(Where):
    """The site fails the task after `step` optimizer steps; 0: when it has the model."""

    kind: Literal["fail"] = "fail"
    step: Step = 0


class Slow(Where):
    """From `step` on each optimizer step takes `factor` times as long; the task takes `seconds` more."""

    kind: Literal["slow"] = "slow"
    step: Step = 0
    factor: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0


class SignFlip(Where):
    """The site sends its difference the other way round, `strength` times as long."""

    kind: Literal["sign_flip"] = "sign_flip"
    strength: Strength = 1.0


class Scale(Where):
    """The site sends `strength` times its difference."""

    kind: Literal["scale"] = "scale"
    strength: Strength = 10.0


class Noise(Where):
    """The site adds noise of a normal distribution with this standard deviation to each value of its difference."""

    kind: Literal["noise"] = "noise"
    deviation: Strength


class FreeRide(Where):
    """The site does not train: it sends no difference, or noise of this standard deviation (Lin et al. 2019, arXiv:1911.12560)."""

    kind: Literal["free_ride"] = "free_ride"
    deviation: Strength = 0.0


class LabelFlip(Where):
    """The site trains with class c as class `classes` - 1 - c (Fang et al. 2020, arXiv:1911.11815), of a fraction of its examples."""

    kind: Literal["label_flip"] = "label_flip"
    classes: Annotated[int, Field(ge=2)]
    fraction: Chance = 1.0


class Backdoor(Where):
    """The site trains a fraction of its examples with a trigger in them as class `target`, and scales its difference.

    The trigger sets `features`, places in the flattened input, to `value` (Bagdasaryan et al. 2018, arXiv:1807.00459).
    """

    kind: Literal["backdoor"] = "backdoor"
    features: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    value: float = 1.0
    target: Annotated[int, Field(ge=0)]
    fraction: Chance = 0.5
    strength: Strength = 1.0


Fault = Fail | Slow | SignFlip | Scale | Noise | FreeRide | LabelFlip | Backdoor
_KINDS: Mapping[str, type[Fault]] = {
    "fail": Fail,
    "slow": Slow,
    "sign_flip": SignFlip,
    "scale": Scale,
    "noise": Noise,
    "free_ride": FreeRide,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
}


class Faults:
    """The faults of a run, by site and round."""

    def __init__(self, faults: Sequence[Fault | Mapping[str, Any]] = (), names: Sequence[str] = ()) -> None:
        """
        Args:
            names: of the run's sites.

        Raises:
            ConfigError: a fault has an unknown key or a bad value, or names a site that is not there.
        """
        self.all = tuple(
            fault if isinstance(fault, Where) else read_fault(fault, number) for number, fault in enumerate(faults)
        )
        self._by_site: dict[str, list[Fault]] = {}
        for number, fault in enumerate(self.all):
            require_known(f"fault.{number}.sites", fault.sites, names)
            for site in sorted(fault.sites_of(names)):
                self._by_site.setdefault(site, []).append(fault)

    def of(self, site: str, round_: int) -> list[Fault]:
        """Those that strike a site in a round, in the order in which they are given."""
        return [fault for fault in self._by_site.get(site, ()) if fault.holds(site, round_)]

    def ever(self, site: str) -> Sequence[Fault]:
        """Those that may strike a site in some round."""
        return self._by_site.get(site, ())


def read_fault(table: Mapping[str, Any], number: int = 0, source: TomlFile | str = "faults") -> Fault:
    """A fault of a table. Raises ConfigError, which names the key, its value and what is wanted."""
    kind = _KINDS.get(str(table.get("kind")))
    if kind is None:
        key, known = f"fault.{number}.kind", ", ".join(_KINDS)
        place = source if isinstance(source, str) else source.place(["fault", number, "kind"])
        text = f"{place}: {key} = {table.get('kind')!r}: wanted one of {known}"
        raise ConfigError(text, key=key, value=str(table.get("kind")), bound=known)
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise explain(error, kind, source, below=["fault", str(number)]) from None


def load_faults(path: Path) -> list[Fault]:
    """The faults of a TOML file. Raises ConfigError, which names the file, line, key and value."""
    file = read_toml(path)
    tables = file.table.get("fault")
    if set(file.table) != {"fault"} or not isinstance(tables, list):
        strange = sorted(set(file.table) - {"fault"})
        found = f"it has {', '.join(strange)}" if strange else "it has none"
        raise ConfigError(f"{path}: wanted tables [[fault]] and nothing else; {found}", key="fault")
    return [read_fault(table, number, file) for number, table in enumerate(tables)]
