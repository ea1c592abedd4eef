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
    async def opened(url, width=1400, scheme="light", expected=(), key=None):
        path = chromium()
        from playwright.async_api import async_playwright

        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=path, args=ARGUMENTS)
            page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            watch = Watch(page, url)
            watch.expected = expected
            if key is not None:
                await page.add_init_script(f"sessionStorage.setItem('jettison-key', {json.dumps(key)})")
            page.watch = watch
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


@pytest.mark.parametrize(("width", "scheme"), list(zip(WIDTHS, SCHEMES, strict=True)))
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


def sent_turns(page):
    """The conversations that the page sends from now on."""
    sent = []

    def note(request):
        if request.url.endswith("/v1/chat/completions"):
            sent.append(json.loads(request.post_data)["messages"])

    page.on("request", note)
    return sent


async def test_a_conversation_that_begins_anew_has_nothing_of_the_one_before(serve, page_of):
    engine = FakeEngine(delay_s=0.05)
    async with serve(engine) as served, page_of(served.url) as page:
        await says(page, "#connection", "ready")
        await page.click("nav a[href='#chat']")
        sent = sent_turns(page)
        await page.fill("#chat-text", "one")
        await page.click("#chat-send")
        await says(page, "#chat-log p:last-child", "a")
        await page.click("#chat-clear")
        await says(page, "#chat-status", "Stopped.")
        assert await page.text_content("#chat-log") == ""
        engine.delay_s = 0.0
        await page.fill("#chat-most", "4")
        for text in ("two", "three"):
            await page.fill("#chat-text", text)
            await page.click("#chat-send")
            await says(page, "#chat-status", "The answer is complete.")
        assert sent[1] == [{"role": "user", "content": "two"}]
        assert [turn["role"] for turn in sent[2]] == ["user", "assistant", "user"]


async def test_thoughts_stand_apart_and_are_not_sent_back(serve, page_of):
    deltas = ({"reasoning_content": "Clouds. "}, {"reasoning_content": HOSTILE}, {"content": "Rain."})
    chunks = [{"id": "c", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    async def answer(route):
        await route.fulfill(status=200, content_type="text/event-stream", body=stream)

    async with serve(FakeEngine()) as served, page_of(served.url) as page:
        await says(page, "#connection", "ready")
        await page.click("nav a[href='#chat']")
        await page.route("**/v1/chat/completions", answer)
        sent = sent_turns(page)
        for num in (1, 2):
            await page.fill("#chat-text", "Why?")
            await page.click("#chat-send")
            async with asyncio.timeout(WAIT_S):
                while await page.locator("#chat-log .hint").count() != num:
                    await asyncio.sleep(0.05)
        assert sent[1][1] == {"role": "assistant", "content": "Rain."}
        await page.click("#chat-log summary >> nth=0")
        assert await page.inner_text("#chat-log details >> nth=0") == f"Thoughts\nClouds. {HOSTILE}"
        assert await page.evaluate("document.images.length") == 0
        assert await page.evaluate(FAULTS_OF_LAYOUT) == []


@pytest.mark.parametrize("key", ["boss", None])
async def test_without_a_client_s_key_the_views_that_need_one_say_so(serve, page_of, key):
    console = ConsoleSettings(is_open=key is None)
    told = {"api_keys": ("k1",), "admin_keys": ("boss",), "console": console}
    async with serve(FakeEngine(), **told) as served, page_of(served.url, expected=("401",), key=key) as page:
        await says(page, "#connection", "ready")
        await page.click("nav a[href='#batches']")
        begun = len(page.watch.urls)
        await says(page, "#batch-trouble", "This needs a client's key")
        async with asyncio.timeout(WAIT_S):
            while len(asked := [url for url in page.watch.urls[begun:] if "/console/data" in url]) < 8:
                assert await page.text_content("#connection") == "ready"
                await asyncio.sleep(0.05)
        num_lists = len([url for url in page.watch.urls[begun:] if "/v1/batches" in url])
        assert num_lists <= 1 + len(asked) / 2
        await page.click("nav a[href='#chat']")
        await page.fill("#chat-text", "hi")
        await page.click("#chat-send")
        await says(page, "#chat-log .failed", "This needs a client's key")
        assert not await page.evaluate("document.getElementById('key-dialog').open")
        await page.click("#key-button")
        await page.fill("#key-text", "k1")
        await page.press("#key-text", "Enter")
        await page.click("nav a[href='#requests']")
        await says(page, "#connection", "ready")


async def test_each_failure_is_told_as_what_it_is(serve, page_of):
    answers = {}

    async def instead(route):
        status = answers.get("status")
        if status is None:
            await route.continue_()
        elif status == 0:
            await route.abort()
        else:
            await route.fulfill(status=status, json={"error": {"message": f"Odd {HOSTILE}"}})

    expected = ("500", "404", "502", "ERR_FAILED")
    async with serve(FakeEngine()) as served, page_of(served.url, expected=expected) as page:
        await says(page, "#connection", "ready")
        await page.route("**/console/requests", instead)
        answers["status"] = 404
        await page.click("nav a[href='#requests']")
        await says(page, "#requests-trouble", f"Odd {HOSTILE}")
        assert await page.text_content("#connection") == "ready" and await page.is_hidden("#notice")
        answers["status"] = None
        async with asyncio.timeout(WAIT_S):
            while await page.is_visible("#requests-trouble"):
                await asyncio.sleep(0.05)
        await page.route("**/console/data*", instead)
        for status, badge, notice in ((500, "no data", f"Odd {HOSTILE}"), (404, "switched off", "--no-console"),
                                      (0, "no connection", "does not answer since")):
            answers["status"] = status
            await says(page, "#connection", badge)
            await says(page, "#notice", notice)
        assert await page.evaluate("document.images.length") == 0
        answers["status"] = None
        await says(page, "#connection", "ready")


async def test_many_choices_are_told_in_parts(serve, page_of):
    async with serve(FakeEngine()) as served, page_of(served.url) as page:
        made = await served.post("/v1/completions", json={"model": "fake", "prompt": "hi", "max_tokens": 1, "n": 10})
        await page.click("nav a[href='#requests']")
        await page.fill("#way-id", made.json()["id"])
        await page.press("#way-id", "Enter")
        await says(page, "#way", "Choices 1 to 8 of 10. ")
        assert "Those before" not in await page.text_content("#way")
        await page.click("#way button")
        await says(page, "#way", "Choices 9 to 10 of 10. ")
        assert "Choice 10 of 10: " in await page.text_content("#way")
        await page.click("#way button")
        await says(page, "#way", "Choice 1 of 10: ")


async def test_a_request_under_way_and_others_of_its_id_in_the_page(serve, page_of):
    engine = FakeEngine(delay_s=None)
    asked = {"model": "fake", "prompt": "hi", "stream": True, "n": 2}
    async with serve(engine) as served, page_of(served.url) as page:
        first, second = (
            served.http.stream("POST", f"{served.url}/v1/completions", json=asked, headers={"x-request-id": "same"})
            for _ in range(2)
        )
        async with first, second:
            await page.click("nav a[href='#requests']")
            await says(page, "#list-under_way", "one of 2 choices")
            await page.fill("#way-id", "same")
            await page.press("#way-id", "Enter")
            await says(page, "#way .legend", "until its first token: ")
            await says(page, "#way", "1 older request had this id, too")
            assert "waiting: " not in await page.text_content("#way")
            assert "Choice 2 of 2: " in await page.text_content("#way")
            engine.release()
