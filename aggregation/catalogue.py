"""What can be composed on this machine, for `atoll strategies`: kinds, options, sources, and plugins that failed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from atoll.aggregation import compositions, parts, plugins
from atoll.aggregation.compositions import Composition
from atoll.aggregation.plugins import Plugin
from atoll.wire.errors import ConfigError
from atoll.wire.job import Part

# "(Reddi et al. 2020, arXiv:2003.00295, algorithm 2)", and "Xie et al. 2019 (arXiv:1903.03934)".
_PAPER = re.compile(
    r"([A-Z][\w-]+(?: et al\.| and [A-Z][\w-]+)? \d{4})(?:, | \()(arXiv:\d{4}\.\d{4,5}|doi:10\.\d{4,9}/[\w./-]*\w)"
)
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str
    type: str  # "number", "integer", "boolean", "string", "array", "table"
    default: str  # empty where the option is required
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of one part. `failure` says why a plugin cannot be used; empty where it can."""

    part: str  # "strategy", "schedule", "rule", "codec", "reducer", "optimizer", "personal"
    kind: str
    summary: str  # one sentence
    source: str  # "built in", or distribution and version
    options: tuple[Option, ...] = ()
    failure: str = ""
    paper: str = ""  # authors, year and arXiv id or doi of the first that its text names


def describe() -> list[Kind]:
    """Every kind of every part, built-ins first; imports all plugins, and a broken one is in the list with its fault."""
    return [*_strategies(), *(kind for part in compositions.PARTS for kind in _kinds(part))]


def _strategies() -> Iterator[Kind]:
    for name, composition in compositions.BUILT_IN.items():
        summary = composition.summary
        yield Kind(part="strategy", kind=name, summary=summary, source="built in", paper=_paper(summary))
    for plugin in _loaded("strategy", set(compositions.BUILT_IN)):
        value = plugin.value
        if plugin.failure or isinstance(value, Composition):
            summary = value.summary if isinstance(value, Composition) else ""
            yield Kind(
                part="strategy",
                kind=plugin.kind,
                summary=summary,
                source=plugin.source,
                failure=plugin.failure,
                paper=_paper(summary),
            )
        else:
            yield _broken("strategy", plugin, "gives no Composition")


def _kinds(part: str) -> Iterator[Kind]:
    for kind, made_by in parts.BUILT_IN[part].items():
        yield _usable(part, kind, made_by, "built in")
    for plugin in _loaded(part, set(parts.BUILT_IN[part])):
        if plugin.failure or not isinstance(plugin.value, type):
            yield _broken(part, plugin, plugin.failure or "gives no class")
            continue
        try:
            yield _usable(part, plugin.kind, plugin.value, plugin.source)
        except (ConfigError, PydanticUserError) as error:  # no Options, or of types that have no description
            yield _broken(part, plugin, str(error))


def _loaded(part: str, taken: set[str]) -> Iterator[Plugin]:
    for point in plugins.installed(part):
        plugin = plugins.load(point)
        if plugin.kind in taken:
            failure = f"{plugin.kind!r} is the name of a built-in, which stands"
            plugin = Plugin(kind=plugin.kind, source=plugin.source, failure=failure)
        yield plugin


def _broken(part: str, plugin: Plugin, failure: str) -> Kind:
    return Kind(part=part, kind=plugin.kind, summary="", source=plugin.source, failure=failure)


def _usable(part: str, kind: str, made_by: type, source: str) -> Kind:
    text = inspect.getdoc(made_by) or ""
    options = _options(made_by, part)
    return Kind(
        part=part, kind=kind, summary=text.partition("\n")[0], source=source, options=options, paper=_paper(text)
    )


def _paper(text: str) -> str:
    found = _PAPER.search(" ".join(text.split()))
    return f"{found[1]}, {found[2]}" if found else ""


def _options(made_by: type, part: str) -> tuple[Option, ...]:
    options = parts.options_of(made_by, f"strategy.{part}")
    schema = options.model_json_schema()["properties"] if options.model_fields else {}
    return tuple(_option(options, name, schema[name]) for name in options.model_fields)


def _option(options: type[BaseModel], name: str, schema: dict[str, Any]) -> Option:
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"] or [{}]
    bound = " ".join(f"{sign} {choices[0][key]}" for key, sign in _BOUNDS.items() if key in choices[0])
    field = options.model_fields[name]
    known = field.default.kind if isinstance(field.default, Part) else str(field.default)
    default = "" if field.is_required() else known
    kind = choices[0].get("type", "table" if "$ref" in choices[0] else "string")
    return Option(name=name, type=kind, default=default, bound=bound)
