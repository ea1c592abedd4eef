"""What is left out (embeddings, scores, adapters, images, sound) is refused by name, whichever way it is asked for."""

from __future__ import annotations

import openai
import pytest
from fake_engine import FakeEngine

CHAT = {"model": "fake", "max_tokens": 2}
PATHS = {
    "/v1/embeddings": "Embeddings are not served here", "/embeddings": "Embeddings are not served here",
    "/v1/rerank": "Scores and classes", "/rerank": "Scores and classes", "/v2/rerank": "Scores and classes",
    "/v1/score": "Scores and classes", "/score": "Scores and classes", "/pooling": "Scores and classes",
    "/classify": "Scores and classes", "/v1/moderations": "Scores and classes",
    "/v1/load_lora_adapter": "Adapters (LoRA) are not", "/v1/unload_lora_adapter": "Adapters (LoRA) are not",
    "/v1/images/generations": "Images, sound and video", "/v1/audio/transcriptions": "Images, sound and video",
    "/v1/audio/speech": "Images, sound and video",
}  # fmt: skip
PARTS = {
    "image_url": {"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}},
    "input_image": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    "image": {"type": "image", "image": "AAAA"},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "audio_url": {"type": "audio_url", "audio_url": {"url": "http://10.0.0.1/"}},
    "video_url": {"type": "video_url", "video_url": {"url": "http://10.0.0.1/"}},
    "file": {"type": "file", "file": {"file_id": "file-1"}},
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_that_is_left_out_says_so(path, app_client):
    for method, name in ((app_client.post, "POST"), (app_client.get, "GET")):
        answer = await method(path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "not_found", None)
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(f"There is no {name} {path}. {PATHS[path]}")
        assert error["message"].endswith("use /v1/chat/completions or /v1/completions.")


async def test_openais_client_is_told_of_embeddings(serve):
    async with serve(FakeEngine()) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.NotFoundError, match="Embeddings are not served here"):
            await client.embeddings.create(model="fake", input="x")


@pytest.mark.parametrize("model", ["fake:adapter", "fake/adapter", "my-lora"])
async def test_an_adapters_name_is_an_unknown_model(model, app_client, app_engine):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):  # fmt: skip
        answer = await app_client.post(path, json={**CHAT, **body, "model": model})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert model in error["message"] and "this server serves 'fake'" in error["message"]
    assert (await app_client.get(f"/v1/models/{model}")).status_code == 404
    assert not app_engine.accepted


@pytest.mark.parametrize("kind", PARTS)
async def test_a_part_that_is_no_text_is_named(kind, app_client, app_engine):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, PARTS[kind]]},
    ]
    answer = await app_client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_content")
    assert error["param"] == "messages[1].content[1]"
    assert f"a part of type '{kind}' is not supported" in error["message"]
    assert not app_engine.accepted


async def test_a_part_without_a_type_is_refused(app_client):
    messages = [{"role": "user", "content": [{"image": "AAAA"}]}]
    answer = await app_client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert answer.status_code == 400 and "a part without a type" in answer.json()["error"]["message"]
