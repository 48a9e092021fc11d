"""The live view of a run: on a terminal it is redrawn in place, elsewhere it is a line for each thing that happened.

It goes to stderr, so that stdout stays free for data.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from atoll.cli.output import note, printable
from atoll.cli.run_view import ENDED, best_line, origin_line, render, round_line, status_line

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.wire import runs_pb2

REDRAWS_PER_S = 8


class View(Protocol):
    """Somebody who looks at a run."""

    def show(self, snapshot: runs_pb2.RunSnapshot) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_view() -> View:
    """A view that fits stderr: drawn in place on a terminal that can, lines elsewhere."""
    can_redraw = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return Screen() if can_redraw else Lines(note)


class Lines:
    """A view of lines: one when the status changes, one for a site that takes no part, one a round."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._status = ""
        self._said = ""
        self._shown = 0  # newest round that was written
        self._declined: set[str] = set()  # sites of which it was written

    def show(self, snapshot: runs_pb2.RunSnapshot) -> None:
        """Writes what is new since the last snapshot."""
        self._said = ""  # there is a connection again: what was said of the last one may come anew
        ended = snapshot.status in ENDED
        if snapshot.status != self._status and not ended:
            self._write(status_line(snapshot))
        if not self._status and (origin := origin_line(snapshot)):
            self._write(origin)
        for site in snapshot.sites:
            if site.state == "declined" and site.site not in self._declined:
                self._declined.add(site.site)
                self._write(f"{site.site} takes no part: {' '.join(site.detail.split())}")
        for record in snapshot.rounds:
            # Evaluations of a version come in while the next round trains: a line that waits for them says it all.
            if record.round > self._shown and (ended or record.round + 2 <= snapshot.round):
                self._shown = record.round
                self._write(round_line(record, snapshot.num_rounds))
        if snapshot.status != self._status and ended:
            if best := best_line(snapshot):
                self._write(best)
            self._write(status_line(snapshot))
        self._status = snapshot.status

    def say(self, text: str) -> None:
        """Writes a line about the connection, once each time that it is lost."""
        if text != self._said:
            self._said = text
            self._write(text)

    def close(self) -> None:
        """Nothing is to be put back in order."""


class Screen:
    """A view that rich redraws in place."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=console or Console(stderr=True), refresh_per_second=REDRAWS_PER_S)
        self._live.start()

    def show(self, snapshot: runs_pb2.RunSnapshot) -> None:
        """Draws the present state."""
        self._live.update(render(snapshot, self._live.console.width))

    def say(self, text: str) -> None:
        """Prints a line above the view."""
        from rich.text import Text

        self._live.console.print(Text(printable(text), style="dim"))

    def close(self) -> None:
        """Leaves the last state on the screen and the cursor below it."""
        self._live.stop()
