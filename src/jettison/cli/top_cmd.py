"""``jettison top``: a server's memory, queues, rungs and requests in a terminal, read-only."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from jettison.cli.address import server_root
from jettison.config import API_KEY_VARIABLES
from jettison.errors import JettisonError, UserError

NO_TEXTUAL = (
    "jettison top needs textual, which is not installed: pip install 'jettison[top]' (--once does without it)")


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Server's root.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", envvar=list(API_KEY_VARIABLES), show_envvar=False,
                     help=f"Key to send (also: {API_KEY_VARIABLES[0]})."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave; needs no textual.")] = False,
) -> None:
    """Watch a server: memory of instances, queues, rungs at work with their reasons, which request waits for what.

    It reads what the page /console reads, and changes nothing. A server that ends is
    waited for. q leaves, p pauses.
    """
    server_root(url)
    if once:
        asyncio.run(_print_once(url, api_key))
        return
    try:
        import textual  # noqa: F401
    except ImportError:
        raise UserError(NO_TEXTUAL) from None
    asyncio.run(_watch(url, api_key))


async def _watch(url: str, api_key: str | None) -> None:
    from jettison.cli.top.reading import Reader
    from jettison.cli.top.screen import TopApp

    async with Reader(url, api_key) as reader:
        await TopApp(reader).run_async()


async def _print_once(url: str, api_key: str | None) -> None:
    from rich.console import Console

    from jettison.cli.top.reading import Reader
    from jettison.cli.top.tables import TITLES, events, head, legend, memory, queues, requests, rungs

    async with Reader(url, api_key) as reader:
        reading = await reader.read()
    if reading.data is None:
        raise JettisonError(reading.trouble)
    now_s = float(reading.data.get("t", 0.0))
    console = Console(highlight=False)
    console.print(head(reading.data))
    parts = {
        "memory": memory(reading.data, console.width), "queues": queues(reading.data), "rungs": rungs(reading.data),
        "requests": requests(reading.requests, reading.waits, console.width), "events": events(reading.events, now_s),
    }  # fmt: skip
    for name, part in parts.items():
        console.print(f"\n{TITLES[name]}", style="bold underline")
        console.print(part)
        if name == "memory":
            console.print(legend())
