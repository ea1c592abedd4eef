"""A reverse proxy that sends each request to the replica with the fewest requests in flight, and streams the answer.

    python benchmarks/engines/least_connections.py --port 9000 --backends 8001 8002

What a plain fleet of replicas has in front of it, as small as it can be, so that it costs the fleet little: bytes of an
answer are handed on as they come, nothing in them is read. A connection carries one request on either side. All on
loopback. ``GET /metrics`` answers with every replica's text, one after the other; any other GET goes like a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence

HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CONNECTION_ERRORS = (OSError, asyncio.IncompleteReadError)


class LeastConnections:
    """Requests in flight of each replica, and who gets the next one."""

    def __init__(self, num_backends: int) -> None:
        self.in_flight = [0] * num_backends
        self.total = [0] * num_backends
        self._next = 0

    def begin(self) -> int:
        """The replica with the fewest; among equals they take turns. It holds one more until ``end``."""
        num = len(self.in_flight)
        chosen = min(range(num), key=lambda i: (self.in_flight[i], (i - self._next) % num))
        self._next = (chosen + 1) % num
        self.in_flight[chosen] += 1
        self.total[chosen] += 1
        return chosen

    def end(self, backend: int) -> None:
        """A request of this replica is over, however it ended."""
        self.in_flight[backend] -= 1


class Proxy:
    """``start`` listens (``port`` 0: any free one, then see ``port``); ``close`` ends what is under way."""

    def __init__(self, backend_ports: Sequence[int], port: int = 0) -> None:
        self.port = port
        self.balance = LeastConnections(len(backend_ports))
        self._backends = list(backend_ports)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError where the port is taken."""
        self._server = await asyncio.start_server(self._accepted, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.suppress(*_CONNECTION_ERRORS):
                await self._serve(reader, writer)
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, request = await _read_request(reader)
        if head.startswith(b"GET /metrics "):
            texts = [await _metrics_of(port) for port in self._backends]
            body = b"".join(texts)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            return
        chosen = self.balance.begin()
        try:
            await self._hand_on(self._backends[chosen], request, reader, writer)
        finally:
            self.balance.end(chosen)

    async def _hand_on(
        self, port: int, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            answer, upstream = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.write(_BAD_GATEWAY)
            await writer.drain()
            return
        # A client that hangs up is only seen by reading from it; the replica then learns of it in the same way.
        gone = asyncio.create_task(_until_closed(reader, upstream))
        try:
            upstream.write(request)
            while data := await answer.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        finally:
            gone.cancel()
            upstream.close()


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, whole request) with the connection marked to end after its answer. Bodies must state their length."""
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"keep-alive:"))]
    head = b"\r\n".join([*kept, b"Connection: close", b"", b""])
    length = next((int(line.split(b":")[1]) for line in kept if line.lower().startswith(b"content-length:")), 0)
    return head, head + await reader.readexactly(length)


async def _until_closed(reader: asyncio.StreamReader, upstream: asyncio.StreamWriter) -> None:
    with contextlib.suppress(*_CONNECTION_ERRORS):
        await reader.read(_CHUNK_BYTES)
    upstream.close()


async def _metrics_of(port: int) -> bytes:
    answer, upstream = await asyncio.open_connection(HOST, port)
    try:
        upstream.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")  # 1.0: neither chunked nor compressed
        return (await answer.read(-1)).partition(b"\r\n\r\n")[2]
    finally:
        upstream.close()


async def _main(port: int, backends: Sequence[int]) -> None:
    proxy = Proxy(backends, port)
    await proxy.start()
    print(f"listening on {HOST}:{proxy.port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--backends", type=int, nargs="+", required=True, metavar="PORT")
    arguments = parser.parse_args()
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_main(arguments.port, arguments.backends))


if __name__ == "__main__":
    main()
