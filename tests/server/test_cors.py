"""What a browser asks before and reads after a page of another origin uses the server."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fake_engine import FakeEngine

from jettison.server.cors import CorsSettings

PAGE = "https://chat.example"
BODY = {"model": "fake", "prompt": "hi", "max_tokens": 3}
ALLOWED = "access-control-allow-origin"


def preflight(origin=PAGE, method="POST", headers="authorization, content-type, x-stainless-os"):
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}


async def ask(served, method, path, origin=PAGE, **options):
    headers = ({} if origin is None else {"origin": origin}) | options.pop("headers", {})
    return await served.http.request(method, served.url + path, headers=headers, **options)


async def test_without_origins_there_is_nothing_of_it(serve):
    async with serve(FakeEngine(), api_keys=("k",)) as served:
        answer = await ask(served, "OPTIONS", "/v1/completions", headers=preflight())
        assert answer.status_code == 401
        answer = await ask(served, "OPTIONS", "/v1/completions", headers=preflight() | {"authorization": "Bearer k"})
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = await ask(served, "GET", "/health")
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize("origins", [("*",), (PAGE,), ("http://other", PAGE)])
async def test_a_preflight_needs_no_key(serve, origins):
    async with serve(FakeEngine(), api_keys=("k",), cors=CorsSettings(origins)) as served:
        for path in ("/v1/chat/completions", "/v1/models", "/v1/files", "/nowhere/"):
            for method in ("POST", "GET", "DELETE"):
                answer = await ask(served, "OPTIONS", path, headers=preflight(method=method))
                assert (answer.status_code, answer.headers[ALLOWED]) == (200, "*" if "*" in origins else PAGE)
                assert method in answer.headers["access-control-allow-methods"]
                assert answer.headers["access-control-allow-headers"] == preflight()["access-control-request-headers"]
        answer = await ask(served, "OPTIONS", "/v1/models", headers=preflight("http://evil.example"))
        assert (answer.status_code, answer.headers.get(ALLOWED)) == ((200, "*") if "*" in origins else (400, None))


async def test_methods_headers_and_credentials_are_as_they_are_set(serve):
    cors = CorsSettings((PAGE,), ("get", "POST"), ("Authorization",), credentials=True)
    async with serve(FakeEngine(), cors=cors) as served:
        for asked, status in (
            (preflight(headers="authorization"), 200), (preflight(headers="x-other"), 400),
            (preflight(method="GET", headers="content-type"), 200), (preflight(method="DELETE", headers=""), 400),
        ):  # fmt: skip
            answer = await ask(served, "OPTIONS", "/v1/models", headers=asked)
            assert answer.status_code == status, asked
        assert answer.headers["access-control-allow-credentials"] == "true"
        answer = await ask(served, "GET", "/v1/models")
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert (answer.headers[ALLOWED], answer.headers["vary"]) == (PAGE, "Origin")
    async with serve(FakeEngine(), cors=CorsSettings(("*",), credentials=True)) as served:
        answer = await ask(served, "GET", "/v1/models")  # a browser takes no * together with cookies
        assert answer.headers[ALLOWED] == PAGE


@pytest.mark.parametrize("origins", [("*",), (PAGE,)])
async def test_every_answer_can_be_read_by_the_page(serve, origins):
    engine = FakeEngine()
    limits = {"max_header_bytes": 2000, "max_body_bytes": 5000}
    async with serve(engine, api_keys=("k",), cors=CorsSettings(origins), **limits) as served:
        key = {"authorization": "Bearer k"}

        async def told(status, method="POST", path="/v1/completions", **options):
            answer = await ask(served, method, path, **{"headers": key} | options)
            assert answer.status_code == status, answer.text
            assert answer.headers[ALLOWED] == ("*" if "*" in origins else PAGE), status
            assert "retry-after-ms" in answer.headers["access-control-expose-headers"]
            stranger = await ask(served, method, path, **{"headers": key} | options, origin="http://evil.example")
            assert stranger.headers.get(ALLOWED) == ("*" if "*" in origins else None), status
            return answer

        await told(200, json=BODY)
        stream = await told(200, json=BODY | {"stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
        await told(401, headers={}, json=BODY)
        await told(400, json=BODY | {"temperature": 9})
        await told(404, json=BODY | {"model": "none"})
        await told(404, path="/nowhere")
        await told(405, method="GET")
        await told(413, content=b"x" * 6000, headers=key | {"content-type": "application/json"})
        await told(415, content=b"x", headers=key | {"content-encoding": "br"})
        await told(431, headers=key | {"x-a": "a" * 3000})
        engine.max_waiting = 0
        await told(429, json=BODY)
        engine.engine_state, engine.loading_left_s = "loading", 3.0
        await told(503, json=BODY)
        await told(503, method="GET", path="/health")


async def test_what_the_connection_itself_answers_can_be_read_too(serve):
    async with serve(FakeEngine(), cors=CorsSettings((PAGE,)), header_timeout_s=0.2) as served:
        for bytes_sent, status in (
            (b"GET /health HTTP/1.1\r\norigin: %s\r\nx-a" % PAGE.encode(), 408),
            (b"POST / HTTP/1.1\r\norigin: %s\r\ncontent-length: x\r\n\r\n" % PAGE.encode(), 400),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(bytes_sent)
            answer = (await reader.read()).decode()
            writer.close()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert f"{ALLOWED}: {PAGE}\r\n" in answer
    async with serve(FakeEngine(), cors=CorsSettings(("*",)), max_connections=0) as served, httpx.AsyncClient() as http:
        answer = await http.get(f"{served.url}/v1/models", headers={"origin": PAGE})
        assert (answer.status_code, answer.headers[ALLOWED]) == (503, "*")


def test_flags_are_json_lists_as_vllm_has_them():
    from jettison.config import EngineConfig
    from jettison.errors import ConfigError

    def resolved(**flags):
        return EngineConfig.resolve(model="m", **flags).cors

    assert resolved().origins == ()
    assert resolved(allowed_origins="[]").origins == resolved(allowed_origins="").origins == ()
    assert resolved(allowed_origins='["*"]').origins == ("*",)
    both = resolved(allowed_origins='["http://localhost:3000/", "HTTPS://Chat.example"]', allowed_methods='["GET"]')
    assert both.origins == ("http://localhost:3000", "https://chat.example")
    assert (both.methods, both.headers, both.credentials) == (("GET",), ("*",), False)
    assert resolved(allowed_origins=["https://a", "https://b"]).origins == ("https://a", "https://b")  # a YAML list
    assert resolved(allowed_origins=("https://a", '["null"]'), allow_credentials=True).origins == ("https://a", "null")
    for bad in ("chat.example", '["a"', "[1]", '["https://a/path"]', '[["*"]]', json.dumps([""])):
        with pytest.raises(ConfigError, match="allowed-origins") as caught:
            resolved(allowed_origins=bad)
        assert "\n" not in str(caught.value)
