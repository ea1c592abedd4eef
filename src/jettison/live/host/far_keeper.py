"""The keeper of a host that the controller is not on, as a process of its own: it takes orders over TLS, and its
workers live only as long as its lease (``wire.lease``).

    python -P -m jettison.live.host.far_keeper [--detach]

Two lines of JSON come on standard input, a ``KeeperPost`` and a ``Place``; between them the signing request goes out,
in hex. Standard output then stays open for as long as the process lives, and says no more. ``--detach``: be no child of
the process that starts it, which may be ended by what watches it (Ray ends its actors when its head is gone).

It ends, and its workers with it, when the lease is over or the connection to the controller is. A worker also looks at
the lease itself: a keeper may be stopped where its worker is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from jettison.errors import LinkDownError
from jettison.live.host.keeper import WORKER_COMMAND, Child, Keeper
from jettison.live.machine.identity import process_table
from jettison.live.machine.netns import Placement
from jettison.live.machine.process_name import KEEPER, name_process
from jettison.live.machine.run_folder import RunFolder
from jettison.live.wire import host_orders as h
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.codec import CodecError
from jettison.live.wire.lease import LeaseTimes, Tenant, boot_clock_s
from jettison.transport.authority import Applicant
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Handshake, HandshakeError, Purpose
from jettison.transport.sockets import parse_address, tend
from jettison.transport.tls import Papers, check_shown, dialling_context, name_shown

log = logging.getLogger(__name__)

_CARD_VARIABLE = "CUDA_VISIBLE_DEVICES"


class FarKeeper:
    """Orders in, events and beats out. All on one asyncio loop, which nothing here keeps for long."""

    def __init__(self, post: h.KeeperPost, place: h.Place) -> None:
        self._post = post
        self._place = place
        self._times = LeaseTimes.of(post.lease_s)
        self._tenant: Tenant | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: Keeper | None = None
        self._children: dict[int, Child] = {}
        """Those that have not ended, by order."""
        self._beating: set[int] = set()
        """Those whose worker is loaded, as the controller has said: only then silence counts."""

    async def serve(self, papers: Papers) -> str:
        """Until the lease or the connection is over; returns why. No worker is left. Raises OSError, LinkDownError,
        UserError."""
        reader, self._writer = await self._connect(dialling_context(papers))
        command = self._post.worker_command or WORKER_COMMAND
        with RunFolder() as folder:
            self._keeper = Keeper(folder.path, command)
            self._tenant = Tenant(self._times, boot_clock_s())
            self._tell(h.Joined(self._place.host, process_table(), self._place.ip))
            ends = [asyncio.create_task(coroutine) for coroutine in (self._obey(reader), self._beat(self._tenant))]
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                why = done.pop().result()
            finally:
                for child in self._children.values():
                    child.kill()
                for task in ends:
                    task.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
                if self._children:
                    await asyncio.wait([child.ended for child in self._children.values()])
                self._keeper.close()
                self._writer.close()
        return why

    async def _connect(self, tls: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, host, port = parse_address(self._post.address)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                tend(writer.get_extra_info("socket"))
                check_shown(name_shown(writer.get_extra_info("ssl_object")), CONTROLLER)
                secret = bytes.fromhex(self._post.token_hex)
                proof = Handshake(secret, self._post.identity, Purpose.KEEPER, initiator=True)
                writer.write(proof.first())
                writer.write(proof.feed(await reader.readexactly(proof.needed)))
                if proof.peer != CONTROLLER:
                    raise HandshakeError(f"{proof.peer} answers where the controller should")
            except asyncio.IncompleteReadError:
                writer.close()
                raise LinkDownError("the controller does not want this keeper") from None
            except BaseException:
                writer.close()
                raise
        return reader, writer

    def _tell(self, event: h.HostEvent) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(msgspec.json.encode(event)))

    # --- the lease

    async def _beat(self, tenant: Tenant) -> str:
        """Beat until the lease is over."""
        pause_s = self._times.beat_s
        looked_s = boot_clock_s()
        while not tenant.is_over(now_s := boot_clock_s()):
            away_s = now_s - looked_s - pause_s
            looked_s = now_s
            self._tell(h.Beat(tenant.beat(now_s), self._hearts(away_s if away_s > pause_s else 0.0)))
            await asyncio.sleep(min(pause_s, max(0.0, tenant.ends_s - boot_clock_s())))
        return f"no word of the controller for {self._times.fence_s:g} s"

    def _hearts(self, away_s: float) -> list[h.HeartAges]:
        """The loading time of a worker is no silence: it is left out until ``BeginBeats`` has been carried out."""
        found = {order: self._children[order].heart_ages_s(_steady_s(), away_s) for order in sorted(self._beating)}
        return [h.HeartAges(order, *ages_s) for order, ages_s in found.items() if ages_s is not None]

    # --- orders

    async def _obey(self, reader: asyncio.StreamReader) -> str:
        buffer = MessageBuffer(h.MAX_MESSAGE_BYTES)
        try:
            while data := await reader.read(1 << 16):
                for message in buffer.feed(data):
                    self._carry_out(msgspec.json.decode(message, type=h.HostCommand))
        except (OSError, CodecError, msgspec.DecodeError) as error:
            return f"the connection to the controller: {error}"
        return "the controller has hung up"

    def _carry_out(self, command: h.HostCommand) -> None:
        assert self._tenant is not None and self._keeper is not None
        if isinstance(command, h.Granted):
            self._tenant.granted(command.number)
            for child in self._children.values():
                child.lease_until(self._tenant.ends_s)
        elif isinstance(command, h.Spawn):
            self._spawn(command.order, command, self._keeper, self._tenant)
        elif isinstance(command, h.EmptyCopy):
            self._keeper.empty_shared_copy()
        elif command.order in self._children:
            named = self._children[command.order]
            if isinstance(command, h.Kill):
                named.kill()
            elif isinstance(command, h.Abandon):
                named.abandon(command.step_id)
            else:
                named.begin_beats(_steady_s())
                self._beating.add(command.order)

    def _spawn(self, order: int, command: h.Spawn, keeper: Keeper, tenant: Tenant) -> None:
        spec = command.start.spec
        own_card = os.environ.get(_CARD_VARIABLE)
        if own_card:  # what placed this keeper has given it a card, and its number here is another than elsewhere
            spec = msgspec.structs.replace(spec, environment=spec.environment | {_CARD_VARIABLE: own_card})
        start = msgspec.structs.replace(command.start, spec=spec)
        try:
            child = keeper.spawn(start, Placement(self._place.ip), has_far_peers=True)
        except OSError as error:
            log.error("a worker was not started: %s", error)
            self._tell(h.Ended(order, 1))
            return
        self._children[order] = child
        child.lease_until(tenant.ends_s)
        child.on_pid = partial(self._on_pid, order)
        child.ended.add_done_callback(partial(self._on_end, order))
        self._tell(h.Spawned(order, *child.addresses))

    def _on_pid(self, order: int, pid: int) -> None:
        self._tell(h.Forked(order, pid))

    def _on_end(self, order: int, ended: asyncio.Future[int]) -> None:
        self._children.pop(order, None)
        self._beating.discard(order)
        self._tell(h.Ended(order, ended.result()))


def _steady_s() -> float:
    """The clock of heartbeats: of the keeper's own host, so a suspended one excuses its workers."""
    return asyncio.get_running_loop().time()


def _detach() -> None:
    """Go on as a child of no process that knows this one, in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()


def _be_no_first_victim() -> None:
    """Where memory runs out the system kills what Ray has begun before anything else, and would kill instances."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")


def _only_alive(stdout: int) -> int:
    """Keep a descriptor of standard output that no worker has, and have workers write elsewhere."""
    kept = os.dup(stdout)
    os.dup2(2, stdout)
    return kept


def main(said: BinaryIO, stdout: int) -> int:
    """The process. Returns its exit code."""
    name_process(KEEPER)
    post = msgspec.json.decode(said.readline(), type=h.KeeperPost)
    logging.basicConfig(
        stream=sys.stderr, level=post.log_level,
        format=f"%(asctime)s %(levelname)s %(name)s (keeper {post.number}): %(message)s",
    )  # fmt: skip
    applicant = Applicant(post.identity)
    os.write(stdout, applicant.request.hex().encode() + b"\n")
    line = said.readline()
    if not line:
        return 0  # what placed it has given it up
    place = msgspec.json.decode(line, type=h.Place)
    alive = _only_alive(stdout)
    try:
        papers = applicant.papers(place.certificate_pem.encode(), post.authority_pem.encode())
        why = asyncio.run(FarKeeper(post, place).serve(papers))
        log.warning("keeper %d ends: %s", post.number, why)
        return 0
    except (OSError, LinkDownError) as error:
        log.error("keeper %d ends: %s", post.number, error)
        return 1
    finally:
        os.close(alive)


if __name__ == "__main__":
    if "--detach" in sys.argv[1:]:
        _detach()
    _be_no_first_victim()
    sys.exit(main(sys.stdin.buffer, sys.stdout.fileno()))
