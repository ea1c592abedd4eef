"""The screen of ``jettison top``. Needs ``textual``, which the extra ``top`` brings."""

from __future__ import annotations

import time
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from jettison.cli.top.reading import Reader, Reading
from jettison.cli.top.tables import TITLES, events, head, legend, memory, plain, queues, requests, rungs

PERIOD_S = 1.0
"""Between two readings: the server makes a snapshot a second."""

MARGIN = 4
"""Cells beside the text: of the blocks, and of the bar that scrolls."""
PARTS = ("server", "memory", "queues", "rungs", "requests", "events")
"""Of the screen, from above."""


class TopApp(App[None]):
    """Shows one server until its reader leaves. Nothing here changes the server."""

    CSS = "Static { padding: 0 1; margin-bottom: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("p", "pause", "Pause")]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._is_paused = False
        self._is_asking = False
        self._answered_s: float | None = None
        self.shown: dict[str, RenderableType] = {}
        """What each part shows."""

    def compose(self) -> ComposeResult:
        """One block for each part."""
        with VerticalScroll():
            for name in PARTS:
                yield Static(id=name)
        yield Footer()

    async def on_mount(self) -> None:
        """Begin to read."""
        self.title = self._reader.url
        await self.read()
        self.set_interval(PERIOD_S, self.read)

    def action_pause(self) -> None:
        """Stop, or go on."""
        self._is_paused = not self._is_paused

    async def read(self) -> None:
        """Ask once, and show the answer; while one answer is outstanding, nothing."""
        if self._is_paused or self._is_asking:
            return
        self._is_asking = True
        try:
            self.show(await self._reader.read())
        finally:
            self._is_asking = False

    def show(self, reading: Reading) -> None:
        """Show one reading. Without an answer the last one stays, and the first line says since when."""
        if reading.data is None:
            self._set("server", self._trouble(reading.trouble))
            return
        self._answered_s = time.monotonic()
        data = reading.data
        self._set("server", head(data))
        width = self.size.width - MARGIN
        self._set("memory", memory(data, width))
        self._set("queues", queues(data))
        self._set("rungs", rungs(data))
        self._set("requests", requests(reading.requests, reading.waits, width))
        self._set("events", events(reading.events, float(data.get("t", 0.0))))

    def _trouble(self, told: str) -> Text:
        line = Text(plain(told), "bold red")
        if self._answered_s is not None:
            line.append(f"\nWhat is below is {time.monotonic() - self._answered_s:.0f} s old.", "not bold")
        return line.append("\nAsking again each second.", "not bold")

    def _set(self, name: str, what: RenderableType) -> None:
        self.shown[name] = what
        title = [Text(TITLES[name], "bold underline")] if name in TITLES else []
        below = [legend()] if name == "memory" else []
        self.query_one(f"#{name}", Static).update(Group(*title, what, *below))
