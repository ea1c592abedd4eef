"""The console in a real browser, over real servers. What is asserted:

- In each view, at 1,400 and 400 points, light and dark: the page is not wider than its window, no text is cut, none is
  smaller than 12 points or fainter than 4.5 to 1, no control lies over another, every field has a label and every
  picture words.
- Nothing is logged as an error or a warning, no dialog opens, and no request goes to another host.
- What happens: with 64 streams open the figures add up to 64, tokens are made, the picture of each instance is painted
  in the colours of what it holds, and its table says the same. Where: each instance and group by its number. Why: rungs
  at work and lately with their reasons. What to do: the sentence above has advice where requests wait.
- A request's way: found by the answer's id, by ``x-request-id``, and from the list; an id that is not known says so.
- Strings that a client sends (ids, prompts) are text: no element is made of them.
- The key: asked for, a wrong one is refused with words, the right one is kept in ``sessionStorage``, goes in a header,
  and is in no address; a reload keeps it.
- By keyboard alone: every control of a view is reached, each shows the focus, a view is opened and a chat sent.
- The chat streams, stops, and leads to its own way.
- A batch is uploaded, shows its progress, ends, and answers and errors are downloaded; one is cancelled; a file that is
  none is refused in words.
- The server goes away: the page says since when; it comes back: the page goes on by itself.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from e2e_server import COMMON_FLAGS, KEY, MODEL, START_TIMEOUT_S, Served, as_environment, child_environment

from browser import FAULTS_OF_LAYOUT, FOCUSED, SCHEMES, WIDTHS, Watch, launched
from jettison.live.experiments.server_process import ServerProcess

pytestmark = pytest.mark.live

HOSTILE = "<img/src=x/onerror=alert(1)>\"'&"
VIEWS = ("now", "requests", "chat", "batches")
NUM_STREAMS = 64
WAIT_MS = 60_000
"""Bound of every wait for something that should take a second."""


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def keyed(browser, serving, memory_for, tmp_path_factory):
    """Two instances with a key, small enough for 64 requests to be too many; layers are dropped where that frees
    blocks."""
    folder = tmp_path_factory.mktemp("batches")
    with serving(key=KEY, memory=memory_for(96), restore_dwell_ms=100, batch_dir=folder) as served:
        yield served


@pytest.fixture
def open_page(browser):
    """``open_page(served, width=..., scheme=...)``: a page of its own, with a key where the server has one; what it did
    unseen is checked at the end."""
    contexts, watches = [], []

    def opened(served, *, width=1400, scheme="light", key=None, view="now"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(WAIT_MS)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('jettison-key', {json.dumps(key)})")
        page = context.new_page()
        page.watch = Watch(page, served.url)
        contexts.append(context)
        watches.append(page.watch)
        page.goto(f"{served.url}/console#{view}")
        return page

    yield opened
    for context in contexts:
        context.close()
    for watch in watches:
        watch.check()


@contextmanager
def streams(served, num):
    """So many streams open, until the end of the block."""
    stop, begun = threading.Event(), threading.Semaphore(0)

    def one(number):
        body = {"model": MODEL, "prompt": f"{number} " * 12, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=served.url, headers=served.headers(), timeout=120) as client:
            while not stop.is_set():
                named = body | {"request_id": f"{HOSTILE}{number}"}
                with client.stream("POST", "/v1/completions", json=named) as answer:
                    assert answer.status_code == 200
                    for _ in answer.iter_bytes():
                        begun.release()
                        if stop.is_set():
                            break

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    try:
        assert begun.acquire(timeout=60)
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wait_for(page, script):
    """Until a condition holds in the page, whose policy keeps Playwright from asking by itself."""
    deadline = time.monotonic() + WAIT_MS / 1e3
    while not page.evaluate(script):
        assert time.monotonic() < deadline, (script, page.inner_text("main")[:3000])
        page.wait_for_timeout(100)


def show(page, view):
    page.evaluate("(view) => { location.hash = view; }", view)
    page.wait_for_selector(f"#view-{view}:not([hidden])")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_view_can_be_read(keyed, open_page, width, scheme):
    ended = httpx.post(f"{keyed.url}/v1/completions", headers=keyed.headers(), timeout=60,
                       json={"model": MODEL, "prompt": "hi", "request_id": HOSTILE, "max_tokens": 4})
    page = open_page(keyed, width=width, scheme=scheme, key=KEY)
    wait_for(page, "document.querySelectorAll('#instances figure').length === 2")
    for view in VIEWS:
        show(page, view)
        if view == "requests":
            page.fill("#way-id", ended.json()["id"])
            page.press("#way-id", "Enter")
            page.wait_for_selector("#way .card")
            page.wait_for_selector("#list-recent table")
        for details in page.query_selector_all(f"#view-{view} details:not([open]) > summary"):
            details.click()
        page.wait_for_timeout(1200)
        assert page.evaluate(FAULTS_OF_LAYOUT) == [], (view, width, scheme)


def test_what_happens_with_64_streams_open(keyed, open_page):
    page = open_page(keyed, key=KEY)
    with streams(keyed, NUM_STREAMS):
        number = "Number(document.getElementById('{}').textContent.replaceAll(',', ''))"
        total = f"{number.format('f-running')} + {number.format('f-waiting')}"
        wait_for(page, f"{total} >= {NUM_STREAMS - 8} && {total} <= {NUM_STREAMS}")
        wait_for(page, f"{number.format('f-tokens')} > 0")
        wait_for(page, "document.getElementById('f-p99').textContent.endsWith('s')")
        page.click("text=Memory in figures")
        wait_for(page, "document.querySelectorAll('#memory-table tbody tr').length === 2")
        wait_for(page, """() => [...document.querySelectorAll('#instances canvas')].every((canvas) => {
          const seen = new Set();
          const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          for (let at = 0; at < data.length; at += 4) seen.add(data.slice(at, at + 3).join());
          return ['68,97,138', '200,80,30'].every((color) => seen.has(color));
        })""")
        wait_for(page, "/Memory of instance [01]: the model .* MiB, KV of the chat's requests/.test("
                       "document.querySelector('#instances canvas').getAttribute('aria-label'))")
        wait_for(page, "document.querySelectorAll('#events li').length > 0")
        wait_for(page, "document.querySelector('#events .why')?.textContent.startsWith('Why: ')")
        wait_for(page, "/wait: memory for requests is full on|run as one pipeline/.test("
                       "document.getElementById('summary').textContent)")
        show(page, "requests")
        page.wait_for_selector("#list-under_way table")
        assert HOSTILE in page.text_content("#list-under_way")
        assert page.evaluate("document.images.length") == 0


def test_a_request_s_way(keyed, open_page):
    answer = httpx.post(f"{keyed.url}/v1/completions", headers=keyed.headers() | {"x-request-id": HOSTILE}, timeout=60,
                        json={"model": MODEL, "prompt": HOSTILE, "request_id": HOSTILE, "max_tokens": 4})
    page = open_page(keyed, key=KEY, view="requests")
    page.watch.expected = ("404",)
    for name in (answer.json()["id"], answer.headers["x-request-id"]):
        page.fill("#way-id", name)
        page.click("text=Look up")
        wait_for(page, "document.querySelector('#way .card')?.textContent.includes('Its first token came after')")
    assert "What the server did" in page.text_content("#way") or "Why" in page.text_content("#way")
    page.wait_for_selector("#list-slow button")
    page.fill("#way-id", "")
    page.click("#list-slow button >> nth=0")
    wait_for(page, "document.getElementById('way-id').value.startsWith('cmpl-')")
    page.fill("#way-id", "nothing<b>")
    page.press("#way-id", "Enter")
    wait_for(page, "document.querySelector('#way .notice')?.textContent.startsWith('No such request')")
    assert page.evaluate("document.images.length") == 0 and page.query_selector("#way b") is None


def test_the_key_is_asked_for_kept_in_the_tab_and_in_no_address(keyed, open_page):
    page = open_page(keyed)
    page.watch.expected = ("401",)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key-text", "wrong")
    page.press("#key-text", "Enter")
    wait_for(page, "document.getElementById('key-dialog').open && "
                   "document.getElementById('key-hint').textContent.includes('does not know')")
    page.fill("#key-text", KEY)
    page.click("#key-dialog button[type=submit]")
    wait_for(page, "document.getElementById('connection').textContent === 'ready'")
    assert page.evaluate("sessionStorage.getItem('jettison-key')") == KEY
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.reload()
    wait_for(page, "document.getElementById('connection').textContent === 'ready'")
    assert not page.evaluate("document.getElementById('key-dialog').open")
    assert not [url for url in page.watch.urls if KEY in url or "wrong" in url]
    page.click("#key-button")
    page.click("#key-forget")
    wait_for(page, "document.getElementById('connection').textContent === 'needs a key'")
    assert page.evaluate("sessionStorage.getItem('jettison-key')") is None


def test_by_keyboard_alone(keyed, open_page):
    page = open_page(keyed, key=KEY)
    wait_for(page, "document.getElementById('connection').textContent === 'ready'")
    names = walk(page)
    assert names[0] == "Skip to the content"
    assert {"Now", "Requests", "Chat", "Batches", "key-button", "Memory in figures", "Load in figures"} <= set(names)
    page.evaluate("document.activeElement.blur()")
    page.focus("nav a[href='#chat']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#view-chat:not([hidden])")
    assert page.evaluate("document.querySelector('nav a[aria-current]').textContent") == "Chat"
    reached = walk(page)
    assert [name for name in reached if name.startswith("chat-")] == [
        "chat-log", "chat-model", "chat-most", "chat-clear", "chat-text", "chat-send"]
    page.focus("#chat-most")
    page.keyboard.press("Control+A")
    page.keyboard.type("8")
    page.focus("#chat-text")
    page.keyboard.type("hello")
    page.keyboard.press("Control+Enter")
    wait_for(page, "document.getElementById('chat-status').textContent === 'The answer is complete.'")
    assert page.evaluate("document.activeElement.id") == "chat-text"


def walk(page):
    """Names of what Tab reaches, once round; each shows that it has the focus."""
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUSED)
        if at["tag"] == "BODY" or at["name"] in names:
            break
        assert at["shown"] and at["seen"], at
        names.append(at["name"])
    return names


STOP_AT_FIRST_WORDS = """() => {
  const log = document.getElementById("chat-log");
  const stop = document.getElementById("chat-stop"), send = document.getElementById("chat-send");
  new MutationObserver(() => {
    if (window.buttons !== undefined || !log.querySelectorAll("p")[1]?.textContent) return;
    window.buttons = { stop: !stop.disabled, send: !send.disabled };
    stop.click();
  }).observe(log, { subtree: true, childList: true, characterData: true });
}"""


def test_the_chat_streams_stops_and_leads_to_its_way(keyed, open_page):
    page = open_page(keyed, key=KEY, width=400, view="chat")
    wait_for(page, "document.getElementById('chat-model').value === 'tiny'")
    page.fill("#chat-most", "1000")
    page.fill("#chat-text", HOSTILE)
    page.evaluate(STOP_AT_FIRST_WORDS)  # from in here: an answer may be over before a click from outside arrives
    page.click("#chat-send")
    wait_for(page, "window.buttons !== undefined")
    assert page.evaluate("window.buttons") == {"stop": True, "send": False}
    wait_for(page, "['Stopped.', 'The answer is complete.'].includes("
                   "document.getElementById('chat-status').textContent)")
    assert page.text_content("#chat-log p") == HOSTILE and page.evaluate("document.images.length") == 0
    keyed.wait_idle()
    page.click("text=Why so long?")
    page.wait_for_selector("#view-requests:not([hidden]) #way .card")


def lines(num, num_tokens=4):
    body = {"model": MODEL, "prompt": "hi", "max_tokens": num_tokens, "ignore_eos": True}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    return [row | {"custom_id": f"{HOSTILE}{at}"} for at in range(num)]


def upload(page, rows, name="work.jsonl"):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    page.set_input_files("#batch-file", {"name": name, "mimeType": "application/jsonl", "buffer": text.encode()})
    page.select_option("#batch-endpoint", "/v1/completions")
    page.click("#batch-send")


def test_a_batch_from_upload_to_download(keyed, open_page):
    page = open_page(keyed, key=KEY, view="batches")
    wait_for(page, "document.getElementById('connection').textContent === 'ready'")
    failing = lines(1)[0] | {"custom_id": "long"}
    failing["body"] = failing["body"] | {"max_tokens": 10**6}
    upload(page, [*lines(12), failing])
    row = page.locator("#batch-list tbody tr")
    wait_for(page, "/13 of 13, 1 without an answer/.test(document.querySelector('#batch-list tbody tr')?.textContent)")
    wait_for(page, "/done/.test(document.querySelector('#batch-list tbody tr')?.textContent)")
    with page.expect_download() as answers:
        row.first.get_by_text("Download answers").click()
    got = [json.loads(line) for line in answers.value.path().read_text().splitlines()]
    assert {each["custom_id"] for each in got} == {f"{HOSTILE}{at}" for at in range(12)}
    with page.expect_download() as errors:
        row.first.get_by_text("Download errors").click()
    assert json.loads(errors.value.path().read_text())["custom_id"] == "long"
    assert errors.value.suggested_filename.endswith("-errors.jsonl")


def test_a_batch_is_cancelled_and_a_wrong_file_refused(keyed, open_page):
    page = open_page(keyed, key=KEY, view="batches", width=400, scheme="dark")
    wait_for(page, "document.getElementById('connection').textContent === 'ready'")
    upload(page, lines(300, 400), name=f"{HOSTILE}.jsonl")
    page.wait_for_selector("#batch-list button >> text=Cancel")
    assert page.evaluate(FAULTS_OF_LAYOUT) == []
    page.click("#batch-list button >> text=Cancel")
    wait_for(page, "/cancelled/.test(document.querySelector('#batch-list tbody tr')?.textContent)")
    upload(page, ["this is no JSON"])
    wait_for(page, "/refused/.test(document.querySelector('#batch-list tbody tr')?.textContent)")
    assert "line 1" in page.text_content("#batch-list tbody tr")
    assert page.evaluate("document.images.length") == 0


def test_the_server_goes_away_and_comes_back(open_page, model_dir, memory_for, tmp_path):
    flags = COMMON_FLAGS | {"memory": memory_for(96, instances=1), "instances": 1, "root_path": "/api"}
    process = ServerProcess(model_dir, flags, tmp_path / "log")
    with as_environment(child_environment()):
        process.start(START_TIMEOUT_S)
    try:
        page = open_page(Served(process, tmp_path / "log", None))
        page.watch.expected = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "503")
        wait_for(page, "document.getElementById('summary').textContent.startsWith('Nothing to do')")
        assert page.evaluate("document.querySelectorAll('#instances figure').length") == 1
        process.close()
        wait_for(page, "document.getElementById('connection').textContent === 'no connection'")
        assert "does not answer since" in page.text_content("#notice")
        again = ServerProcess(model_dir, flags, tmp_path / "log", port=process.port)
        with as_environment(child_environment()):
            again.start(START_TIMEOUT_S)
        try:
            wait_for(page, "document.getElementById('connection').textContent === 'ready'")
            wait_for(page, "document.getElementById('notice').hidden")
        finally:
            again.close()
    finally:
        process.close()
