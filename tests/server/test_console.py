"""The console over HTTP: its page and its data, keys, bounds in calls and bytes, and the words of records and ways."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from pathlib import Path

import httpx
import pytest
from batches_util import jsonl, line
from fake_engine import FakeEngine

import jettison.core
from jettison.core.ports import Record
from jettison.live.engine.api import RequestTimings
from jettison.live.engine.move_log import newest_records
from jettison.policy.slo import Objectives
from jettison.server.app import create_app
from jettison.server.batches.settings import BatchSettings
from jettison.server.console.feed import MOST_ANSWERS, MOST_EVENTS, MOST_RECORDS
from jettison.server.console.journal import MOST_CHOICES, NUM_KEPT, NUM_ROWS, Journal, Row
from jettison.server.console.routes import MOST_ASKED, static_files
from jettison.server.console.settings import ConsoleSettings, no_records
from jettison.server.console.way import Meanwhile, Usual, way_of
from jettison.server.console.words import KINDS, UNTOLD, told, told_all
from jettison.server.settings import ServerSettings
from waiting import PATIENCE_S

S = 1_000_000_000
HOSTILE = "<img src=x onerror=alert(1)>\"'&"
KEY, OTHER, ADMIN = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2", "boss"))
DATA = ("/console/data", "/console/requests", "/console/request?id=x")


class Counting(FakeEngine):
    """Counts snapshots."""

    num_snapshots = 0

    def snapshot(self):
        self.num_snapshots += 1
        return super().snapshot()


class Clock:
    """Stands until it is moved."""

    now_ns = 1000 * S

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def client_of(tokenizer, clock):
    def make(engine=None, records=(), *, console=None, **settings):
        log = list(records)

        def since(*asked):
            return newest_records((deque(log),), *asked)

        console = console or ConsoleSettings(records=since, clock=clock)
        told = ServerSettings(**({"model_names": ("fake",), "default_seed": 1, "console": console} | settings))
        app = create_app(engine or Counting(), tokenizer, told)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        client.state, client.log = app.state.jettison, log
        return client

    return make


def row(**told):
    """A request that waited 2 of 3 s."""
    usual = {
        "request_id": "r-0", "names": ("cmpl-1", "x-1"), "tenant": "", "is_offline": False, "reason": "stop",
        "arrival_ns": 0, "scheduled_ns": 2 * S, "first_ns": 3 * S, "ended_ns": 4 * S, "num_prompt": 100,
        "num_cached": 10, "num_output": 11, "num_preemptions": 0, "num_beside": 7,
    }  # fmt: skip
    return Row(**(usual | told))


async def test_the_page_is_whole_and_closed_to_other_hosts(client_of):
    async with client_of() as client:
        page = await client.get("/console")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        found = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
        assert found and all(not each.startswith(("/", "http")) for each in found)
        names = {file.name for file in static_files()}
        assert {each.removeprefix("console/") for each in found} <= names
        for name in names - {"index.html"}:
            file = await client.get(f"/console/{name}")
            assert file.status_code == 200 and file.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", file.text)
            assert "innerHTML" not in file.text and "eval(" not in file.text and "outerHTML" not in file.text
            again = await client.get(f"/console/{name}", headers={"if-none-match": f"W/{file.headers['etag']}"})
            assert (again.status_code, again.content) == (304, b"")
            for imported in re.findall(r'from "\./([^"]+)"', file.text):
                assert imported in names
        assert (await client.get("/console/nothing.js")).status_code == 404


async def test_with_a_slash_behind_it_the_page_is_elsewhere(serve):
    async with serve(FakeEngine(), root_path="/api") as served:
        answer = await served.http.get(f"{served.url}/api/console/")
        assert (answer.status_code, answer.headers["location"]) == (308, "../console")
        for path in ("/api/console", "/console", "/api/console/app.js", "/api/console/data"):
            assert (await served.http.get(served.url + path)).status_code == 200


def test_the_page_is_in_the_wheel():
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert '"jettison.server.console" = ["static/*"]' in text


async def test_keys(client_of):
    closed = {"api_keys": ("k1", "k2"), "admin_keys": ("boss",)}
    async with client_of(**closed) as client:
        assert (await client.get("/console")).status_code == 200
        assert (await client.get("/console/app.js")).status_code == 200
        for path in DATA:
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=OTHER)).status_code in (200, 404)
            assert (await client.get(path, headers=ADMIN)).status_code in (200, 404)
        assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401
    async with client_of(console=ConsoleSettings(is_open=True), **closed) as client:
        assert (await client.get("/console/data")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/batches")).status_code == 401
    async with client_of(console=ConsoleSettings(is_on=False), **closed) as client:
        assert client.state.journal is None
        for path in ("/console", "/console/app.js", *DATA):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=KEY)).status_code == 404


async def test_each_key_sees_its_own_requests_and_administration_all(client_of):
    async with client_of(api_keys=("k1", "k2"), admin_keys=("boss",)) as client:
        document = {"model": "fake", "prompt": "hi", "max_tokens": 3}
        made = (await client.post("/v1/completions", json=document, headers=KEY)).json()["id"]
        seen = [(await client.get("/console/requests", headers=who)).json()["num_kept"] for who in (KEY, OTHER, ADMIN)]
        assert seen == [1, 0, 1]
        found = [
            (await client.get("/console/request", params={"id": made}, headers=who)).status_code
            for who in (KEY, OTHER, ADMIN)
        ]
        assert found == [200, 404, 200]
    async with client_of(api_keys=("k1", "k2"), console=ConsoleSettings(is_open=True)) as client:
        await client.post("/v1/completions", json=document, headers=KEY)
        assert (await client.get("/console/requests")).json()["num_kept"] == 0


async def test_one_snapshot_serves_all_pages_and_none_is_made_without(client_of, clock):
    engine = Counting()
    async with client_of(engine) as client:
        await client.post("/v1/completions", json={"model": "fake", "prompt": "hi"})
        assert engine.num_snapshots == 0
        answers = [await client.get("/console/data") for _ in range(MOST_ANSWERS)]
        assert engine.num_snapshots == 1
        assert len({answer.content for answer in answers}) == 1
        refused = await client.get("/console/data")
        assert refused.status_code == 429 and refused.headers["retry-after"]
        clock.now_ns += S
        assert (await client.get("/console/data")).status_code == 200
        assert engine.num_snapshots == 2
        assert (await client.get("/console/data?after=x")).status_code == 400


async def test_what_the_page_is_told(client_of, clock):
    engine = Counting(delay_s=None)
    async with client_of(engine) as client:
        first = (await client.get("/console/data")).json()
        assert (first["running"], first["ttft"], first["tokens_per_s"]) == (0, [None, None, 0], None)
        for instance in first["instances"]:
            assert sum(instance["uses"].values()) == instance["budget"]
        assert first["instances"][0]["uses"]["cached"] == 500 * 5 // 100
        assert first["groups"][0]["layers"] == [[0, 2], [2, 4]]
        (work,) = first["at_work"]
        assert work["rung"] == "drop" and "Instances 0 and 1 run as one pipeline" in work["what"]
        engine.sleep, engine.dead_workers, engine.has_groups = ["asleep", "awake"], {1}, False
        client.state.journal.note_first(clock.now_ns, 0.5)
        client.state.metrics.num_generation_tokens += 30
        clock.now_ns += 2 * S
        second = (await client.get("/console/data")).json()
        assert (second["ttft"], second["tokens_per_s"]) == ([0.5, 0.5, 1], 15.0)
        assert [each["state"] for each in second["instances"]] == ["asleep", "dead"]
        assert [said["rung"] for said in second["at_work"]] == ["sleep", "recover"]
        engine.sleep = ["unprovisioned", "starting"]
        engine.dead_workers, engine.waits = {0, 1}, {1: "no host has room"}
        clock.now_ns += 2 * S
        third = (await client.get("/console/data")).json()
        assert [each["state"] for each in third["instances"]] == ["unprovisioned", "starting"]
        (said,) = third["at_work"]
        assert (said["rung"], said["why"]) == ("scale", "no host has room")


async def test_events_come_once_and_are_bounded(client_of, clock):
    async with client_of() as client:
        start_ns = clock.now_ns
        client.log.append(Record("drop_declined", start_ns - 5 * S, {"group": 0, "reason": HOSTILE}))
        first = (await client.get("/console/data")).json()
        assert [event["why"] for event in first["events"]] == [HOSTILE] and first["last_event"] == 1
        clock.now_ns += S
        for at in range(3 * MOST_EVENTS):
            client.log.append(Record("preempted", clock.now_ns, {"group": 0, "reason": "w", "request_ids": ["r"] * 500,
                                                                 "tokens": at}))
        answer = await client.get("/console/data?after=1")
        told_now = answer.json()
        assert len(told_now["events"]) == MOST_EVENTS and told_now["left_out"] == 2 * MOST_EVENTS
        assert [event["n"] for event in told_now["events"]][-1] == told_now["last_event"] == 1 + 3 * MOST_EVENTS
        assert (await client.get("/console/data")).json()["left_out"] == 0  # another page, which begins to watch now
        clock.now_ns += S
        num_more = MOST_RECORDS + 70
        for at in range(2 * num_more):  # more than is read for a snapshot, and half of them of no use to the page
            kind, ids = ("preempted", ["r"]) if at % 2 else ("chunk_overtaken", [])
            client.log.append(Record(kind, clock.now_ns, {"group": 0, "reason": "w", "request_ids": ids, "tokens": at}))
        burst = (await client.get(f"/console/data?after={told_now['last_event']}")).json()
        assert len(burst["events"]) == MOST_EVENTS and burst["left_out"] == num_more - MOST_EVENTS
        told_now = burst
        clock.now_ns += S
        quiet = await client.get(f"/console/data?after={told_now['last_event']}")
        assert quiet.json()["events"] == [] and quiet.json()["left_out"] == 0
        assert len(quiet.content) < 4_000
        assert len(answer.content) < 4_000 + 300 * MOST_EVENTS


async def test_lists_are_bounded_in_bytes(client_of):
    async with client_of() as client:
        journal = client.state.journal
        for at in range(NUM_KEPT + 50):
            journal.add([row(request_id=f"r-{at}", names=(HOSTILE * 4, "x"), first_ns=at)])
        lists = await client.get("/console/requests")
        assert lists.json()["num_kept"] == NUM_KEPT and len(lists.content) < 40_000
        assert [each["ttft"] for each in lists.json()["slow"]] == sorted(
            (each["ttft"] for each in lists.json()["slow"]), reverse=True)


async def test_a_request_is_found_by_each_of_its_ids(client_of):
    async with client_of() as client:
        asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2}
        chat = await client.post("/v1/chat/completions", json=asked, headers={"x-request-id": HOSTILE.replace(" ", "")})
        named = {"model": "fake", "prompt": HOSTILE, "request_id": HOSTILE}
        completion = (await client.post("/v1/completions", json=named)).json()["id"]
        assert completion == f"cmpl-{HOSTILE}"
        message = {"model": "fake", "messages": asked["messages"], "max_tokens": 4}
        ids = [chat.json()["id"], chat.headers["x-request-id"], completion,
               (await client.post("/v1/messages", json=message)).json()["id"],
               (await client.post("/v1/responses", json={"model": "fake", "input": "hi"})).json()["id"]]
        ways = [(await client.get("/console/request", params={"id": each})).json()["choices"] for each in ids]
        assert [len(choices) for choices in ways] == [2, 2, 1, 1, 1]
        assert ways[2][0]["id"] == completion and "prompt_text" not in ways[2][0]
        assert HOSTILE not in json.dumps(ways[0])
        missing = await client.get("/console/request", params={"id": "nothing"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"
        for wrong in ("", "x" * 601):
            assert (await client.get("/console/request", params={"id": wrong})).status_code == 400


async def test_a_request_under_way_has_a_way_too(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        stream = served.http.stream("POST", f"{served.url}/v1/completions", json={
            "model": "fake", "prompt": "hi", "stream": True})
        async with stream as answer:
            name = answer.headers["x-request-id"]
            lists = (await served.http.get(f"{served.url}/console/requests")).json()
            assert lists["num_under_way"] == 1 and lists["under_way"][0]["ttft"] is None
            way = (await served.http.get(f"{served.url}/console/request", params={"id": name})).json()["choices"][0]
            assert way["verdict"].startswith("It runs, and has waited")
            engine.release()
        assert (await served.http.get(f"{served.url}/console/requests")).json()["num_under_way"] in (0, 1)


def story(row, records=(), *, usual=(0.1, 0.01), objectives=(None, None), now_ns=4 * S, is_whole=True):
    meanwhile = Meanwhile(told_all(records), is_whole)
    return way_of(row, now_ns, Usual(*usual), meanwhile, Objectives(*objectives), lambda ns: ns / S)


def test_a_wait_is_told_with_its_reason_and_what_to_do():
    dropped = Record("drop", S, {"workers": [0, 1], "group": 2, "bytes_to_kv": 2**20, "decision_to_serving_ms": 20})
    way = story(row(), [dropped])
    assert "Its first token came after 3.00 s. Usual here: 0.10 s." in way["verdict"]
    assert any("waited 2.00 s before its first step; 7 other requests" in why for why in way["why"])
    assert any("layers were dropped meanwhile" in why for why in way["why"])
    assert any("--memory" in do for do in way["do"])
    assert [stage["name"] for stage in way["stages"]] == ["waiting", "prompt", "answer"]
    declined = story(row(), [Record("drop_declined", S, {"group": 0, "reason": "it would not pay"})])
    assert any("not dropped: it would not pay" in why for why in declined["why"])
    full = story(row())
    assert any("steps were full" in why for why in full["why"]) and any("More instances" in do for do in full["do"])
    unread = story(row(), is_whole=False)
    assert any("log no longer covers" in why for why in unread["why"]) and not any(
        "instances or cores" in do for do in unread["do"])
    assert not any("no shortage" in why for why in unread["why"])
    runs = story(row(scheduled_ns=None, first_ns=None, ended_ns=None, reason="", is_timed=False), is_whole=False)
    assert "no longer covers" in runs["why"][-1], "the last sentence is what `jettison top` shows"
    woken = story(row(), [Record("wake_decided", S, {"workers": [1], "reason": "queued"})])
    assert any("--min-awake" in do for do in woken["do"])


async def test_a_request_under_way_says_what_it_waits_for(serve):
    """Whether it waits for its first step, or its prompt is computed: as the engine knows it by then."""
    engine = FakeEngine(delay_s=None)
    asked = {"model": "fake", "prompt": "hi", "stream": True}
    async with serve(engine) as served, served.http.stream("POST", f"{served.url}/v1/completions", json=asked):
        (request_id,) = engine.running
        arrival_ns = engine.running[request_id].request.arrival_ns

        async def ways():
            answer = await served.http.get(f"{served.url}/console/request", params={"id": request_id})
            (way,) = answer.json()["choices"]
            return way

        for scheduled_ns, names in ((None, ["waiting"]), (arrival_ns + 5_000_000, ["waiting", "prompt"])):
            engine.milestones[request_id] = RequestTimings(arrival_ns, scheduled_ns, num_preemptions=2)
            way = await ways()
            assert [stage["name"] for stage in way["stages"]] == names and way["preempted"] == 2
        assert way["stages"][0]["s"] == 0.005
        engine.release()


def test_a_request_that_waits_is_not_said_to_have_begun():
    waits = story(row(scheduled_ns=None, first_ns=None, ended_ns=None, reason=""))
    assert any("It has waited 4.00 s for its first step" in why for why in waits["why"])


def test_a_request_under_way_is_not_said_to_have_queued():
    running = row(scheduled_ns=None, ended_ns=None, reason="", is_timed=False)
    for unknown in (running, row(scheduled_ns=None, is_timed=False, reason="abort")):
        way = story(unknown)
        assert way["stages"][0] == {"name": "first", "s": 3.0}
        assert not any("before its first step" in why for why in way["why"]) and not way["do"]
    assert any("is not known" in why for why in story(running)["why"])
    queued = story(row(scheduled_ns=None, first_ns=None, reason="abort"))  # the engine has told that it never began
    assert queued["stages"][0] == {"name": "waiting", "s": 4.0}


def test_a_prompt_a_preemption_and_an_objective_are_told():
    prompt = story(row(scheduled_ns=0), objectives=(1.0, None))
    assert "The objective is 1.00 s: missed." in prompt["verdict"]
    assert any("90 tokens to compute, 10 more were cached" in why for why in prompt["why"])
    mine = Record("preempted", 3 * S, {"group": 0, "reason": "memory", "request_ids": ["r-0"], "tokens": 5})
    other = Record("preempted", 3 * S, {"group": 0, "reason": "memory", "request_ids": ["r-9"], "tokens": 5})
    lost = story(row(num_preemptions=2), [mine, other])
    assert any("lost its place 2 times" in why for why in lost["why"])
    assert [event["mine"] for event in lost["events"]] == [True, False]


def test_a_quick_request_a_batch_and_ends_are_told():
    assert story(row(scheduled_ns=0, first_ns=S // 100), usual=(None, None))["why"] == ["Nothing held it up."]
    assert any("of a batch" in why for why in story(row(is_offline=True))["why"])
    slow = story(row(scheduled_ns=0, first_ns=S // 100, ended_ns=9 * S))
    assert any("tokens came every" in why for why in slow["why"])
    assert any("went away" in why for why in story(row(reason="abort"))["why"])
    assert any("error" in why for why in story(row(reason="error", first_ns=None))["why"])


def test_every_record_of_the_core_has_words_or_is_left_out_by_name():
    text = "\n".join(file.read_text() for file in Path(jettison.core.__file__).parent.rglob("*.py"))
    recorded = set(re.findall(r'Record\(\s*"([a-z_]+)"', text))
    assert len(recorded) > 35
    assert recorded <= KINDS | UNTOLD and not KINDS & UNTOLD
    for kind in sorted(KINDS):
        said = told(Record(kind, 0, {
            "worker": 1, "workers": [0, 1], "group": 2, "reason": "r", "bytes_to_kv": 1, "request_ids": ["a"]}))
        assert said is not None and said.what.endswith(".") and not said.what[0].islower() and "{" not in said.what
        assert said.why == "r"
    assert told(Record("chunk_overtaken", 0, {})) is None


def test_the_newest_records_of_two_logs():
    first = [Record("a", at, {}) for at in (1, 3, 5)]
    second = [Record("b", at, {}) for at in (2, 4)]
    logs = (deque(first), deque(second))

    def read(after_ns, most, kinds="ab", until_ns=None):
        part = newest_records(logs, after_ns, most, kinds, until_ns)
        return [record.time_ns for record in part.records], part.num_older, part.is_whole

    assert read(1, 10) == ([2, 3, 4, 5], 0, True)
    assert read(0, 2) == ([4, 5], 3, False)
    assert read(5, 10) == ([], 0, True)
    assert read(1, 10, "ab", 4) == ([2, 3, 4], 0, True)
    assert read(1, 10, "b", 3) == ([2], 0, True)
    assert read(7, 10, "ab", 3) == ([], 0, True)
    logs = (deque(first, maxlen=2), deque(second))  # the first has forgotten what was before 3
    assert read(2, 10) == ([3, 4, 5], 0, False)
    assert read(3, 10) == ([4, 5], 0, True)
    assert not no_records(0, 10, KINDS).is_whole


def test_the_journal_is_bounded_and_counts_the_last_minute():
    journal = Journal()
    for at in range(10):
        journal.note_first(at, 10.0 - at)
    assert journal.firsts_since(6) == [1.0, 2.0, 3.0]


async def test_a_host_of_the_client_s_making_opens_no_other_key_s_requests(client_of):
    document = {"model": "fake", "prompt": "hi", "max_tokens": 3}
    async with client_of(api_keys=("k1", "k2"), admin_keys=("boss",)) as client:
        made = (await client.post("/v1/completions", json=document, headers=KEY)).json()["id"]
        for host in ("x/health?", "x/ping#", "test/health?/"):
            hostile = OTHER | {"host": host}
            assert (await client.get("/console/requests", headers=hostile)).json()["num_kept"] == 0
            assert (await client.get("/console/request", params={"id": made}, headers=hostile)).status_code == 404


async def test_whose_requests_a_reader_without_a_label_sees(client_of):
    document = {"model": "fake", "prompt": "hi", "max_tokens": 3}
    is_open = ConsoleSettings(is_open=True)
    for settings, seen in (({"api_keys": ("k1",)}, 1), ({"api_keys": ("k1",), "keys_may_change": True}, 0)):
        async with client_of(console=is_open, **settings) as client:
            await client.post("/v1/completions", json=document, headers=KEY)
            assert (await client.get("/console/requests")).json()["num_kept"] == seen
            client.state.keys.replace(["k2"])  # a rotation
            assert (await client.get("/console/requests", headers=OTHER)).json()["num_kept"] == seen


async def test_a_batch_and_many_choices_displace_no_chat(client_of, clock):
    async with client_of() as client:
        journal = client.state.journal
        await client.post("/v1/completions", json={"model": "fake", "prompt": "hi", "max_tokens": 2, "n": 3})
        for at in range(2 * NUM_KEPT):
            journal.add([row(request_id=f"b-{at}", names=(f"line-{at}",), is_offline=True)])
        lists = (await client.get("/console/requests")).json()
        assert lists["num_kept"] == NUM_KEPT + 1 and len(journal.online) == 1
        assert [each["choices"] for each in lists["slow"]] == [3]
        many = {"model": "fake", "prompt": "hi", "max_tokens": 1, "n": MOST_CHOICES + 4}
        made = (await client.post("/v1/completions", json=many)).json()["id"]
        way = (await client.get("/console/request", params={"id": made})).json()
        assert len(way["choices"]) == MOST_CHOICES and way["choices"][0]["choices"] == MOST_CHOICES + 4
        rest = (await client.get("/console/request", params={"id": made, "first": MOST_CHOICES})).json()
        assert len(rest["choices"]) == 4 and rest["first"] == MOST_CHOICES
        for wrong in ("12", "x", "-1"):
            assert (await client.get("/console/request", params={"id": made, "first": wrong})).status_code == 400
        assert [len(rows) for rows in journal.online] == [3, MOST_CHOICES + 4]


def test_choices_that_are_kept_have_a_bound():
    journal = Journal()
    for at in range(NUM_KEPT):
        journal.add([row(request_id=f"r-{at}")])
    for _ in range(12):
        journal.add([row()] * 1024)
    journal.add([row(is_offline=True)] * 2 * NUM_ROWS)
    assert sum(map(len, journal.online)) <= NUM_ROWS and [len(rows) for rows in journal.online] == [1024] * 7
    assert [len(rows) for rows in journal.offline] == [2 * NUM_ROWS], "the newest stays"


async def test_requests_with_one_id_are_told_apart(client_of):
    async with client_of() as client:
        asked = {"model": "fake", "prompt": "hi", "max_tokens": 2}
        same = [(await client.post("/v1/completions", json=asked, headers={"x-request-id": "same"})).json()["id"]
                for _ in range(3)]
        way = (await client.get("/console/request", params={"id": "same"})).json()
        assert [each["id"] for each in way["choices"]] == same[-1:] and way["num_others"] == 2
        way = (await client.get("/console/request", params={"id": same[0]})).json()
        assert [each["id"] for each in way["choices"]] == same[:1] and way["num_others"] == 0


async def test_lists_and_ways_share_a_bound_and_each_record_is_told_once(client_of, clock, monkeypatch):
    async with client_of() as client:
        client.state.journal.add([row(request_id=f"r-{at}", arrival_ns=clock.now_ns, ended_ns=clock.now_ns + 4 * S)
                                  for at in range(MOST_CHOICES)])
        for at in range(40):
            client.log.append(Record("preempted", clock.now_ns + S, {"group": 0, "request_ids": ["r"], "tokens": at}))
        client.log.append(Record("preempted", clock.now_ns + 9 * S, {"group": 0, "request_ids": ["r"], "tokens": 1}))
        num_told = []
        monkeypatch.setattr("jettison.server.console.words.told", lambda record: num_told.append(1) or told(record))
        choices = (await client.get("/console/request?id=cmpl-1")).json()["choices"]
        assert [len(each["events"]) for each in choices] == [40] * MOST_CHOICES and len(num_told) == 40
        paths = ("/console/request?id=cmpl-1", "/console/requests")
        answers = [await client.get(paths[at % 2]) for at in range(MOST_ASKED)]
        assert [each.status_code for each in answers] == [200] * (MOST_ASKED - 1) + [429]
        assert answers[-1].headers["retry-after"] and (await client.get("/console/data")).status_code == 200
        clock.now_ns += S
        assert (await client.get("/console/requests")).status_code == 200


async def test_lines_of_batches_are_under_way_and_found_by_their_custom_ids(serve, tokenizer_dir, tmp_path):
    engine = FakeEngine(delay_s=None)
    batches = BatchSettings(folder=tmp_path / "batches", tokenizer_dir=tokenizer_dir)
    async with serve(engine, batches=batches) as served, served.openai() as client:

        async def lists_with(name, num):
            async with asyncio.timeout(PATIENCE_S):
                while (lists := (await served.http.get(f"{served.url}/console/requests")).json())[name] != num:
                    await asyncio.sleep(0.1)
            return lists

        file = await client.files.create(file=("in.jsonl", jsonl(line("a"), line("b"))), purpose="batch")
        await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        lists = await lists_with("num_under_way", 2)
        assert [each["batch"] for each in lists["under_way"]] == [True, True] and lists["num_kept"] == 0
        found = await served.http.get(f"{served.url}/console/request", params={"id": "a"})
        assert found.json()["choices"][0]["ended"] == ""
        engine.release()
        assert (await lists_with("num_kept", 2))["num_under_way"] == 0
        found = await served.http.get(f"{served.url}/console/request", params={"id": "b"})
        assert found.json()["choices"][0]["ended"] == "length"
