"""What the server's tests share: a tokenizer folder, a handle on a running server, and small readers."""

from __future__ import annotations

import asyncio
import json
import ssl
from functools import cache
from pathlib import Path

import httpx
import openai
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jettison.server.app import server_state
from jettison.server.tokenizer import Tokenizer
from waiting import PATIENCE_S

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


SENTENCEPIECE_SPECIAL = ("<s>", "</s>", "<|assistant|>")
LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def metaspace_tokenizer():
    """Llama 2's kind: words with a leading mark, and bytes for everything else."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁", "é", "."]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = LLAMA_2
    return backend, {word: at for at, word in enumerate(words)}


def sentencepiece_tokenizer(decoder=LLAMA_2):
    """A small Llama 2: marks for spaces, bytes for unknown characters, special tokens. Prompts are token ids: there are
    no merges."""
    backend, vocabulary = metaspace_tokenizer()
    backend.decoder = decoder
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in SENTENCEPIECE_SPECIAL]
    backend.add_special_tokens(special)
    tokenizer = Tokenizer(
        backend, is_byte_level=False, special_tokens={}, tokenizer_class="LlamaTokenizerFast")
    return tokenizer, vocabulary | {token: backend.token_to_id(token) for token in SENTENCEPIECE_SPECIAL}


@cache
def trust() -> ssl.SSLContext:
    """What clients trust, read once: a client of its own reads all of the world's certificates, in 20 ms."""
    return httpx.create_ssl_context()


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
        self.fronts = None
        self._clients: list[openai.AsyncOpenAI] = []

    def openai(self, **options) -> openai.AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0} | options
        options.setdefault("http_client", openai.DefaultAsyncHttpxClient(verify=trust()))
        self._clients.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", **options))
        return self._clients[-1]

    async def close_clients(self):
        """In the loop that they were used in: one that is collected later closes itself in another, and fails."""
        for client in self._clients:
            await client.close()

    async def post(self, path, document=None, **options):
        if document is not None:
            options["json"] = document
        return await self.http.post(f"{self.url}{path}", **options)

    async def completion(self, **fields):
        return await self.post("/v1/completions", {"model": "fake", "prompt": "hi", "temperature": 0} | fields)


def sse_events(body: str) -> list[str]:
    """Payloads of an event stream, comments left out."""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]


async def eventually(condition, timeout_s=PATIENCE_S):
    """Wait for something that another task brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
