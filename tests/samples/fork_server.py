"""The one fork server of a process of these tests: whoever starts it first, it has loaded what all of them need."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

LOADED = (
    "torch._dynamo",
    "atoll.cli.app",
    "atoll.client.region",
    "atoll.cluster.describe",
    "atoll.cluster.parallel.open_spread",
    "atoll.server.main",
)


def fork_server() -> ForkServerContext:
    """Starts processes that have imported `LOADED`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as the `atoll` command does before it loads gRPC
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context
