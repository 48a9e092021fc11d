"""Where a key stands in a TOML file, whatever form it is written in."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.errors import ConfigError
from atoll.wire.toml_file import NUM_LINES, TomlFile, read_toml

TEXT = '''\
# what a person wrote
top = 1

[job]
name = "x"   # rounds = 3

# how long
rounds = 3
sites = [
  "a",
  # and
  "b",
]
[app]
text = """
[job]
rounds = 9
"""
after = 5
[[apps]]
name = "one"
[[apps]]
name = "two"
[strategy]
work = { epochs = 1, steps = 3 }
codec.kind = "int8"
"quoted key" = true
'''


def file_of(text: str) -> TomlFile:
    return TomlFile(path=Path("job.toml"), text=text, table=tomllib.loads(text))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (["top"], 2),
        (["job"], 4),
        (["job", "name"], 5),
        (["job", "rounds"], 8),
        (["job", "sites"], 9),
        (["job", "sites", 1], 9),
        (["app", "text"], 15),
        (["app", "after"], 19),
        (["apps"], 20),
        (["apps", 1], 22),
        (["apps", 1, "name"], 23),
        (["strategy", "work", "steps"], 25),
        (["strategy", "codec", "kind"], 26),
        (["strategy", "quoted key"], 27),
        (["job", "nothing"], None),
        (["apps", 2], None),
        ([], None),
    ],
    ids=str,
)
def test_the_line_of_a_key(keys: list[str | int], line: int | None) -> None:
    file = file_of(TEXT)
    assert file.line_of(keys) == line
    assert file.place(keys) == ("job.toml" if line is None else f"job.toml, line {line}")


@given(
    st.lists(st.sampled_from(["", "# note", 'x = """\na\nb"""', "x = [\n1,\n2]", "x = 1", "x = {a = 1}"]), max_size=30)
)
def test_each_of_many_keys_is_found(values: list[str]) -> None:
    lines = [value.replace("x =", f"x{number} =") for number, value in enumerate(values)]
    file = file_of("\n".join(lines))
    for number, text in enumerate(lines):
        if "=" in text:
            assert file.line_of([f"x{number}"]) == "\n".join(lines[:number]).count("\n") + (number > 0) + 1


def test_a_file_of_very_many_lines_is_not_searched() -> None:
    assert file_of("a = 1\n" + "# more\n" * NUM_LINES).line_of(["a"]) is None


def test_what_is_no_toml_says_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[job]\nname = fashion\n")
    with pytest.raises(ConfigError, match=r"job\.toml: not TOML: .*line 2.*; correct it there: text stands in quotes"):
        read_toml(tmp_path / "job.toml")
    with pytest.raises(ConfigError, match="no such file; look elsewhere"):
        read_toml(tmp_path / "none.toml", absent="look elsewhere")
