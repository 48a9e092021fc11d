"""What pydantic found wrong, in words for whoever wrote it: where, which key, its value, what is wanted instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_origin

from pydantic import BaseModel, ValidationError

from atoll.wire.errors import ConfigError
from atoll.wire.toml_file import TomlFile

_WANTED: Final[Mapping[str, str]] = {
    "greater_than_equal": "wanted at least {ge}",
    "greater_than": "wanted more than {gt}",
    "less_than_equal": "wanted at most {le}",
    "less_than": "wanted less than {lt}",
    "string_too_short": "wanted at least {min_length} characters",
    "string_too_long": "wanted at most {max_length} characters",
    "too_short": "wanted at least {min_length} entries",
    "too_long": "wanted at most {max_length} entries",
    "literal_error": "wanted {expected}",
    "enum": "wanted {expected}",
    "int_parsing": "wanted a whole number",
    "int_type": "wanted a whole number",
    "int_from_float": "wanted a whole number",
    "float_parsing": "wanted a number",
    "float_type": "wanted a number",
    "finite_number": "wanted a finite number",
    "bool_parsing": "wanted true or false",
    "bool_type": "wanted true or false",
    "string_type": 'wanted text in quotes, "..."',
    "path_type": 'wanted a path in quotes, "..."',
    "tuple_type": "wanted a list, [...]",
    "list_type": "wanted a list, [...]",
    "dict_type": "wanted a table, {{ key = value }}",
    "model_type": "wanted a table, {{ key = value }}",
}
_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@\s]*@")


def explain(
    error: ValidationError, model: type[BaseModel], source: TomlFile | str, *, below: Sequence[str] = ()
) -> ConfigError:
    """One ConfigError for the fault that says most: place, key, value, what is wanted, the nearest known key.

    Args:
        source: the file that was read, for its name and the line; or what else the table came from.
        below: keys of the table in `source` that the model is about; none where it is the whole.
    """
    # An unknown key comes first: it is often the misspelt form of the one that is missing, and carries the hint.
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    keys = [*below, *fault["loc"]]
    key = ".".join(str(step) for step in keys)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if fault["type"] == "missing":
        table = f"[{'.'.join(map(str, keys[:-1]))}]" if keys[:-1] else "the top of the file"
        text = f"{key} is missing; add `{keys[-1]} = ...` to {table}"
        return ConfigError(f"{_place(source, keys[:-1])}: {text}{more}", key=key)
    place = _place(source, keys)
    if fault["type"] == "extra_forbidden":
        known = known_keys(model, fault["loc"])
        return ConfigError(f"{place}: unknown key {key!r}; {nearest(str(keys[-1]), known)}{more}", key=key)
    wanted = wanted_of(fault)
    if isinstance(fault["input"], dict) and not fault["type"].endswith("_type"):  # over several keys, which it names
        return ConfigError(f"{place}: {f'{key}: ' if key else ''}{wanted}{more}", key=key or "(whole file)")
    value = shown(fault["input"])
    return ConfigError(f"{place}: {key} = {value}: {wanted}{more}", key=key, value=value, bound=wanted)


def nearest(key: str, known: Sequence[str]) -> str:
    """Which of the known keys may be meant; all of them where none is near."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"


def wanted_of(fault: Mapping[str, Any]) -> str:
    """What should stand in place of a value, of one of pydantic's `errors()`."""
    if fault["type"] in _WANTED:
        bounds = {name: _whole(bound) for name, bound in fault.get("ctx", {}).items()}
        return _WANTED[fault["type"]].format(**bounds)
    return str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "wanted")


def _whole(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() and abs(bound) < 1e6 else bound


def shown(value: object) -> str:
    """A value as an error quotes it: short, and without the password of a URL."""
    return _PASSWORD.sub(r"\1***@", repr(value))[:80]


def _place(source: TomlFile | str, keys: Sequence[str | int]) -> str:
    return source if isinstance(source, str) else source.place(keys)


def known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Keys that the table at `location` (without its last element, the unknown key) takes."""
    steps = iter(location[:-1])
    for step in steps:
        if isinstance(step, int):  # a place in a list of tables
            continue
        field = model.model_fields.get(str(step))
        annotation = field.annotation if field else None
        if get_origin(annotation) is dict:
            next(steps, None)  # a name of the user's choice, as in [apps.NAME]
        candidates = [a for a in getattr(annotation, "__args__", (annotation,)) if isinstance(a, type)]
        nested = next((a for a in candidates if issubclass(a, BaseModel)), None)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)
