"""TOML files that people write: read whole, and remembered by line, so that an error can say where to look."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.wire.errors import ConfigError

NUM_LINES = 10_000  # of a file in which lines are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlFile:
    """What stands in a TOML file, and where."""

    path: Path
    text: str
    table: dict[str, Any]

    def place(self, keys: Sequence[str | int] = ()) -> str:
        """The file and, where the keys stand in it, the line: "job.toml, line 7"."""
        line = self.line_of(keys)
        return f"{self.path}, line {line}" if line else str(self.path)

    def line_of(self, keys: Sequence[str | int]) -> int | None:
        """Line, from 1, on which the value of these keys begins; None where they are not in the file."""
        lines = self.text.splitlines(keepends=True)
        if not keys or len(lines) > NUM_LINES or not _holds(self.table, keys):
            return None

        def before(end: int) -> dict[str, Any] | None:
            """The first `end` lines as a table; None where they break off within a value."""
            try:
                return tomllib.loads("".join(lines[:end]))
            except tomllib.TOMLDecodeError:
                return None

        end, low, high = len(lines), 0, len(lines)  # lines up to `end` have the keys, up to `low` not
        while high - low > 1:
            middle = (low + high) // 2
            tables = ((number, before(number)) for number in range(middle, high))
            number, table = next(((n, found) for n, found in tables if found is not None), (high, None))
            if table is not None and not _holds(table, keys):
                low = number
                continue
            high = middle
            if table is not None:
                end = number
        begin = next(number for number in range(end - 1, -1, -1) if before(number) is not None)
        written = (n for n in range(begin, end) if lines[n].strip() and not lines[n].lstrip().startswith("#"))
        return next(written, begin) + 1


def _holds(table: Any, keys: Sequence[str | int]) -> bool:
    for key in keys:
        if isinstance(table, dict) and key in table:
            table = table[key]
        elif isinstance(table, list) and str(key).isdigit() and int(key) < len(table):
            table = table[int(key)]
        else:
            return False
    return True


def read_toml(path: Path, *, absent: str = "give the path of a file that is there") -> TomlFile:
    """The TOML file at `path`.

    Args:
        absent: what to do where there is no such file.

    Raises:
        ConfigError: the file is missing, unreadable, or not TOML (with line and column).
    """
    try:
        text = path.read_bytes().decode()
        return TomlFile(path=path, text=text, table=tomllib.loads(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {absent}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; it must be a file that you may read") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}; correct it there: text stands in quotes") from None
    except RecursionError:
        raise ConfigError(f"{path}: not TOML: tables within tables without end; write fewer") from None
