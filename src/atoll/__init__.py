"""Atoll: one model over many islands. The public names load on first use, so that `import atoll` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.cluster.app import App as App
    from atoll.cluster.opaque_app import OpaqueApp as OpaqueApp
    from atoll.cluster.script.joined import join as join
    from atoll.cluster.script.part import RunEnded as RunEnded
    from atoll.cluster.script.part import save_model as save_model
    from atoll.cluster.script.rounds import connect as connect
    from atoll.simulations.simulate import simulate as simulate

__version__ = "0.1.0"
__all__ = ["App", "OpaqueApp", "RunEnded", "__version__", "connect", "join", "save_model", "simulate"]

_LAZY = {
    "App": "atoll.cluster.app",
    "OpaqueApp": "atoll.cluster.opaque_app",
    "RunEnded": "atoll.cluster.script.part",
    "connect": "atoll.cluster.script.rounds",
    "join": "atoll.cluster.script.joined",
    "save_model": "atoll.cluster.script.part",
    "simulate": "atoll.simulations.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
