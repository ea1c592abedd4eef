"""One and two front ends before a real hub, in one process: each kind of path, and what only the controller knows.

The whole suite of this folder runs so in ``make test-front-ends``.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
from contextlib import AsyncExitStack

import httpx
import openai
import pytest
from fake_engine import FakeEngine, bytes_of
from served import eventually, sse_events, trust

from jettison.errors import KeyLimitError
from jettison.server.completions import CompletionEndpoint
from jettison.server.cors import CorsSettings
from jettison.server.fronts import forward, front
from jettison.server.fronts.start import CARRIED, carried, divided, settings_of
from jettison.server.settings import ServerSettings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
NUM_STREAMS = 16
"""That all of them come to one of two front ends is as good as impossible."""


@pytest.fixture(params=[1, 2])
def num_fronts(request):
    return request.param


async def test_streams_and_whole_answers_are_the_engines(serve):
    async with serve(FakeEngine(bytes_of("abcdefgh"))) as served:
        whole = await served.post("/v1/chat/completions", CHAT)
        assert whole.json()["choices"][0]["message"]["content"] == "abcd"
        assert whole.headers["x-request-id"]
        stream = await served.post("/v1/chat/completions", CHAT | {"stream": True, "n": 2})
        chunks = [json.loads(event) for event in sse_events(stream.text)[:-1]]
        for index in range(2):
            text = "".join(each["delta"].get("content", "") for chunk in chunks for each in chunk["choices"]
                           if each["index"] == index)  # fmt: skip
            assert text == "abcd"
        logprobs = await served.completion(max_tokens=2, logprobs=2, echo=True)
        assert len(logprobs.json()["choices"][0]["logprobs"]["tokens"]) == 4
        message = await served.post("/v1/messages", CHAT)
        assert message.json()["content"][0]["text"] == "abcd"


async def test_streams_of_many_clients_do_not_mix(serve):
    async with serve(FakeEngine(delay_s=0.001)) as served:
        async def one(seed):
            # A connection of its own, so that it may go to either.
            async with httpx.AsyncClient(verify=trust()) as http:
                document = {"model": "fake", "prompt": "p", "max_tokens": 20, "seed": seed}
                answer = await http.post(f"{served.url}/v1/completions", json=document)
            return answer.json()["choices"][0]["text"]

        texts = await asyncio.gather(*map(one, range(26)))
        assert texts == ["".join(chr(97 + (seed + at) % 26) for at in range(20)) for seed in range(26)]
        await eventually(lambda: served.state.admission.num_active == served.state.admission.num_choices == 0)
        assert not served.state.far_generations


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/health"), ("GET", "/ping"), ("GET", "/version"), ("GET", "/load"), ("GET", "/metrics"),
    ("GET", "/v1/models"), ("GET", "/tokenizer_info"), ("GET", "/console"), ("GET", "/console/data"), ("HEAD", "/ping"),
    ("GET", "/v1//models/"),
])  # fmt: skip
async def test_the_controllers_paths_work_through_each(serve, method, path):
    async with serve(FakeEngine()) as served:
        answer = await served.http.request(method, f"{served.url}{path}")
        assert answer.status_code in (200, 308)
        assert len(answer.headers.get_list("x-request-id")) == len(answer.headers.get_list("date")) == 1
        assert bool(answer.content) == (method != "HEAD" and answer.status_code == 200)


async def test_what_is_wrong_is_refused_as_ever(serve):
    async with serve(FakeEngine(), api_keys=("one",)) as served:
        assert (await served.completion()).status_code == 401
        assert (await served.http.get(f"{served.url}/v1/models")).status_code == 401
        good = {"authorization": "Bearer one"}
        assert (await served.post("/v1/completions", {"prompt": "p"}, headers=good)).status_code == 200
        assert (await served.post("/nothing", {}, headers=good)).status_code == 404
        assert (await served.http.get(f"{served.url}/v1/completions", headers=good)).status_code == 405
        answer = await served.post("/v1/completions", {"prompt": "p", "max_tokens": 9999}, headers=good)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        served.state.keys.replace(("two",))  # as SIGHUP does
        states = served.fronts.states.values()
        await eventually(lambda: all(state.keys.digests == served.state.keys.digests for state in states))
        assert (await served.post("/v1/completions", {"prompt": "p"}, headers=good)).status_code == 401


async def test_limits_of_keys_and_of_the_queue_hold_over_all(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, api_keys=("one", "two"), max_active_reqs_per_key=2) as served:
        async def ask(key, **fields):
            async with httpx.AsyncClient(timeout=20, verify=trust()) as http:
                return await http.post(f"{served.url}/v1/completions", json={"prompt": "p", "max_tokens": 1} | fields,
                                       headers={"authorization": f"Bearer {key}"})  # fmt: skip

        running = [asyncio.create_task(ask("one")) for _ in range(2)]
        await eventually(lambda: len(engine.accepted) == 2)
        for fields in ({}, {"stream": True}):
            answer = await ask("one", **fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "key_limit_reached")
        answer = await ask("two", n=3)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        engine.num_waiting = engine.max_waiting = 1
        answer = await ask("two", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert (await served.http.get(f"{served.url}/load", headers={"authorization": "Bearer two"})).json()[
            "server_load"] == 2
        engine.max_waiting = None
        engine.release()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
        await eventually(lambda: served.state.admission.num_choices == 0)
        sheds = await counted(served)
        assert (sheds["key_limit_reached"], sheds["queue_full"]) == (2, 1)


async def test_the_controller_counts_what_a_front_end_prepares(serve, monkeypatch):
    is_held, prepare = asyncio.Event(), CompletionEndpoint.prepare

    async def held(self, document):
        await is_held.wait()
        return await prepare(self, document)

    monkeypatch.setattr(CompletionEndpoint, "prepare", held)
    async with serve(FakeEngine()) as served:
        asked = [asyncio.create_task(served.completion(max_tokens=1)) for _ in range(3)]
        await eventually(lambda: served.state.admission.num_arriving == 3)
        is_held.set()
        assert [(await answer).status_code for answer in asked] == [200] * 3
        assert served.state.admission.num_arriving == 0


async def counted(served):
    await served.state.fronts.gather()
    return served.state.all_metrics()._sheds


async def test_responses_that_one_kept_another_finds(serve):
    async with serve(FakeEngine(bytes_of("ab"))) as served:
        async def fresh(method, path, **options):
            async with httpx.AsyncClient(timeout=20, verify=trust()) as http:
                return await http.request(method, f"{served.url}{path}", **options)

        asked = {"model": "fake", "input": "hi", "max_output_tokens": 16}
        first = (await fresh("POST", "/v1/responses", json=asked)).json()
        for _ in range(4):
            assert (await fresh("GET", f"/v1/responses/{first['id']}")).json()["id"] == first["id"]
            asked = {"model": "fake", "input": "x", "previous_response_id": first["id"], "max_output_tokens": 16}
            assert (await fresh("POST", "/v1/responses", json=asked)).status_code == 200
            referring = asked | {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]}
            assert (await fresh("POST", "/v1/responses", json=referring)).status_code == 200
        assert (await fresh("DELETE", f"/v1/responses/{first['id']}")).json()["deleted"]
        assert (await fresh("POST", "/v1/responses", json=asked)).status_code == 404


async def test_files_and_batches_are_the_controllers(serve, batch_settings):
    async with serve(FakeEngine(bytes_of("ab")), batches=batch_settings()) as served:
        client = served.openai()
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
                "body": {"model": "fake", "prompt": "p", "max_tokens": 2}}  # fmt: skip
        content = b"\n".join(json.dumps(line | {"custom_id": f"{n}"}).encode() for n in range(3000))
        file = await client.files.create(file=("x.jsonl", content), purpose="batch")
        assert (await client.files.content(file.id)).content == content  # several frames of the way, up and down
        small = await client.files.create(file=("x.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=small.id, endpoint="/v1/completions", completion_window="24h")
        async with asyncio.timeout(30):
            while (batch := await client.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.05)
        assert (await client.files.content(batch.output_file_id)).text.count('"text":"ab"') == 1


async def test_a_body_that_is_announced_is_asked_for_by_the_controller_alone(serve, batch_settings):
    body = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    head = ("POST /v1/files HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n"
            "content-type: multipart/form-data; boundary=x\r\nauthorization: Bearer {}\r\nconnection: close\r\n\r\n")

    async with serve(FakeEngine(), api_keys=("good",), batches=batch_settings()) as served:
        async def first_line(key, length):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head.format(length, key).encode())
            line = await reader.readline()
            if b" 100 " in line:
                await reader.readline()
                writer.write(body)
                line += await reader.readline()
            writer.close()
            return line.decode()

        assert (await first_line("bad", len(body))).startswith("HTTP/1.1 401 ")
        assert (await first_line("good", 10**15)).startswith("HTTP/1.1 413 ")
        told = (await first_line("good", len(body))).splitlines()
        assert " 100 " in told[0] and told[1].startswith("HTTP/1.1 400 ")


@pytest.mark.parametrize(("number", "told"), [(errno.EMFILE, forward.FULL), (errno.ECONNREFUSED, forward.GONE)])
async def test_a_lack_of_descriptors_is_not_told_as_an_end(serve, monkeypatch, number, told):
    """And the answer, which no controller gives, has the headers of all others."""

    async def fails(path):
        raise OSError(number, "x")

    asked = {"x-request-id": "mine", "origin": "http://page"}
    async with serve(FakeEngine(), cors=CorsSettings(("http://page",))) as served:
        monkeypatch.setattr(asyncio, "open_unix_connection", fails)
        answer = await served.http.get(f"{served.url}/v1/models", headers=asked)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, told)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["access-control-allow-origin"] == "http://page"
        answer = await served.http.delete(f"{served.url}/v1/messages")
        assert answer.json()["type"] == "error"
        assert len(answer.headers["x-request-id"]) == 32 and answer.headers["request-id"]


async def test_a_full_front_end_answers_probes(serve, num_fronts):
    """Beyond the limit of each there is room for probes, here and on the way to the controller."""
    engine = FakeEngine(delay_s=None)
    async with AsyncExitStack() as kept, serve(engine, max_connections=1) as served:
        for number in range(6):  # each on a connection of its own that stays, where it may
            http = await kept.enter_async_context(httpx.AsyncClient(timeout=20, verify=trust()))
            body = {"model": "fake", "prompt": "x", "stream": True}
            request = http.build_request("POST", f"{served.url}/v1/completions", json=body)
            answer = await http.send(request, stream=True)
            kept.push_async_callback(answer.aclose)
            assert answer.status_code in ((200,) if not number else (503,) if num_fronts == 1 else (200, 503))
            for path in ("/health", "/ping"):
                assert (await http.get(f"{served.url}{path}")).status_code == 200
        if num_fronts == 1:  # else the last client may have a place at the other one
            answer = await http.get(f"{served.url}/v1/models")
            assert answer.json()["error"]["code"] == "too_many_connections"


async def test_a_request_of_many_long_prompts_leaves_its_front_end_alive(serve):
    async with serve(FakeEngine(bytes_of("a"), max_model_len=60000)) as served:
        other = asyncio.create_task(served.completion(max_tokens=1))
        answer = await served.post("/v1/completions", {
            "model": "fake", "prompt": ["é" * 24000] * 16, "n": 64, "max_tokens": 1})
        assert len(answer.json()["choices"]) == 1024
        assert (await other).status_code == 200
        assert not served.fronts.lost


async def test_the_console_and_the_books_have_what_every_front_end_did(serve):
    recorded, traced = [], []
    engine = FakeEngine(delay_s=None)
    settings = {"record_request": lambda *row: recorded.append(row), "trace_request": traced.append}
    async with serve(engine, **settings) as served:
        asks = [asyncio.create_task(served.completion(max_tokens=3, stream=True)) for _ in range(3)]
        await eventually(lambda: len(served.state.far_generations) == 3 == len(engine.accepted))
        lists = (await served.http.get(f"{served.url}/console/requests")).json()
        assert lists["num_under_way"] == 3
        engine.release()
        await asyncio.gather(*asks)
        await eventually(lambda: len(recorded) == len(traced) == 3)
        lists = (await served.http.get(f"{served.url}/console/requests")).json()
        assert (lists["num_under_way"], len(lists["recent"]), len(lists["slow"])) == (0, 3, 3)
        answer = await served.http.get(f"{served.url}/console/request?id={lists['recent'][0]['id']}")
        assert answer.status_code == 200
        text = (await served.http.get(f"{served.url}/metrics")).text
        assert 'vllm:generation_tokens_total{model_name="fake"} 9.0' in text


async def test_who_leaves_is_cancelled_and_the_end_cuts_off_with_an_error(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, shutdown_timeout_s=0.2) as served:
        gone = asyncio.create_task(served.completion(stream=True))
        await eventually(lambda: len(engine.accepted) == 1)
        gone.cancel()
        await eventually(lambda: engine.cancelled == [engine.accepted[0].request_id])
        await eventually(lambda: served.state.admission.num_active == 0)
        cut = asyncio.create_task(served.completion(stream=True))
        await eventually(lambda: len(engine.accepted) == 2)
        served.stop.set()
        assert json.loads(sse_events((await cut).text)[0])["error"]["code"] == "shutting_down"


async def test_a_lost_one_ends_its_own_connections_and_keeps_its_counts(serve, num_fronts):
    engine = FakeEngine(delay_s=0.01)
    async with serve(engine) as served:
        await served.completion(max_tokens=3)
        await counted(served)
        streams = [asyncio.create_task(served.openai().completions.create(
            model="fake", prompt="p", max_tokens=100, extra_body={"min_tokens": 100})) for _ in range(NUM_STREAMS)]
        await eventually(lambda: len(engine.accepted) == 1 + NUM_STREAMS)
        served.fronts.channels[0].hang_up("killed")
        results = await asyncio.gather(*streams, return_exceptions=True)
        lost = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(each, openai.APIError) for each in lost)
        assert len(engine.cancelled) == len(lost)
        assert len(lost) == NUM_STREAMS if num_fronts == 1 else 0 < len(lost) < NUM_STREAMS
        assert all(len(each.choices[0].text) == 100 for each in results if each not in lost)
        assert served.state.admission.num_active == 0
        assert served.state.all_metrics().num_generation_tokens >= 3
        assert served.state.all_metrics()._finished["abort"] == len(lost)
        assert served.state.fronts.health() == {"front_ends": {"alive": num_fronts - 1, "total": num_fronts}}
        assert served.state.fronts.troubles() == [f"1 of {num_fronts} front ends take no connections: a process starts"]


def test_settings_travel_as_they_are():
    settings = ServerSettings(("a", "b"), max_stops=7, root_path="/x", default_seed=3, max_active_reqs_per_key=9)
    again = settings_of(carried(settings))
    assert all(getattr(again, name) == getattr(settings, name) for name in CARRIED)


async def test_places_that_another_controller_gave_are_taken_again_without_their_limits(serve, num_fronts):
    async with serve(FakeEngine(delay_s=None), api_keys=("one", "two"), max_active_reqs_per_key=2) as served:
        state, desk = served.state, served.fronts.desk
        with state.admission.arrival("other") as arrival:  # came before the front end was back
            arrival.claim(2)
            desk.back(0, 77, "other", 2)
            assert (state.admission.num_choices, state.admission.num_active) == (4, 2)
            with pytest.raises(KeyLimitError), state.admission.arrival("other"):
                pass
        desk.leave(0, 77)
        assert (state.admission.num_choices, state.admission.num_active) == (0, 0)


def test_bounds_of_memory_are_divided_and_those_of_descriptors_are_each_process_s():
    whole = ServerSettings(("a",), max_connections=101)
    for number in (1, 2, 4):
        part = divided(whole, number)
        assert part.max_buffered_bytes == whole.max_buffered_bytes // number
        assert part.max_connections == 51, "each may need a second descriptor for its way to the controller"
    assert divided(ServerSettings(("a",)), 2).max_connections is None


DOORS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "fake", "prompt": ["hi", "ho"], "n": 2, "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 16},
    "/v1/messages": CHAT,
}


async def told_in_two_parts(served, path, document, at_half):
    """The answer to a request of which the controller hears before its body has come."""
    body, rest = json.dumps(document).encode(), asyncio.Event()

    async def parts():
        yield body[:5]
        await rest.wait()
        yield body[5:]

    asking = asyncio.create_task(
        served.http.post(served.url + path, content=parts(), headers={"content-type": "application/json"}))
    await at_half()
    rest.set()
    return asking


@pytest.mark.parametrize("num_fronts", [1], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DOORS)
async def test_requests_wait_at_every_door_for_the_next_controller(serve, path, stream):
    """One that was let in and comes to the engine while there is no controller, and one that comes meanwhile."""
    engine, document = FakeEngine(bytes_of("abcd")), DOORS[path] | {"stream": stream}
    async with serve(engine, orphan_timeout_s=1000.0) as served:
        expected = await served.post(path, document)
        num_before, remote = len(engine.accepted), served.fronts.states[0].engine

        async def let_in_and_parted():
            await eventually(lambda: served.state.admission.num_active == 1)
            await served.fronts.part(0)

        early = await told_in_two_parts(served, path, document, let_in_and_parted)
        late = asyncio.create_task(served.post(path, document))
        # The early one waits for its first token, or with several choices for their places.
        await eventually(lambda: bool(remote.open_requests) + remote.num_asked == 2)
        assert len(engine.accepted) == num_before and not early.done() and not late.done()
        await served.fronts.connect(0)
        for answer in await asyncio.gather(early, late):
            assert answer.status_code == 200 and shown(answer) == shown(expected)
        await eventually(lambda: not served.state.admission.num_active and not served.state.far_generations)


def shown(answer):
    """All that an answer says, but for its ids and times."""
    return re.findall(r'"(?:text|content|delta|finish_reason|stop_reason)":"([^"]*)"', answer.text)


@pytest.mark.parametrize("num_fronts", [1], indirect=True)
async def test_requests_that_wait_in_vain_for_the_next_controller_are_told_so_and_are_bounded(serve, monkeypatch):
    engine = FakeEngine()
    async with serve(engine, orphan_timeout_s=1000.0) as served:
        remote = served.fronts.states[0].engine
        await served.fronts.part(0)
        waiting = asyncio.create_task(served.completion())
        await eventually(lambda: remote.num_asked == 1)
        monkeypatch.setattr(front, "MOST_WAITING", 1)
        assert (await served.completion()).status_code == 503
        assert not waiting.done()
        monkeypatch.setattr(front, "MOST_WAITING", 2)
        monkeypatch.setattr(served.fronts.states[0], "_is_draining", True)
        assert (await served.completion()).status_code == 503, "a front end that ends lets none wait"
        monkeypatch.setattr(served.fronts.states[0], "_is_draining", False)
        monkeypatch.setattr(front, "MOST_WAITING", 1)
        remote._end_all()  # as when the time is up
        assert (await waiting).status_code == 503
        assert (await served.completion()).status_code == 503
        await served.fronts.connect(0)
        await eventually(lambda: remote.state == "ready")
        assert (await served.completion()).status_code == 200
