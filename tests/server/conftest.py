"""A byte-level tokenizer made on the spot, a fake engine, and a real server on a loopback port."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jettison.server.app import create_app, server_state
from jettison.server.serving import run_server
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer

BOS, EOS, PAD, USER = 256, 257, 258, 259
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_vocabulary() -> dict[str, int]:
    """Token ``b`` stands for byte ``b``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    assert sorted(vocabulary, key=ord) == alphabet
    return vocabulary


def write_tokenizer(folder: Path) -> Path:
    """A folder as a model's, without weights."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<|user|>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return Tokenizer.from_dir(tokenizer_dir)


class Served:
    """A running server and clients for it."""

    def __init__(self, app, port, http):
        self.app = app
        self.state = server_state(app)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http: httpx.AsyncClient = http
        self.stop = asyncio.Event()
        self.finished: asyncio.Task | None = None

    def openai(self, **options) -> openai.AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options)

    async def post(self, path, document=None, **options):
        if document is not None:
            options["json"] = document
        return await self.http.post(f"{self.url}{path}", **options)

    async def completion(self, **fields):
        return await self.post("/v1/completions", {"model": "fake", "prompt": "hi", "temperature": 0} | fields)


@pytest.fixture
def serve(tokenizer):
    """``async with serve(engine, ...) as served``: over a real uvicorn on a free port."""

    @asynccontextmanager
    async def serving(engine, *, shutdown_timeout_s=5.0, on_drain=None, **settings):
        settings = ServerSettings(**({"model_names": ("fake", "alias"), "default_seed": 1} | settings))
        app = create_app(engine, tokenizer, settings)
        started = asyncio.get_running_loop().create_future()
        async with httpx.AsyncClient(timeout=10) as http:
            served = Served(app, 0, http)
            served.finished = asyncio.create_task(
                run_server(app, "127.0.0.1", 0, shutdown_timeout_s=shutdown_timeout_s, on_drain=on_drain,
                           on_started=started.set_result, stop=served.stop)  # fmt: skip
            )
            await asyncio.wait({started, served.finished}, return_when=asyncio.FIRST_COMPLETED)
            served.port = started.result()
            served.url = f"http://127.0.0.1:{served.port}"
            try:
                yield served
            finally:
                served.stop.set()
                assert await served.finished == 0

    return serving


def sse_events(body: str) -> list[str]:
    """Payloads of an event stream, comments left out."""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]


async def eventually(condition, timeout_s=5.0):
    """Wait for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
