"""A byte-level tokenizer made on the spot, a fake engine, and a real server on a loopback port."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from jettison.server.app import batch_service, create_app, server_state
from jettison.server.batches.settings import BatchSettings
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.serving import run_on, run_server
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer
from waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode puts no test folder on the path

from fake_engine import FakeEngine
from front_ends import InProcessFronts
from served import Served, trust, write_tokenizer

NUM_FRONTS = int(os.environ.get("JETTISON_TEST_API_SERVERS", "0"))
"""Front ends beside the controller in every test of HTTP here (``make test-front-ends``)."""

OF_ONE_PROCESS = {
    "test_health_tells_what_it_is_given": "health tells of front ends, too",
    "test_tokenizer_requests_have_limits_of_their_own": "counts of the process that tokenizes",
    "test_all_bodies_together_are_bounded": "the bound is divided, and each front end takes one body",
    "test_metrics": "a scripted engine without delay has ended before a stop string is found elsewhere",
    "test_tokens_are_counted_as_in_usage": "counts of the process that makes text",
    "test_a_key_has_a_limit_of_its_own": "counts of the process that answers",
    "test_the_sdk_s_own_patience_is_enough": "counts of the process that answers",
    "test_the_log_of_a_server_that_listens_does_not_call_it_ready": "told where the processes are started",
    "test_a_key_is_told_apart_over_http": "each front end bounds the tokenizer requests that it has",
    "test_the_sdk_retries_a_full_queue": "counts of the process that answers",
    "test_other_errors_of_the_sdk": "no iterator of an engine runs in a front end",
    "test_a_crash_leaks_nothing_and_fails_alone": "no iterator of an engine runs in a front end",
    "test_a_client_that_reads_nothing_is_cut_off": "a scripted engine without delay has ended before a client reads",
    "test_few_requests_wait_however_many_come": "counts of the process that holds the connection",
    "test_a_client_that_leaves_the_server_leaves_the_queue": "each front end has a compiler of its own",
    "test_an_event_loop_that_cannot_accept_is_heard_once": "a process has one server on its loop",
    "test_who_reads_nothing_is_dropped": "a scripted engine without delay has ended before a client reads",
}
"""Tests that look at what only the process that they assume has, and why."""


def pytest_collection_modifyitems(items):
    for item in items:
        if NUM_FRONTS and (why := OF_ONE_PROCESS.get(getattr(item, "originalname", ""))) is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir):
    return Tokenizer.from_dir(tokenizer_dir)


@pytest.fixture
def tokenizer_of(tokenizer_dir, tmp_path):
    """A tokenizer with a chat template of one's own."""

    def made(source, **settings):
        shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
        (tmp_path / "chat_template.jinja").write_text(source)
        return Tokenizer.from_dir(tmp_path, templates=TemplateSettings(**settings))

    return made


@pytest.fixture
def num_fronts():
    """Front ends beside the controller; a module may set it for its tests."""
    return NUM_FRONTS


@pytest.fixture
def serve(tokenizer, num_fronts, tmp_path_factory):
    """``async with serve(engine, ...) as served``: over a real uvicorn on a free port."""

    @asynccontextmanager
    async def serving(
        engine, *, shutdown_timeout_s=5.0, on_drain=None, tokenizer=tokenizer, batches=None, orphan_timeout_s=0.0,
        **settings,
    ):
        settings = ServerSettings(**({"model_names": ("fake", "alias"), "default_seed": 1} | settings))
        app = create_app(engine, tokenizer, settings, batches)
        if batches is not None:
            await batch_service(app).start()
        started = asyncio.get_running_loop().create_future()
        async with httpx.AsyncClient(timeout=PATIENCE_S, verify=trust()) as http:
            served = Served(app, 0, http)
            options = {"on_drain": on_drain, "stop": served.stop}
            options["shutdown_timeout_s"] = shutdown_timeout_s
            if num_fronts:
                folder = tmp_path_factory.mktemp("fronts")
                served.fronts = InProcessFronts(
                    served.state, engine, tokenizer, num_fronts, folder, orphan_timeout_s)
                served.finished = asyncio.create_task(served.fronts.run(partial(run_on, app, **options), started))
            else:
                served.finished = asyncio.create_task(
                    run_server(app, "127.0.0.1", 0, on_started=started.set_result, **options))
            await asyncio.wait({started, served.finished}, return_when=asyncio.FIRST_COMPLETED)
            served.port = started.result()
            served.url = f"{'http' if settings.tls is None else 'https'}://127.0.0.1:{served.port}"
            try:
                yield served
            finally:
                served.stop.set()
                assert await served.finished == 0
                await served.close_clients()
                if batches is not None:
                    await batch_service(app).close()
                await asyncio.to_thread(server_state(app).grammars.close)

    return serving


@pytest.fixture
def app_engine():
    """The engine behind ``app_client``."""
    return FakeEngine()


@pytest.fixture
async def app_client(tokenizer, app_engine):
    """The application without a socket, where the transport does not matter."""
    app = create_app(app_engine, tokenizer, ServerSettings(model_names=("fake",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
    await asyncio.to_thread(server_state(app).grammars.close)


@pytest.fixture
def batch_settings(tokenizer_dir, tmp_path):
    def settings(**changes):
        told = {"folder": tmp_path / "batches", "tokenizer_dir": tokenizer_dir, "window": 4} | changes
        return BatchSettings(**told)

    return settings
