"""One site's transfer, up with check and fold and down to a file, beside a bare grpcio stream of the same bytes.

    python benchmarks/transfer.py --megabytes 400 --repeats 5 [--tls] --json

Server and site are processes on loopback, with Atoll's own ends of both methods: frames, checksums, the staging slot,
validation and the exact sum on the way up; the page cache and a file on the way down. Plain unless --tls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from bare_stream import Tls, measure
from echo import Parts
from many_sites import update_of
from rounds import throwaway_tls

from atoll.aggregation.layout import update_layout
from atoll.aggregation.reducers.reduction import RoundTerms
from atoll.aggregation.strategy import resolve
from atoll.transport.grpc_carrier import GrpcCarrier, frames, receive, transfer_handlers
from atoll.transport.mallopt import tune_malloc
from atoll.transport.staging import StagingSlot
from atoll.transport.transfer import download, upload
from atoll.wire.checksum import crc32_of
from atoll.wire.control_pb2 import Grant, TaskKey
from atoll.wire.job import parse_job
from atoll.wire.tensors import manifest_of

OPTIONS = [("grpc.max_receive_message_length", 8 << 20)]
ROUNDS = 1 << 20  # updates that one sum has room for: far more than are folded


def main() -> None:
    options = _parse()
    num_bytes = int(options.megabytes * 1e6)
    tls = throwaway_tls() if options.tls else None
    with tempfile.TemporaryDirectory(prefix="atoll-transfer-") as folder:
        seconds = _measure(Path(folder), num_bytes, tls, options.repeats)
    bare = measure(1, num_bytes, tls, repeats=options.repeats)
    record: dict[str, Any] = {"megabytes": options.megabytes, "tls": options.tls}
    for way, limit in (("up", bare.up), ("down", bare.down)):
        rate = num_bytes / statistics.median(seconds[way])
        record |= {
            f"{way}_gb_per_s": round(rate / 1e9, 2),
            f"bare_{way}_gb_per_s": round(limit / 1e9, 2),
            f"{way}_share_of_bare": round(rate / limit, 3),
        }
    print(json.dumps(record) if options.json else "\n".join(f"{key:20} {value}" for key, value in record.items()))


def _measure(root: Path, num_bytes: int, tls: Tls | None, repeats: int) -> dict[str, list[float]]:
    """Seconds of each transfer, by direction; the first of each is left out."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, root, num_bytes, tls))
    server.start()
    try:
        return asyncio.run(_site(ours.recv(), root, num_bytes, tls, repeats))
    finally:
        ours.send("stop")
        server.join()


async def _site(port: int, root: Path, num_bytes: int, tls: Tls | None, repeats: int) -> dict[str, list[float]]:
    tune_malloc()
    path, update = root / "update", update_of(num_bytes)
    path.write_bytes(update)
    channel = _channel(port, tls)
    seconds: dict[str, list[float]] = {"up": [], "down": []}
    for number in range(repeats + 1):
        key = TaskKey(run="run", task=f"t{number}", attempt=1)
        grant = Grant(grant=f"g{number}", key=key, num_bytes=len(update), crc32=crc32_of(update))
        began_s = time.perf_counter()
        status = await upload(GrpcCarrier(channel), grant, path)
        assert status.complete
        seconds["up"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        await download(GrpcCarrier(channel), grant, root / f"down-{number % 2}")
        seconds["down"].append(time.perf_counter() - began_s)
    await channel.close()
    return {way: taken[1:] for way, taken in seconds.items()}


def _channel(port: int, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "server.atoll")]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


def _serve(pipe: Connection, root: Path, num_bytes: int, tls: Tls | None) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    asyncio.run(_server(pipe, root, num_bytes, tls))


async def _server(pipe: Connection, root: Path, num_bytes: int, tls: Tls | None) -> None:
    strategy = resolve(parse_job({"job": {"name": "transfer", "app": "echo", "rounds": 1}}))
    layout = update_layout(manifest_of(Parts(num_bytes)), strategy.codec, strategy.buffers)
    total = strategy.reducer.init(layout, RoundTerms(num_sites=ROUNDS, max_weight=1, bound=strategy.bound))
    slot = StagingSlot(root / "slot")

    async def take(requests: AsyncIterator[bytes], context: Any) -> Any:
        slot.begin(layout.num_bytes)
        status = await receive(requests, slot)
        await asyncio.to_thread(total.check, slot.view, 1)
        await asyncio.to_thread(total.fold, f"site-{total.num_updates}", slot.view, 1)
        return status

    async def give(request: Any, context: Any) -> AsyncIterator[bytes]:
        async for frame in frames(root / "update", 0, layout.num_bytes, request.offset):
            yield frame

    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((transfer_handlers(take, give),))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    pipe.send(port)
    await asyncio.to_thread(pipe.recv)
    await server.stop(None)
    slot.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=float, default=400.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tls", action="store_true", help="mutual TLS on both streams")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
