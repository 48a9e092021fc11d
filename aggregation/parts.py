"""The kinds of every part of a strategy: what is built in, what plugins bring, and how options become an object.

A part is a class with a nested `Options` (a frozen pydantic model) that takes one in its constructor. Built-ins are a
literal table; plugins name such a class in an entry point.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from atoll.aggregation import plugins
from atoll.aggregation.codecs.casts import BFloat16, Float32, Native
from atoll.aggregation.codecs.scaled import Int4, Int8
from atoll.aggregation.codecs.sparse import RandomK, TopK
from atoll.aggregation.reducers.append import Append
from atoll.aggregation.reducers.bucketing import Bucketing
from atoll.aggregation.reducers.central import CenteredClipping, FLTrust, GeometricMedian, QFedAvg
from atoll.aggregation.reducers.coordinates import Median, TrimmedMean
from atoll.aggregation.reducers.krum import Bulyan, Krum, MultiKrum
from atoll.aggregation.reducers.mean import Mean, NormBound
from atoll.aggregation.rules.feddyn import FedDyn, FedDynOptimizer
from atoll.aggregation.rules.fednova import FedNova
from atoll.aggregation.rules.fedprox import FedProx
from atoll.aggregation.rules.personal import Ditto, FineTune, NoPersonal
from atoll.aggregation.rules.rule import NoRule
from atoll.aggregation.rules.scaffold import Scaffold
from atoll.aggregation.schedules.buffered import Buffered
from atoll.aggregation.schedules.cyclic import Cyclic
from atoll.aggregation.schedules.every_steps import EverySteps
from atoll.aggregation.schedules.gossip import Gossip
from atoll.aggregation.schedules.hierarchical import Hierarchical
from atoll.aggregation.schedules.rounds import Rounds
from atoll.aggregation.server_optimizers import Adagrad, Adam, AdamW, Sgd, Yogi
from atoll.wire.errors import ConfigError
from atoll.wire.explain import shown, wanted_of

BUILT_IN: Final[Mapping[str, Mapping[str, type]]] = {
    "schedule": {
        "rounds": Rounds,
        "buffered": Buffered,
        "cyclic": Cyclic,
        "every_steps": EverySteps,
        "gossip": Gossip,
        "hierarchical": Hierarchical,
    },
    "rule": {"none": NoRule, "fedprox": FedProx, "scaffold": Scaffold, "feddyn": FedDyn, "fednova": FedNova},
    "codec": {
        "native": Native,
        "float32": Float32,
        "bfloat16": BFloat16,
        "int8": Int8,
        "int4": Int4,
        "top_k": TopK,
        "random_k": RandomK,
    },
    "reducer": {
        "mean": Mean,
        "norm_bound": NormBound,
        "median": Median,
        "trimmed_mean": TrimmedMean,
        "krum": Krum,
        "multi_krum": MultiKrum,
        "bulyan": Bulyan,
        "geometric_median": GeometricMedian,
        "centered_clipping": CenteredClipping,
        "bucketing": Bucketing,
        "fltrust": FLTrust,
        "qfedavg": QFedAvg,
        "append": Append,
    },
    "optimizer": {
        "sgd": Sgd,
        "adam": Adam,
        "adamw": AdamW,
        "adagrad": Adagrad,
        "yogi": Yogi,
        "feddyn": FedDynOptimizer,
    },
    "personal": {"none": NoPersonal, "ditto": Ditto, "fine_tune": FineTune},
}

# What an object of each part has: the members of its protocol.
_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "schedule": ("min_sites", "fewest_updates", "init", "on"),
    "rule": ("begin", "before_step", "after_step", "end"),
    "codec": ("name", "additive", "encoding"),
    "reducer": ("name", "needs", "fewest_updates", "mixed", "init"),
    "optimizer": ("name", "precision", "init", "step"),
    "personal": ("name", "keeps", "work", "rule"),
}
_PAIRED: Final = ("resume", "differences", "settle")  # what a rule has too that has lanes


def build(part: str, kind: str, options: Mapping[str, Any], key: str = "") -> Any:
    """The object of one part; `key` is where the job names it, `strategy.PART` unless told.

    Raises:
        ConfigError: names the key, the value and what is wanted; for an unknown name, the nearest known one.
    """
    key = key or f"strategy.{part}"
    made_by = _class_of(part, kind, f"{key}.kind")
    try:
        checked = options_of(made_by, key).model_validate(dict(options))
    except ValidationError as error:
        raise _explain(error, key, kind, options_of(made_by, key)) from None
    plugin = f"{key}.kind = {kind!r}: the plugin {made_by.__module__}.{made_by.__qualname__}"
    try:
        made = made_by(checked)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  a plugin may raise anything
        raise ConfigError(f"{plugin} raises {type(error).__name__}: {error}", key=f"{key}.kind", value=kind) from None
    members = (*_MEMBERS[part], *(_PAIRED if hasattr(made, "lanes") else ()))
    if lacking := [name for name in members if not hasattr(made, name)]:
        raise ConfigError(f"{plugin} lacks {', '.join(lacking)}", key=f"{key}.kind", value=kind)
    return made


def options_of(made_by: type, key: str) -> type[BaseModel]:
    """The options that a part takes. Raises ConfigError for a plugin that declares none."""
    options = getattr(made_by, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        name = f"{made_by.__module__}.{made_by.__qualname__}"
        raise ConfigError(
            f"{key}: the plugin {name} has no Options (a pydantic model); tell its author", key=key, value=name
        )
    return options


def _class_of(part: str, kind: str, key: str) -> type:
    if kind in BUILT_IN[part]:  # a plugin cannot take a built-in's name
        return BUILT_IN[part][kind]
    plugin = plugins.find(part, kind, key)
    if plugin is None:
        raise unknown_kind(key, kind, [*BUILT_IN[part], *(point.name for point in plugins.installed(part))])
    if not isinstance(plugin.value, type):
        raise ConfigError(
            f"{key} = {kind!r}: {plugin.source} gives no class; tell its author", key=key, value=kind, bound="a class"
        )
    return plugin.value


def unknown_kind(key: str, kind: str, known: list[str]) -> ConfigError:
    """The error for a kind that nothing brings, with the nearest known one."""
    near = difflib.get_close_matches(kind, known, n=1, cutoff=0.5)
    bound = ", ".join(sorted(set(known)))
    hint = f"did you mean {near[0]!r}?" if near else f"known: {bound}"
    return ConfigError(f"{key} = {kind!r} is not known; {hint}", key=key, value=kind, bound=bound)


def _explain(error: ValidationError, key: str, kind: str, options: type[BaseModel]) -> ConfigError:
    """One ConfigError for the first fault that pydantic found."""
    fault = error.errors(include_url=False)[0]
    place = ".".join([key, *(str(step) for step in fault["loc"])])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if fault["type"] == "extra_forbidden":
        known = sorted(options.model_fields)
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"{kind} takes {', '.join(known) or 'no options'}"
        return ConfigError(
            f"{place}: {kind} has no such option; {hint}{more}",
            key=place,
            value=shown(fault["input"]),
            bound=", ".join(known) or "no options",
        )
    if fault["type"] == "missing":
        text = f'{place} is missing: {kind} needs it, as in {{ kind = "{kind}", {fault["loc"][-1]} = ... }}'
        return ConfigError(f"{text}{more}", key=place, bound="a value")
    value, wanted = shown(fault["input"]), wanted_of(fault)
    return ConfigError(f"{place} = {value}: {wanted}{more}", key=place, value=value, bound=wanted)
