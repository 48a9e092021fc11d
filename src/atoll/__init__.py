"""Atoll: one model over many islands. The public names load on first use, so that `import atoll` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.cluster.app import App as App
    from atoll.cluster.opaque_app import OpaqueApp as OpaqueApp
    from atoll.simulations.simulate import simulate as simulate

__version__ = "0.1.0"
__all__ = ["App", "OpaqueApp", "__version__", "simulate"]

_LAZY = {
    "App": "atoll.cluster.app",
    "OpaqueApp": "atoll.cluster.opaque_app",
    "simulate": "atoll.simulations.simulate",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
