"""One spelling of a path, and requests that are answered however theirs is spelt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from jettison.server.paths import plain_path

BODY = {"model": "fake", "prompt": "hi", "max_tokens": 2}
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PATHS = st.text("/av1.%", max_size=12).map(lambda text: "/" + text)


@pytest.mark.parametrize(
    ("path", "root", "plain"),
    [
        ("/v1/models", "", "/v1/models"), ("/v1/models/", "", "/v1/models"), ("//v1//models//", "", "/v1/models"),
        ("/", "", "/"), ("///", "", "/"), ("/api/v1/models/", "/api", "/v1/models"), ("/api", "/api", "/"),
        ("/v1/models", "/api", "/v1/models"), ("/apiv1", "/api", "/apiv1"), ("//api//v1/x", "/api", "/v1/x"),
        ("/a/b/ping", "/a/b", "/ping"), ("/api/api/v1", "/api", "/api/v1"),
    ],
)  # fmt: skip
def test_the_plain_path(path, root, plain):
    assert plain_path(path, root) == plain


@given(PATHS)
def test_a_plain_path_stays_as_it_is(path):
    plain = plain_path(path)
    assert plain_path(plain) == plain
    assert plain.startswith("/") and "//" not in plain and (plain == "/" or not plain.endswith("/"))


async def test_a_post_is_answered_where_it_is_sent(app_client):
    for path in ("/v1/completions/", "//v1/completions", "/v1//completions//", "/v1/completions/?a=b"):
        answer = await app_client.post(f"http://test{path}", json=BODY)
        assert (answer.status_code, answer.history) == (200, []), path
    for path in ("/v1//chat/completions", "/v1/chat/completions/"):
        assert (await app_client.post(path, json=MESSAGES)).status_code == 200
    assert (await app_client.post("/tokenize/", json={"prompt": "a"})).json()["count"] == 1


async def test_what_is_not_there_says_what_is_wrong_with_the_base_url(app_client):
    for path, hint in (
        ("/chat/completions", "The API is under /v1"), ("/completions/", "The API is under /v1"),
        ("/v1/v1/chat/completions", "/v1 stands in it twice"), ("/v1/nothing", ""), ("/api/generate", ""),
    ):  # fmt: skip
        answer = await app_client.post(path, json=MESSAGES)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found")
        assert error["message"].startswith(f"There is no POST {path.rstrip('/')}.")
        assert hint in error["message"] and (hint or error["message"].endswith("."))


@pytest.mark.parametrize("name", ["org/model", "/data/models/m", "a//b", "plain"])
async def test_a_model_s_name_may_have_slashes(serve, name):
    async with serve(FakeEngine(), model_names=(name,)) as served:
        for path in (f"/v1/models/{name}", f"/v1/models/{name.replace('/', '%2F')}", f"//v1/models/{name}/"):
            answer = await served.http.get(served.url + path)
            assert (answer.status_code, answer.json().get("id")) == (200, name), path


async def test_a_proxy_may_cut_its_path_off_or_not(serve):
    async with serve(FakeEngine(), root_path="/llm/api", api_keys=("k",)) as served:
        for root in ("", "/llm/api", "/llm/api/", "//llm//api"):
            answer = await served.post(f"{root}/v1/completions", BODY, headers={"authorization": "Bearer k"})
            assert answer.status_code == 200, root
            assert (await served.post(f"{root}/v1/completions", BODY)).status_code == 401
            assert (await served.http.get(f"{served.url}{root}/health")).status_code == 200
            assert (await served.http.get(f"{served.url}{root}/metrics")).status_code == 200
        assert (await served.http.get(f"{served.url}/llm/apix/health")).status_code == 401


async def test_probes_beyond_the_limit_are_spelt_as_they_like(serve):
    async with serve(FakeEngine(), max_connections=0, root_path="/api") as served:
        for path, status in (("/health", 200), ("/ping/", 200), ("/api/health?x=1", 200), ("/v1/models", 503)):
            answer = await served.http.get(served.url + path, headers={"connection": "close"})
            assert answer.status_code == status, path


async def test_a_line_end_in_a_path_opens_nothing(serve):
    control = SimpleNamespace(sleep=lambda *_: {}, wake=lambda *_: {}, states=lambda *_: {})
    async with serve(FakeEngine(), admin_keys=("a",), root_path="/api", sleep_control=control) as served:
        for path in ("/sleep%0a", "/wake_up%0A/", "/api/sleep%0a", "/api%0a/sleep", "/sleep%00", "/%0dsleep"):
            answer = await served.post(path, {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_path"), path
        for path in ("/sleep", "/sleep/", "//sleep", "/%73leep", "/sleep%2f", "/api/sleep", "/api/%2Fwake_up?level=1"):
            assert (await served.post(path, {})).status_code == 401, path
