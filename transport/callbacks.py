"""Callbacks: code of the machine's own administrator that hears what happens to runs, and can do them no harm.

A callback is a class with a nested `Options` (a pydantic model) and a method `on(news)`, built in or named by an
installed distribution in the entry-point group `atoll.callbacks`. Settings name it; nothing that comes over the wire
does. Each has a thread and a bounded queue of its own: one that raises is logged by name, and one that hangs misses
what comes meanwhile. No run waits for any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel, ValidationError

from atoll.aggregation import plugins
from atoll.transport.news import RunNews
from atoll.transport.tensorboard import TensorBoard
from atoll.wire.errors import ConfigError
from atoll.wire.explain import explain
from atoll.wire.job import Part, Strict

log = logging.getLogger(__name__)

QUEUE_LENGTH = 1000  # news that a slow callback may be behind
PATIENCE_S = 10.0  # a call that takes longer is named in the log
CLOSE_S = 5.0  # for all of them together to finish what is queued, when the process ends


class Callback(Protocol):
    """What hears the news of all runs, in order, from one thread."""

    def on(self, news: RunNews) -> None: ...


class JsonLines:
    """Appends each piece of news to a file, as a JSON object on a line of its own."""

    class Options(Strict):
        path: Path

    def __init__(self, options: Options) -> None:
        self._path = options.path
        with self._path.open("a"):  # a path that cannot be written is told at the start
            pass

    def on(self, news: RunNews) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"event": type(news).__name__, "at": at, **dataclasses.asdict(news)})
        with self._path.open("a") as file:
            file.write(line + "\n")


BUILT_IN: Final[Mapping[str, type]] = {"json_lines": JsonLines, "tensorboard": TensorBoard}


class Callbacks:
    """Those that a machine's settings name, in a table of name and part.

    Raises:
        ConfigError: a kind is not installed here, or its options are out of bounds.
    """

    def __init__(self, tables: Mapping[str, Part]) -> None:
        made = {name: _build(name, part) for name, part in tables.items()}
        self._lines = [_Line(name, callback) for name, callback in made.items()]

    def tell(self, news: RunNews) -> None:
        """Hands the news to every callback; returns at once."""
        for line in self._lines:
            line.tell(news)

    def close(self) -> None:
        """Lets them finish what is queued, for a bounded time."""
        deadline_s = time.monotonic() + CLOSE_S
        for line in self._lines:
            line.close(deadline_s)


class _Line:
    """One callback with its thread."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback
        self._queue: queue.Queue[RunNews | None] = queue.Queue(QUEUE_LENGTH)
        self._busy_since_s: float | None = None
        self._said = False
        # A daemon: one that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"callback {name}", daemon=True)
        self._thread.start()

    def tell(self, news: RunNews) -> None:
        since_s = self._busy_since_s
        if since_s is not None and time.monotonic() - since_s > PATIENCE_S:
            self._complain(f"has not returned for {PATIENCE_S:g} s; what comes meanwhile is passed over")
            return
        try:
            self._queue.put_nowait(news)
        except queue.Full:
            self._complain(f"is {QUEUE_LENGTH} events behind; what comes meanwhile is passed over")

    def close(self, deadline_s: float) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.error("callback %s: left behind, it did not end in time", self._name)

    def _complain(self, text: str) -> None:
        if not self._said:
            self._said = True
            log.error("callback %s %s", self._name, text)

    def _work(self) -> None:
        while (news := self._queue.get()) is not None:
            self._busy_since_s = time.monotonic()
            try:
                self._callback.on(news)
            except Exception:
                log.exception("callback %s raised on %s", self._name, type(news).__name__)
            self._busy_since_s, self._said = None, False


def _build(name: str, part: Part) -> Callback:
    key = f"callbacks.{name}"
    made_by: Any = BUILT_IN.get(part.kind)
    if made_by is None:
        plugin = plugins.find("callback", part.kind, f"{key}.kind")
        if plugin is None:
            known = ", ".join(sorted({*BUILT_IN, *(point.name for point in plugins.installed("callback"))}))
            raise ConfigError(
                f"{key}.kind = {part.kind!r}: no installed distribution brings it; known here: {known}",
                key=f"{key}.kind",
                value=part.kind,
                bound=known,
            )
        made_by = plugin.value
    options = getattr(made_by, "Options", None)
    if not isinstance(made_by, type) or not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise ConfigError(
            f"{key}.kind = {part.kind!r}: wanted a class with Options (a pydantic model); tell its author",
            key=f"{key}.kind",
            value=part.kind,
        )
    try:
        callback: Callback = made_by(options.model_validate(part.options))
    except ValidationError as error:
        raise explain(error, options, "settings", below=["callbacks", name]) from None
    except Exception as error:  # noqa: BLE001  somebody else's code may raise anything
        raise ConfigError(f"{key}: {part.kind} cannot be made: {error}", key=key, value=part.kind) from None
    return callback


def json_lines(path: Path) -> Mapping[str, Part]:
    """The table of one callback that writes to `path`."""
    return {"--events": Part.model_validate({"kind": "json_lines", "path": str(path)})}
