"""`atoll strategies`: what a job can compose."""

from __future__ import annotations

from atoll.cli import options


def strategies(as_json: options.AsJson = False) -> None:
    """List what a job can compose.

    Strategies and the parts they are made of, built in and from installed plugins.

    \b
    Example:
      atoll strategies
    """
    raise NotImplementedError
