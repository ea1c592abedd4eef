"""The console in a real browser over an engine that is in the states that real ones are seldom in: instances that sleep
or are dead, a pipeline, no chat template, all asleep, loading, and a model whose name is markup."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from fake_engine import FakeEngine

from browser import ARGUMENTS, FAULTS_OF_LAYOUT, SCHEMES, WIDTHS, Watch, chromium
from jettison.core.observing import OfflineGauges
from jettison.core.ports import Record
from jettison.live.engine.api import LogPart
from jettison.server.console.settings import ConsoleSettings
from jettison.server.tokenizer import Tokenizer

HOSTILE = "<img/src=x/onerror=alert(1)>\"'&"
WAIT_S = 60.0


@pytest.fixture
def page_of():
    """``async with page_of(url, width, scheme) as page``: what it did unseen is checked at the end."""

    @asynccontextmanager
    async def opened(url, width=1400, scheme="light", expected=()):
        path = chromium()
        from playwright.async_api import async_playwright

        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=path, args=ARGUMENTS)
            page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch = Watch(page, url)
            watch.expected = expected
            await page.goto(f"{url}/console")
            try:
                yield page
            finally:
                await browser.close()
            watch.check()

    return opened


async def says(page, selector, text):
    """Until an element has that text in it."""
    script = "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)"
    async with asyncio.timeout(WAIT_S):
        while not await page.evaluate(script, [selector, text]):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("width", "scheme"), zip(WIDTHS, SCHEMES, strict=True))
async def test_a_pipeline_a_sleeper_a_death_and_reasons(serve, page_of, width, scheme):
    engine = FakeEngine()
    fields = {
        "group": 0, "overloaded_groups": [0], "required_bytes": 5 << 20, "freed_bytes": 9 << 20, "reason": HOSTILE,
    }  # fmt: skip
    now = [fields]

    def records(after_ns, *_):
        return LogPart([Record("drop_decided", after_ns + 1, now.pop())] if now else [], 0, is_kept=True)

    engine.offline = OfflineGauges(offline_waiting=2, offline_running=3, offline_hosted=1, offline_blocks=1)
    console = ConsoleSettings(records=records)
    async with serve(engine, console=console) as served, page_of(served.url, width, scheme) as page:
        await says(page, "#at-work", "Instances 0 and 1 run as one pipeline (layers 0 to 1 on 0; layers 2 to 3 on 1)")
        await says(page, "#at-work", f"Why: {HOSTILE}")
        await says(page, "#at-work", "3 requests of batches run")
        await says(page, "#events", "5.0 MiB are missing for requests")
        await says(page, "#instance-0", "in one pipeline with 1: layers 0 to 1")
        assert await page.evaluate(FAULTS_OF_LAYOUT) == []
        engine.sleep, engine.has_groups = ["asleep", "waking"], False
        await says(page, "#at-work", "Instance 0 is asleep: memory given back.")
        await says(page, "#at-work", "Instance 1 is being woken.")
        await says(page, "#instance-0", "asleep")
        engine.sleep, engine.dead_workers, engine.troubles = ["asleep"] * 2, {1}, (f"weights {HOSTILE}",)
        await says(page, "#summary", "Instance 1 is down")
        await says(page, "#advice", f"weights {HOSTILE}")
        engine.dead_workers, engine.troubles = set(), ()
        await says(page, "#summary", "All instances sleep; the next request wakes one.")
        engine.engine_state = "loading"
        await says(page, "#summary", "The model is loading.")
        assert await page.evaluate("document.images.length") == 0


async def test_without_a_chat_template_and_with_a_hostile_name(serve, page_of, tokenizer_dir, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    bare = Tokenizer.from_dir(tmp_path)
    async with serve(FakeEngine(), tokenizer=bare, model_names=(HOSTILE,)) as served, page_of(served.url) as page:
        await says(page, "#model", HOSTILE)
        await page.click("nav a[href='#chat']")
        assert await page.is_visible("#chat-none") and not await page.is_visible("#chat-form")
        assert HOSTILE in await page.title()
        assert await page.evaluate("document.images.length") == 0


async def test_what_the_server_refuses_stands_in_the_chat(serve, page_of):
    engine = FakeEngine(max_model_len=40)
    async with serve(engine, model_names=("fake",)) as served, page_of(served.url, expected=("400",)) as page:
        await says(page, "#connection", "ready")
        await page.click("nav a[href='#chat']")
        await page.fill("#chat-text", "much too long " * 20)
        await page.click("#chat-send")
        await says(page, "#chat-log .failed", "No answer: This model's maximum context length is")
        await says(page, "#chat-status", "It failed.")
        assert await page.input_value("#chat-text") != ""
