"""The limit: what grpcio itself moves as raw bytes with so many clients, and the same TLS and malloc as Atoll's.

`python benchmarks/bare_stream.py` is both ends: the server in the process that calls `measure`, clients as processes.
Up: each client streams its bytes, the server adds every frame to a float32 vector. Down: the server streams one buffer.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from atoll.transport.mallopt import tune_malloc

FRAME_BYTES = 1 << 20
_OPTIONS = [("grpc.max_receive_message_length", 8 << 20)]
_UP, _DOWN = "/bare/Up", "/bare/Down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of a throwaway authority; None where the stream is plain."""

    ca: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes a second over all clients together."""

    up: float
    down: float


def measure(num_clients: int, num_bytes: int, tls: Tls | None, *, repeats: int = 3) -> Rates:
    """Median rates of `num_clients` clients that each move `num_bytes`."""
    context = multiprocessing.get_context("spawn")
    with futures.ThreadPoolExecutor(num_clients + 2) as pool:
        server, port = _serve(pool, num_bytes, tls)
        try:
            rates = {
                method: sorted(_once(context, method, port, num_clients, num_bytes, tls) for _ in range(repeats))
                for method in (_UP, _DOWN)
            }
        finally:
            server.stop(0)
    return Rates(up=rates[_UP][repeats // 2], down=rates[_DOWN][repeats // 2])


def _once(context: Any, method: str, port: int, num_clients: int, num_bytes: int, tls: Tls | None) -> float:
    barrier = context.Barrier(num_clients + 1)
    clients = [
        context.Process(target=_client, args=(method, port, num_bytes, tls, barrier)) for _ in range(num_clients)
    ]
    for client in clients:
        client.start()
    barrier.wait()
    began_s = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - began_s
    for client in clients:
        client.join()
    return num_clients * num_bytes / seconds


def _serve(pool: futures.Executor, num_bytes: int, tls: Tls | None) -> tuple[grpc.Server, int]:
    tune_malloc()
    frame = bytes(FRAME_BYTES)

    def up(frames: Iterator[bytes], context: Any) -> bytes:
        total = np.zeros(FRAME_BYTES // 4, dtype=np.float32)
        for one in frames:
            values = np.frombuffer(one, dtype=np.float32)
            total[: len(values)] += values
        return b""

    def down(request: bytes, context: Any) -> Iterator[bytes]:
        for start in range(0, num_bytes, FRAME_BYTES):
            yield frame[: min(FRAME_BYTES, num_bytes - start)]

    handler = grpc.method_handlers_generic_handler(
        "bare",
        {"Up": grpc.stream_unary_rpc_method_handler(up), "Down": grpc.unary_stream_rpc_method_handler(down)},
    )
    server = grpc.server(pool, handlers=[handler], options=_OPTIONS)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.ca, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, port


def _client(method: str, port: int, num_bytes: int, tls: Tls | None, barrier: Any) -> None:
    tune_malloc()
    address = f"127.0.0.1:{port}"
    if tls is None:
        channel = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", "server.atoll")]
        channel = grpc.secure_channel(address, credentials, options=options)
    grpc.channel_ready_future(channel).result(60)
    data = memoryview(bytes(num_bytes))
    barrier.wait()
    if method == _UP:
        pieces = (bytes(data[start : start + FRAME_BYTES]) for start in range(0, num_bytes, FRAME_BYTES))
        channel.stream_unary(method)(pieces)
    else:
        for _ in channel.unary_stream(method)(b""):
            pass
    barrier.wait()


if __name__ == "__main__":
    clients, megabytes = int(sys.argv[1]), float(sys.argv[2])
    found = measure(clients, int(megabytes * 1e6), None)
    print(
        f"{clients} clients x {megabytes:g} MB, plain: up {found.up / 1e9:.2f} GB/s, down {found.down / 1e9:.2f} GB/s"
    )
