"""Every option of every kind of every part, made wrong in each way that its schema knows: one error, that helps.

Made from the catalogue, so a new kind or option is covered by being listed. What each error has: the key as the job
names it, the value as it was given, and what is wanted in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from atoll.aggregation import parts
from atoll.wire.errors import ConfigError

# Options that are parts themselves and have to be given, and names that have to differ.
NESTED: Mapping[str, Any] = {"inner": {"kind": "median"}, "groups": ["a", "b"]}
Fault = tuple[str, str, str, Any, tuple[str, ...]]  # part, kind, option, bad value, words of the error


def kinds() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Part, kind, and the schema of its options."""
    for part, table in parts.BUILT_IN.items():
        for kind, made_by in table.items():
            yield part, kind, parts.options_of(made_by, part).model_json_schema()


def choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What may stand for an option, but for null."""
    return [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]


def usable(name: str, schema: Mapping[str, Any]) -> Any:
    """A value that an option takes."""
    if name in NESTED:
        return NESTED[name]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") in ("integer", "number"):
        return schema.get("minimum", 1 if schema["type"] == "integer" else schema.get("maximum", 1.0) / 2)
    if schema.get("type") == "array":
        return [usable("", schema["items"])] * max(1, schema.get("minItems", 1))
    return "a" * max(1, schema.get("minLength", 1))


def required(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The options without which a kind cannot be made."""
    return {name: usable(name, choices(schema["properties"][name])[0]) for name in schema.get("required", ())}


def faults() -> Iterator[Fault]:
    for part, kind, schema in kinds():
        for name, option in schema.get("properties", {}).items():
            [choice, *others] = choices(option)
            for value, words in () if others else wrong(choice):
                yield part, kind, name, value, words


def wrong(choice: Mapping[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Values that an option of this schema does not take, and what the error has to say."""
    if choice.get("type") in ("integer", "number"):
        for name, step, words in (
            ("minimum", -1, "at least"),
            ("exclusiveMinimum", 0, "more than"),
            ("maximum", 1, "at most"),
            ("exclusiveMaximum", 0, "less than"),
        ):
            if name in choice:
                beyond = choice[name] * 2 if step > 0 and choice[name] + step == choice[name] else choice[name] + step
                yield beyond, (words, f"{choice[name]:g}" if choice[name] < 1e6 else "")
        yield "x", ("wanted a ",)  # number, or duration
        yield [1], ("wanted a ",)
        for value in (float("nan"), float("inf"), -float("inf")):
            yield value, ()
        if choice["type"] == "integer":
            yield 1.5, ("whole number",)
    elif choice.get("type") == "boolean":
        yield "x", ("true or false",)
        yield 7, ("true or false",)
    elif choice.get("type") == "array":
        yield "x", ("list",)
        yield 3, ("list",)
    elif "enum" in choice:
        yield "x", tuple(map(str, choice["enum"]))
    elif choice.get("type") == "string":
        yield 3, ("text",)
        if choice.get("minLength"):
            yield "", ("characters",)
        if "maxLength" in choice:
            yield "a" * (choice["maxLength"] + 1), ("characters",)
    else:  # a table
        yield "x", ("table",)
        yield 3, ("table",)


FAULTS = list(faults())
KINDS = list(kinds())


def refused(part: str, kind: str, options: Mapping[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parts.build(part, kind, options)
    return caught.value


@pytest.mark.parametrize(("part", "kind", "name", "value", "words"), FAULTS, ids=lambda value: str(value)[:24])
def test_a_bad_value_is_one_error_with_key_value_and_bound(
    part: str, kind: str, name: str, value: Any, words: tuple[str, ...]
) -> None:
    schema = next(schema for one, other, schema in KINDS if (one, other) == (part, kind))
    error = refused(part, kind, {**required(schema), name: value})
    key = f"strategy.{part}.{name}"
    assert error.key == key or error.key.startswith(f"{key}.")
    assert error.value
    assert error.bound
    text = str(error)
    assert key in text
    assert str(value)[:60] in text
    assert all(word in text for word in words), text
    assert "more)" not in text  # one fault, one error


@pytest.mark.parametrize(("part", "kind", "schema"), KINDS, ids=[f"{part}-{kind}" for part, kind, _ in KINDS])
def test_an_unknown_option_has_its_nearest_named(part: str, kind: str, schema: dict[str, Any]) -> None:
    for name in schema.get("properties", {}):
        misspelt = f"{name}s"
        error = refused(part, kind, {**required(schema), misspelt: 1})
        assert error.key == f"strategy.{part}.{misspelt}"
        assert f"did you mean {name!r}?" in str(error)
        assert name in error.bound
    error = refused(part, kind, {**required(schema), "zzz": 1})
    assert (error.key, error.value) == (f"strategy.{part}.zzz", "1")
    assert error.bound


@pytest.mark.parametrize(("part", "kind", "schema"), KINDS, ids=[f"{part}-{kind}" for part, kind, _ in KINDS])
def test_what_has_to_be_given_is_named_where_it_is_not(part: str, kind: str, schema: dict[str, Any]) -> None:
    parts.build(part, kind, required(schema))  # nothing else has
    for name in schema.get("required", ()):
        options = {other: value for other, value in required(schema).items() if other != name}
        error = refused(part, kind, options)
        assert error.key == f"strategy.{part}.{name}"
        assert "is missing" in str(error)


@pytest.mark.parametrize("part", parts.BUILT_IN)
def test_an_unknown_kind_has_its_nearest_named(part: str) -> None:
    for kind in parts.BUILT_IN[part]:
        error = refused(part, f"{kind}x", {})
        assert (error.key, error.value) == (f"strategy.{part}.kind", f"{kind}x")
        assert "did you mean" in str(error)
