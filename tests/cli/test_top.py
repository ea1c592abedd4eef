"""``jettison top``: its tables, its screen under textual's pilot, keys, and a server that goes and comes back."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "server"))
from fake_engine import FakeEngine
from served import write_tokenizer

from jettison.cli.main import app as commands
from jettison.cli.top.reading import MOST_ASKED, Reader
from jettison.cli.top.tables import USES, bar, events, head, memory, plain, queues, requests
from jettison.core.ports import Record
from jettison.server.app import create_app
from jettison.server.console import routes
from jettison.server.console.routes import MOST_LISTED
from jettison.server.console.settings import ConsoleSettings
from jettison.server.serving import run_server
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer

HOSTILE = "[bold]\x1b[2Jid[/]"


def drawn(what, width=200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write_tokenizer(tmp_path_factory.mktemp("top")))


@pytest.fixture
def running(tokenizer):
    """``async with running(engine, port=...) as port``: a server over a real socket."""

    @asynccontextmanager
    async def start(engine, port=0, **settings):
        told = ServerSettings(model_names=("fake",), default_seed=1, **settings)
        app, stop = create_app(engine, tokenizer, told), asyncio.Event()
        started = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(run_server(
            app, "127.0.0.1", port, shutdown_timeout_s=0.1, on_started=started.set_result, stop=stop))
        await asyncio.wait({started, task}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield started.result()
        finally:
            stop.set()
            await task

    return start


def at_work():
    """An engine with one instance down, and a log with a drop."""
    engine = FakeEngine(delay_s=None)
    engine.dead_workers = {1}
    return engine


def log(after_ns, most, kinds, until_ns=None):
    from jettison.live.engine.api import LogPart

    fields = {"group": 0, "because": "memory binds"}
    return LogPart([Record("drop_declined", after_ns + 1, fields)], 0, is_kept=True)


def test_a_bar_is_as_long_as_the_budget():
    uses = {name: 125 for name, _, _ in USES}
    assert bar(uses, 1000, 48).cell_len == 48
    assert bar(uses | {"free": 0}, 1000, 48).cell_len == 42
    assert bar(uses, 0, 48).cell_len == 0


@pytest.mark.parametrize("width", [80, 160])
def test_no_figure_is_cut_off(width):
    """At the width of a terminal as it is opened, too."""
    uses = {name: 125 << 20 for name, _, _ in USES}
    one = {"id": 3, "group": 12, "state": "awake", "budget": 1000 << 20, "uses": uses, "dropped": 900 << 20}
    group = {"id": 12, "instances": [0, 1, 2, 3], "layers": [[0, 10], [10, 20], [20, 30], [30, 40]], "running": 100,
             "waiting": 1000, "moving": 10, "blocks": [9000, 0, 10000], "batch": [10, 1000, 0]}  # fmt: skip
    data = {"instances": [one], "groups": [group]}
    shown = drawn(memory(data, width), width) + drawn(queues(data), width)
    assert "…" not in shown
    for each in ("900 MiB", "1000 MiB", "group 12", "1000", "9,000 of 10,000", "30–39"):
        assert each in shown


def test_text_of_clients_is_no_markup():
    assert "\x1b" not in plain(HOSTILE) and plain(HOSTILE).startswith("[bold]")
    row = {"id": HOSTILE, "ttft": None, "took": 1.0, "batch": False, "preempted": 0, "prompt": 3, "output": 0}
    found = {"under_way": [row], "waiting": [row], "num_under_way": 3}
    shown = drawn(requests(found, {HOSTILE: "It waits for [red]memory."}))
    assert "[bold]" in shown and "[red]memory" in shown and "\x1b" not in shown and "2 requests more" in shown


def test_empty_documents_have_tables():
    """A server that loads has no groups, no latencies and no events."""
    for each in (head({}), memory({}), requests({}, {}), events([], 0.0)):
        drawn(each)


async def test_the_screen_shows_the_server_and_outlives_it(running):
    pytest.importorskip("textual")
    from jettison.cli.top.screen import PARTS, TopApp

    settings = {"api_keys": ("k",), "console": ConsoleSettings(records=log)}
    async with running(at_work(), **settings) as port, Reader(f"http://127.0.0.1:{port}/v1", "k") as reader:
        top = TopApp(reader)
        async with top.run_test(size=(160, 60)) as pilot:
            assert set(top.shown) == set(PARTS)
            text = {name: drawn(what) for name, what in top.shown.items()}
            assert "ready" in text["server"] and "fake" in text["server"]
            assert "group 0" in text["memory"] and "dead" in text["memory"]
            assert "down" in text["rungs"] and "one pipeline" in text["rungs"]
            assert "lacks memory" in text["events"] and "memory is what requests wait for" in text["events"]
            await pilot.press("p")
            await top.read()
            await pilot.press("p")
            closed = top.shown
            reader.url, right = "http://127.0.0.1:1", reader.url
            await top.read()
            assert "no answer" in drawn(top.shown["server"]) and top.shown["memory"] is closed["memory"]
            reader.url = right
            await top.read()
            assert "ready" in drawn(top.shown["server"])
            await pilot.press("q")


async def test_after_a_restart_events_begin_anew(running):
    async with running(at_work(), console=ConsoleSettings(records=log)) as port:
        reader = Reader(f"http://127.0.0.1:{port}", None)
        first = await reader.read()
        assert first.data and len(first.events) == 1
    gone = await reader.read()
    assert gone.data is None and "no answer" in gone.trouble
    async with running(FakeEngine(), port) as port:
        again = await reader.read()
        assert again.data and again.data["life"] != first.data["life"] and not again.events
    await reader.close()


class HalfHeld(FakeEngine):
    """The first requests have a token each, all others wait for theirs."""

    NUM_RUNNING = MOST_LISTED + 5

    async def _pause(self, running):
        if running.num_made or self.accepted.index(running.request) >= self.NUM_RUNNING:
            await super()._pause(running)


async def test_who_waits_for_what(running):
    """However many run."""
    import httpx

    engine = HalfHeld(delay_s=None)
    async with (running(engine, console=ConsoleSettings(records=log)) as port,
                httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http):
        body = {"model": "fake", "prompt": "hi", "max_tokens": 3}
        url = f"http://127.0.0.1:{port}"
        num_waiting = MOST_ASKED + 2
        asked = [asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
                 for _ in range(engine.NUM_RUNNING + num_waiting)]
        while sum(each.num_made > 0 for each in engine.running.values()) < engine.NUM_RUNNING or (
                len(engine.running) < len(asked)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)  # a shorter wait is not noticed
        async with Reader(url, None) as reader:
            reading = await reader.read()
        assert reading.requests["num_under_way"] == len(asked) and len(reading.waits) == MOST_ASKED
        assert all(each["ttft"] is not None for each in reading.requests["under_way"])
        assert len(reading.requests["waiting"]) == num_waiting
        assert {why.partition(",")[0] for why in reading.waits.values()} == {"Memory for requests was full"}
        shown = drawn(requests(reading.requests, reading.waits))
        assert shown.count("no token yet") == num_waiting and "writes" in shown
        engine.release()
        await asyncio.gather(*asked)


async def test_a_server_with_too_many_viewers_is_shown_all_the_same(running, monkeypatch):
    async with running(at_work()) as port, Reader(f"http://127.0.0.1:{port}", None) as reader:
        ask, paths = reader._ask, []

        async def counted(path, *rest):
            paths.append(path)
            return await ask(path, *rest)

        reader._ask = counted
        lists = (await reader.read()).requests
        monkeypatch.setattr(routes, "MOST_ASKED", 0)
        readings = [await reader.read() for _ in range(29)]
        assert lists and all(each.data and each.requests is lists and not each.trouble for each in readings)
        assert paths.count("/console/requests") == 4, "after 3, 6 and 12 more"


@pytest.mark.parametrize(("settings", "key", "told"), [
    ({"api_keys": ("k",)}, None, "asks for a key"), ({"api_keys": ("k",)}, "bad", "does not take this key"),
    ({"console": ConsoleSettings(is_on=False)}, None, "shows no console"),
])
async def test_a_refusal_is_told(running, settings, key, told):
    async with running(FakeEngine(), **settings) as port, Reader(f"http://127.0.0.1:{port}", key) as reader:
        assert told in (await reader.read()).trouble


async def test_once_prints_a_picture_with_the_key_of_the_environment(running):
    async with running(at_work(), api_keys=("k",)) as port:
        arguments = ["top", f"http://127.0.0.1:{port}", "--once"]
        environment = {"VLLM_API_KEY": "k", "COLUMNS": "200"}
        done = await asyncio.to_thread(CliRunner().invoke, commands, arguments, env=environment)
    assert done.exit_code == 0 and "group 0" in done.output and "KV free" in done.output


def test_without_textual_one_line_says_what_to_install(monkeypatch, capsys):
    from jettison.cli.main import main

    monkeypatch.setitem(sys.modules, "textual", None)
    assert main(["top"]) == 2
    assert "pip install 'jettison[top]'" in capsys.readouterr().err


def test_it_is_up_without_torch():
    """A terminal's tool that loads for seconds is not opened in a hurry."""
    script = "import sys, jettison.cli.top.reading, jettison.cli.top.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
