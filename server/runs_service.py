"""The gRPC edge for researchers: submit, list, follow, stop, fetch a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from atoll.server.open_runs import OpenRuns
from atoll.server.security import current_caller
from atoll.wire import runs_pb2 as pb


class RunsService:
    """Servicer of atoll.wire.Runs."""

    def __init__(self, runs: OpenRuns) -> None:
        self._runs = runs

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        """A new run, and the grant for the bytes of version 0. The same request again gives the same run.

        Raises:
            Malformed: job or manifest cannot be used; names the key or tensor.
            TooLarge: the model is over the server's limit, or too many runs are open.
        """
        return await self._runs.submit(current_caller.get(), request)

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        """All runs, newest first."""
        return pb.ListReply(runs=await self._runs.list())

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.RunSnapshot]:
        """The run as it stands, then as it changes, to its end.

        Raises:
            Unknown: no such run.
        """
        async for snapshot in self._runs.watch(request.run):
            yield snapshot

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.StopReply:
        """Ends a run; its committed versions stay.

        Raises:
            Unknown: no such run.
            NotAllowed: it is another researcher's.
            Stale: it is over already.
        """
        await self._runs.stop(current_caller.get(), request.run)
        return pb.StopReply()

    async def Model(self, request: pb.ModelRequest, context: Any) -> pb.ModelReply:
        """A grant to download a committed version.

        Raises:
            Unknown: no such run or version, or no best one.
        """
        version = None if request.newest else request.version
        return await self._runs.model(current_caller.get(), request.run, version, best=request.best)
