"""HTTPS over loopback with a certificate made on the spot: the same server, streams and refusals included."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess

import httpx
import msgspec
import openai
import pytest
from fake_engine import FakeEngine, bytes_of
from served import eventually

from jettison.config import EngineConfig
from jettison.errors import ConfigError
from jettison.server.credentials import Credentials
from jettison.server.tls import TlsSettings
from waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
OPENSSL = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")


def make_certificate(folder, name, *options):
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [*OPENSSL, "-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}", *options]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command if "-passout" in options else [*command, "-nodes"], check=True, capture_output=True)
    return str(certificate), str(key)


@pytest.fixture(scope="session")
def pem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return {
        "server": make_certificate(folder, "server"), "client": make_certificate(folder, "client"),
        "locked": make_certificate(folder, "locked", "-passout", "pass:secret"), "folder": folder,
    }  # fmt: skip


def trusting(pem):
    context = ssl.create_default_context(cafile=pem["server"][0])
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


async def test_the_sdk_speaks_https_and_streams(serve, pem):
    async with serve(FakeEngine(bytes_of("grüße")), tls=TlsSettings(*pem["server"]).context()) as served:
        assert served.url.startswith("https://")
        async with httpx.AsyncClient(verify=trusting(pem)) as http:
            client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=http)
            ask = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 70}
            whole = await client.chat.completions.create(**ask)
            assert whole.choices[0].message.content == "grüße" * 10
            stream = await client.chat.completions.create(**ask, stream=True)
            assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == "grüße" * 10
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("none")


async def test_what_comes_in_other_ways_is_refused_and_disturbs_nothing(serve, pem):
    settings = {"max_header_bytes": 2000, "header_timeout_s": 0.3}
    async with serve(FakeEngine(), tls=TlsSettings(*pem["server"]).context(), **settings) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")  # in clear
        assert b"HTTP" not in await reader.read()
        writer.close()
        with pytest.raises(httpx.ConnectError):
            await served.http.get(f"{served.url}/health")  # the certificate is not known to this client
        for sent, status in (
            (b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 200),
            (b"GET /health HTTP/1.0\r\n\r\n", 200), (b"\x00\x01 no HTTP", 400), (b"GET / HTTP/1.1\r\nx-a: ", 408),
            (b"GET /health HTTP/1.1\r\nx-a: " + b"a" * 3000, 431),
        ):  # fmt: skip
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting(pem))
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.write(sent)
            async with asyncio.timeout(PATIENCE_S):
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 %d " % status), (sent, head)
            assert json.loads(body)


async def test_a_client_that_leaves_cancels_its_request(serve, pem):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, tls=TlsSettings(*pem["server"]).context()) as served:
        body = json.dumps({"prompt": "p", "max_tokens": 9, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting(pem))
        writer.write(head + body)
        await eventually(lambda: engine.running)
        writer.transport.abort()
        await eventually(lambda: engine.cancelled and not engine.running)


async def test_a_client_that_reads_nothing_is_cut_off(serve, pem):
    engine = FakeEngine()
    async with serve(engine, tls=TlsSettings(*pem["server"]).context(), write_timeout_s=0.2) as served:
        body = json.dumps({"prompt": "p", "max_tokens": 250, "n": 100, "stream": True, "logprobs": 5}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=trusting(pem), limit=1024)
        writer.write(head + body)
        await eventually(lambda: engine.running)
        reader._transport.pause_reading()
        await eventually(lambda: not engine.running)
        assert len(engine.cancelled) == 100
        writer.transport.abort()


async def test_clients_may_have_to_show_a_certificate(serve, pem):
    tls = TlsSettings(*pem["server"], ca_certs=pem["client"][0], cert_reqs=2).context()
    async with serve(FakeEngine(), tls=tls) as served:
        shown = trusting(pem)
        shown.load_cert_chain(*pem["client"])
        async with httpx.AsyncClient(verify=shown) as http:
            assert (await http.get(f"{served.url}/health")).status_code == 200
        async with httpx.AsyncClient(verify=trusting(pem)) as http:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
                await http.get(f"{served.url}/health")


def test_what_cannot_be_used_is_one_line_that_names_the_flag(pem):
    certificate, key = pem["server"]
    broken = pem["folder"] / "broken.pem"
    broken.write_text("no certificate")
    for settings, flag in (
        (TlsSettings(keyfile=key), "--ssl-keyfile needs --ssl-certfile"),
        (TlsSettings(cert_reqs=2), "--ssl-cert-reqs needs --ssl-certfile"),
        (TlsSettings("/nowhere.pem", key), "--ssl-certfile /nowhere.pem"),
        (TlsSettings(certificate), "--ssl-certfile"),  # no key in it
        (TlsSettings(certificate, "/nowhere.key"), "--ssl-keyfile /nowhere.key"),
        (TlsSettings(certificate, pem["client"][1]), "key values mismatch"),
        (TlsSettings(str(broken), key), "--ssl-certfile"),
        (TlsSettings(certificate, str(pem["folder"])), "--ssl-keyfile"),
        (TlsSettings(*pem["locked"]), "--ssl-keyfile"),
        (TlsSettings(certificate, key, cert_reqs=1), "--ssl-cert-reqs needs --ssl-ca-certs"),
        (TlsSettings(certificate, key, ca_certs=str(broken)), "--ssl-ca-certs"),
        (TlsSettings(certificate, key, ciphers="NONE-SUCH"), "--ssl-ciphers NONE-SUCH"),
    ):
        with pytest.raises(ConfigError) as caught:
            settings.context()
        assert flag in str(caught.value) and "\n" not in str(caught.value)
    assert TlsSettings().context() is None
    assert TlsSettings(certificate, key, certificate, 1, "ECDHE+AESGCM").context() is not None


async def test_where_files_are_half_rotated_controllers_and_front_ends_go_on_with_those_before(
    serve, pem, tmp_path, caplog
):
    certificate, key = (shutil.copy(path, tmp_path) for path in pem["server"])
    authorities = shutil.copy(pem["client"][0], tmp_path)
    flags = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": authorities, "ssl_cert_reqs": 1}
    config = EngineConfig.resolve(model=str(tmp_path), **flags)
    good_fd = os.memfd_create("test")
    Credentials(config, good_fd)
    shutil.copy(pem["client"][0], certificate)  # and its key comes later
    caplog.clear()
    tls = Credentials(config, good_fd).tls
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{key} cannot be used: key values mismatch" in record.getMessage()
    assert "PRIVATE KEY" not in repr(tls)
    told = msgspec.json.decode(msgspec.json.encode(tls), type=TlsSettings)  # of a front end, in each of its lives
    async with serve(FakeEngine(), tls=told.context()) as served, httpx.AsyncClient(verify=trusting(pem)) as http:
        assert (await http.get(f"{served.url}/health")).status_code == 200
    os.close(good_fd)
