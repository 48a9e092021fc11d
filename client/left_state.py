"""What a run has left at this site, kept when it ends, for a run that goes on from it.

Optimizer state, tensors that stay here, state of local rules: what `SiteState` writes. That of the newest few ended
runs is kept, in `state/ended/RUN`; a run that continues one of them begins with a copy. A site that has none, such as
one that takes part for the first time, begins afresh.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from atoll.client.home import SiteHome
from atoll.transport.durable import disk_errors, private_folder, remove_tree

KEPT_RUNS = 3  # each holds at most the two states that a run keeps
TRIES = 3  # the old run may be ending while its state is copied


def app_folder(home: SiteHome, run: str) -> Path:
    """Where the worker of a run keeps its state."""
    return home.run_state(run) / "app"


def set_aside(home: SiteHome, run: str) -> None:
    """Keeps the state of a run that has ended, drops that of older ones, and removes all else of the run. Blocks.

    Raises:
        LocalError: the operating system refuses.
    """
    folder, ended = app_folder(home, run), _ended(home)
    with disk_errors(folder):
        if folder.exists() and any(folder.iterdir()):
            private_folder(ended)
            remove_tree(ended / run)
            os.replace(folder, ended / run)
            os.utime(ended / run)
            newest = sorted(ended.iterdir(), key=lambda kept: kept.stat().st_mtime, reverse=True)
            for old in newest[KEPT_RUNS:]:
                remove_tree(old)
    remove_tree(home.run_state(run))


def take_up(home: SiteHome, run: str, continues: str) -> bool:
    """Copies what the run `continues` has left here to where the worker of `run` looks. Blocks.

    Returns:
        Whether there is state of it; once the run has some of its own, that counts.

    Raises:
        DiskFull, LocalError: it cannot be copied.
    """
    folder = app_folder(home, run)
    if folder.exists():
        return any(folder.iterdir())
    draft = folder.with_suffix(".draft")
    with disk_errors(folder):
        for _ in range(TRIES):
            source = next(
                (path for path in (_ended(home) / continues, app_folder(home, continues)) if path.exists()), None
            )
            if source is None:
                return False
            remove_tree(draft)
            try:
                shutil.copytree(source, draft, ignore=shutil.ignore_patterns("*.draft"))
            except (FileNotFoundError, shutil.Error):
                continue  # it was set aside meanwhile
            os.replace(draft, folder)
            return True
    return False


def _ended(home: SiteHome) -> Path:
    return home.state / "ended"
