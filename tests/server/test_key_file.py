"""Keys from a file: what may stand in it, and what becomes of them when it changes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from fake_engine import FakeEngine

from jettison.config import EngineConfig
from jettison.errors import ConfigError
from jettison.server import launch
from jettison.server.app import create_app, server_state
from jettison.server.auth import KeyRing
from jettison.server.credentials import Credentials
from jettison.server.key_file import MAX_BYTES, KeySource, read_key_file
from jettison.server.serving import run_server
from jettison.server.settings import ServerSettings
from waiting import PATIENCE_S


def written(tmp_path, content: bytes):
    path = tmp_path / "keys"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [b"one\ntwo\n", b"one\r\ntwo", b"\n# comment\n  one  \n\n\ttwo\n  # indented", b"\xef\xbb\xbfone\ntwo"],
)
def test_one_key_a_line(tmp_path, content):
    assert read_key_file(written(tmp_path, content)) == ("one", "two")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no API key"),
        (b"# nothing\n\n", "holds no API key"),
        (b"good\nsecret word\n", "line 2: a key is one word"),
        (b"secret\xc3\xa9", "line 1: a key is one word"),
        (b"secret\x00", "line 1: a key is one word"),
        (b"s" * (MAX_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_what_is_no_key_file_is_one_line_without_a_key(tmp_path, content, words):
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_cannot_be_read_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_key_file(path)


def test_a_reload_replaces_the_file_s_keys_and_no_others(tmp_path, caplog):
    caplog.set_level("INFO")
    path = written(tmp_path, b"old\n")
    source = KeySource(("fixed",), path)
    ring = KeyRing(source.read(), may_change=True)
    path.write_text("new\n")
    source.reload(ring)
    opens = {key: ring.admits("/metrics", b"Bearer " + key) for key in (b"fixed", b"old", b"new")}
    assert opens == {b"fixed": True, b"old": False, b"new": True}
    for spoil in (lambda: path.write_text("\n"), path.unlink):
        spoil()
        caplog.clear()
        source.reload(ring)
        (record,) = caplog.records
        assert record.getMessage().startswith("the API keys stay as they were: ")
        assert str(path) in record.getMessage()
        assert ring.admits("/metrics", b"Bearer new")
    assert "fixed" not in caplog.text


def test_a_lone_key_that_may_change_shares_no_cache_with_the_next_one():
    ring = KeyRing(["a"], may_change=True)
    first = ring.tenant(b"Bearer a")
    ring.replace(["b"])
    assert len({"", first, ring.tenant(b"Bearer b")}) == 3
    assert len(first) == 32
    assert KeyRing(["a"]).tenant(b"Bearer a") == ""


async def test_a_bad_file_ends_the_start_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "Engine", None)  # not even touched
    config = EngineConfig.resolve(model=str(tmp_path), api_key="x", api_key_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent: No such file"):
        await launch._serve(config)


async def test_a_hangup_reads_the_file_again(tokenizer, tmp_path, caplog):
    """A request that runs goes on, whatever key it came with."""
    path = written(tmp_path, b"old\n")
    source = KeySource((), path)
    engine = FakeEngine(delay_s=None)
    settings = ServerSettings(model_names=("fake",), api_keys=source.read(), keys_may_change=True)
    app = create_app(engine, tokenizer, settings)
    ring = server_state(app).keys
    hangups: asyncio.Queue[None] = asyncio.Queue()

    def on_hangup():
        source.reload(ring)
        hangups.put_nowait(None)

    started, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    serving = asyncio.create_task(run_server(
        app, "127.0.0.1", 0, shutdown_timeout_s=5, on_started=started.set_result, on_hangup=on_hangup, stop=stop))
    port = await started

    async def ask(key: bytes, max_tokens: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "x", "max_tokens": %d}' % max_tokens
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer %s\r\n"
            b"content-length: %d\r\n\r\n%s" % (key, len(body), body))  # fmt: skip
        answer = await reader.read()
        writer.close()
        return answer[9:12]

    async with asyncio.timeout(PATIENCE_S):
        running = asyncio.create_task(ask(b"old", 3))
        while not engine.accepted:
            await asyncio.sleep(0)
        path.write_text("new\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await hangups.get()
        assert await ask(b"old", 1) == b"401"
        engine.release()
        assert await running == b"200"
        assert await ask(b"new", 1) == b"200"
        path.write_text("two words\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await hangups.get()
        assert await ask(b"new", 1) == b"200"
        stop.set()
        assert await serving == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"the API keys stay as they were: {path}, line 1: a key is one word of printable ASCII characters"]


@pytest.fixture
def good_fd():
    """A parent's memory file."""
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_where_the_file_is_bad_a_later_controller_has_the_keys_that_were_good_last(tmp_path, good_fd, caplog):
    path = written(tmp_path, b"old\n")
    config = EngineConfig.resolve(model=str(tmp_path), api_key="fixed", api_key_file=str(path))
    first = Credentials(config, good_fd)
    ring = KeyRing(first.keys, may_change=True)
    path.write_text("new-" * 20)
    first.reload(ring)
    path.write_text("secret word\n")
    first.reload(ring)  # changes nothing
    caplog.clear()
    for _ in range(2):
        assert Credentials(config, good_fd).keys == ("fixed", "new-" * 20)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "the API keys stay as they were" in caplog.text and str(path) in caplog.text
    assert not any(word in caplog.text for word in ("secret", "new-", "fixed"))
    path.write_text("rotated\n")
    assert Credentials(config, good_fd).keys == ("fixed", "rotated")
    path.unlink()
    assert Credentials(config, good_fd).keys == ("fixed", "rotated")
    with pytest.raises(ConfigError):
        Credentials(config)  # no parent


def test_what_a_controller_had_not_kept_whole_at_its_death_does_not_count(tmp_path, good_fd):
    path = written(tmp_path, b"old\n")
    config = EngineConfig.resolve(model=str(tmp_path), api_key_file=str(path))
    Credentials(config, good_fd)
    os.pwrite(good_fd, b"half", 40)
    assert Credentials(config, good_fd).keys == ("old",)
    os.ftruncate(good_fd, 40)
    path.unlink()
    with pytest.raises(ConfigError):
        Credentials(config, good_fd)
