"""The port on which a site is called by neighbours that were introduced to it (neighbours.py): off unless site.toml says.

Invariant: before a byte of a call is looked at, its caller is the site that a meeting of this moment names. What a
caller can cost is bounded: frames of one call each way, a model's length on the disk, a few times that length sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from atoll.client.meeting import Meeting, Meetings
from atoll.client.refusal import as_refusal
from atoll.transport.grpc_carrier import GRANT_METADATA_KEY, frames, receive, transfer_handlers
from atoll.transport.identity import Identity
from atoll.transport.member_certificate import certificate_of
from atoll.transport.part_file import PartFile
from atoll.transport.peers import ListenerKeys, meet_handler, peer_port_credentials, peer_port_options
from atoll.transport.pieces import Pieces
from atoll.transport.transfer import Withdrawal, partial_bytes
from atoll.wire.errors import METADATA_KEY, AtollError, PortInUse, Stale, TooLarge, to_detail
from atoll.wire.gossip_pb2 import MeetReply, MeetRequest
from atoll.wire.transfer_pb2 import DownloadRequest, TransferStatus

_log = logging.getLogger(__name__)

MOST_TAKEN = 4  # times that a neighbour may take a model in one meeting; resuming, it takes each byte once
END_S = 1.0  # for calls to end when the agent stops; they are made again


class PeerPort:
    """Listens from `start` to `stop`."""

    def __init__(self, meetings: Meetings, site: str) -> None:
        self._meetings, self._site = meetings, site
        self._server: grpc.aio.Server | None = None

    async def start(self, identity: Identity, keys: ListenerKeys, address: str) -> None:
        """Take the port at `address` ("host:port").

        Raises:
            PortInUse: it cannot be had.
        """
        self._server = grpc.aio.server(options=peer_port_options())
        self._server.add_generic_rpc_handlers(
            (meet_handler(self._meet), transfer_handlers(self._upload, self._download))
        )
        try:
            port = self._server.add_secure_port(address, peer_port_credentials(identity, keys))
        except RuntimeError:
            port = 0
        if not port:
            raise PortInUse(
                f"gossip.listen = {address}: cannot listen there; end what does, or choose another port in site.toml"
            )
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(END_S)

    # --- methods ----------------------------------------------------------------------------------------------------

    async def _meet(self, request: MeetRequest, context: Any) -> MeetReply:
        async with self._told(context):
            meeting = self._found(request.meeting, context)
            if await asyncio.to_thread(meeting.path.exists):
                return MeetReply(received_bytes=meeting.introduction.num_bytes, complete=True)
            held = min(partial_bytes(meeting.path), meeting.introduction.num_bytes)
            return MeetReply(received_bytes=held)
        raise AssertionError("the call was aborted")

    async def _download(self, request: DownloadRequest, context: Any) -> AsyncIterator[bytes]:
        """This site's model, to the neighbour."""
        async with self._told(context):
            meeting = self._found(request.grant, context)
            said = meeting.introduction
            pieces = Pieces(meeting.own_path, 0, said.num_bytes, request.offset)
            async with aclosing(frames(pieces)) as data:
                async for frame in data:
                    meeting.given_bytes += len(frame)
                    if meeting.given_bytes > MOST_TAKEN * said.num_bytes + len(frame):
                        raise TooLarge(
                            f"{said.peer} has taken the model of {self._site} {MOST_TAKEN} times in round {said.round}",
                            site=said.peer,
                            run=said.run,
                            round=said.round,
                            bound=MOST_TAKEN,
                        )
                    yield frame

    async def _upload(self, requests: AsyncIterator[bytes], context: Any) -> TransferStatus:
        """The neighbour's model, to this site; a later call ends an earlier one."""
        async with self._told(context):
            meeting = self._found(str(dict(context.invocation_metadata()).get(GRANT_METADATA_KEY, "")), context)
            if meeting.incoming is not None:
                meeting.incoming.withdraw(Stale("a later call brings this model", site=self._site))
            async with Withdrawal() as meeting.incoming, meeting.filling:
                return await self._taken(meeting, requests)
        raise AssertionError("the call was aborted")

    async def _taken(self, meeting: Meeting, requests: AsyncIterator[bytes]) -> TransferStatus:
        said = meeting.introduction
        if await asyncio.to_thread(meeting.path.exists):
            return TransferStatus(received_bytes=said.num_bytes, complete=True)
        part = await asyncio.to_thread(PartFile, meeting.path, said.num_bytes, said.crc32, meeting.what)
        try:
            status = await receive(requests, part)
            if status.complete:
                await asyncio.to_thread(part.finish)
                self._meetings.received(meeting)
        finally:
            part.close()
        return status

    def _found(self, token: str, context: Any) -> Meeting:
        return self._meetings.find(token, certificate_of(context))

    @asynccontextmanager
    async def _told(self, context: Any) -> AsyncIterator[None]:
        """A block whose error the caller hears as ours."""
        try:
            yield
        except AtollError as error:
            refusal = as_refusal(error, site=self._site, run="")
            _log.warning("a neighbour's call from %s is refused: %s", context.peer(), error)
            detail = (METADATA_KEY, to_detail(refusal).SerializeToString())
            await context.abort(grpc.StatusCode[refusal.status], refusal.message[:500], trailing_metadata=(detail,))
