"""Following a run from the command line, to its end or to Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from atoll.cli.live import View, open_view
from atoll.cli.output import note
from atoll.client.researcher import ENDED, watch
from atoll.transport.callbacks import Callbacks, json_lines
from atoll.transport.news import SnapshotReader
from atoll.wire.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.client.people import Person
    from atoll.wire import runs_pb2


def follow(person: Person, run: str, *, events: Path | None = None) -> runs_pb2.RunSnapshot:
    """Shows the run until it ends, and returns its last state; appends what happens to the file `events`.

    Raises:
        ConfigError: `events` cannot be written, or a callback of user.toml cannot be made.
        RemoteError: as `atoll.client.researcher.watch`.
        KeyboardInterrupt: on Ctrl-C, after a line that says how to follow or stop the run, which goes on.
    """
    named = person.settings.callbacks
    callbacks = Callbacks({**named, **json_lines(events)} if events is not None else named)
    view = open_view()
    try:
        return asyncio.run(_show(person, run, view, callbacks))
    except KeyboardInterrupt:
        view.close()
        note(f"run {run} goes on; follow it: atoll status {run} --watch; stop it: atoll stop {run}")
        raise
    finally:
        view.close()
        callbacks.close()
        sys.stderr.flush()


async def _show(person: Person, run: str, view: View, callbacks: Callbacks) -> runs_pb2.RunSnapshot:
    reader = SnapshotReader()
    async with aclosing(watch(person, run, notice=view.say)) as snapshots:
        async for snapshot in snapshots:
            view.show(snapshot)
            for news in reader.read(snapshot):
                callbacks.tell(news)
            if snapshot.status in ENDED:
                return snapshot
    raise Unavailable(f"the view of run {run} ended before the run did; look again: atoll status {run}", run=run)
