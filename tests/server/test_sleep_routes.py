"""Administration of sleepers over HTTP: who may, what is asked of the engine, and how refusals look."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import FakeEngine

from jettison.errors import RequestError, SleepRefusedError
from jettison.server.app import create_app
from jettison.server.settings import ServerSettings


class Control:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked = []

    def _answer(self, *asked):
        self.asked.append(asked)
        if asked[1] == 7:
            raise RequestError("there is no instance 7", param="instance", code="unknown_instance")
        if asked[1] == 3:
            raise SleepRefusedError("worker 3 is dead", code="sleep_refused")
        return {"is_sleeping": False, "instances": [{"instance": 0, "state": "leaving"}]}

    def sleep(self, instance, level):
        return self._answer("sleep", instance, level)

    def wake(self, instance):
        return self._answer("wake", instance)

    def states(self, instance=None):
        return self._answer("states", instance)


@pytest.fixture
def control():
    return Control()


@pytest.fixture
def client_with(tokenizer, control):
    def make(**settings):
        told = ServerSettings(model_names=("fake",), sleep_control=control, **settings)
        app = create_app(FakeEngine(), tokenizer, told)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return make


async def test_orders_reach_the_engine(client_with, control):
    async with client_with() as client:
        answers = [
            await client.post("/sleep"), await client.post("/sleep?level=2&instance=0"), await client.post("/wake_up"),
            await client.post("/wake_up?instance=1"), await client.get("/is_sleeping"),
            await client.get("/is_sleeping?instance=0"),
        ]  # fmt: skip
    assert [a.status_code for a in answers] == [200] * 6
    assert answers[4].json() == {"is_sleeping": False, "instances": [{"instance": 0, "state": "leaving"}]}
    assert control.asked == [
        ("sleep", None, 1), ("sleep", 0, 2), ("wake", None), ("wake", 1), ("states", None), ("states", 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("url", "status", "code", "param"),
    [
        ("/sleep?level=3", 400, "invalid_value", "level"),
        ("/sleep?level=x", 400, "invalid_value", "level"),
        ("/sleep?instance=-1", 400, "invalid_value", "instance"),
        ("/sleep?instanse=1", 400, "invalid_value", "instanse"),
        ("/wake_up?level=1", 400, "invalid_value", "level"),
        ("/sleep?instance=7", 400, "unknown_instance", "instance"),
        ("/sleep?instance=3", 409, "sleep_refused", None),
        ("/wake_up?instance=3", 409, "sleep_refused", None),
    ],
)
async def test_refusals(client_with, url, status, code, param):
    async with client_with() as client:
        answer = await client.post(url)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


@pytest.mark.parametrize(
    ("keys", "admin_keys", "sent", "status"),
    [
        ((), (), None, 200),
        (("client",), (), "client", 403),
        (("client",), ("admin",), "client", 401),
        (("client",), ("admin",), None, 401),
        (("client",), ("admin",), "admin", 200),
        ((), ("admin",), None, 401),
        ((), ("admin",), "admin", 200),
    ],
)
async def test_who_may(client_with, control, keys, admin_keys, sent, status):
    headers = {} if sent is None else {"authorization": f"Bearer {sent}"}
    async with client_with(api_keys=keys, admin_keys=admin_keys) as client:
        for method, url in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert (await client.request(method, url, headers=headers)).status_code == status
        if admin_keys and keys:
            models = await client.get("/v1/models", headers={"authorization": "Bearer admin"})
            assert models.status_code == 401, "an admin key is no client's"
    assert bool(control.asked) == (status == 200)


async def test_without_a_control_there_are_no_such_routes(app_client):
    assert (await app_client.post("/sleep")).status_code == 404


async def test_health_and_metrics_say_which_instances_have_no_process(app_client, app_engine):
    app_engine.sleep, app_engine.dead_workers = ["awake", "unprovisioned"], {1}
    app_engine.gauges = {"instances_provisioned": 1, "instances_wanted": 1}
    health = (await app_client.get("/health")).json()
    assert health["workers"] == {"alive": 1, "total": 1} and not health["degraded"] and "asleep" not in health
    assert health["instances"] == {"provisioned": 1, "starting": [], "unprovisioned": [1]}
    text = (await app_client.get("/metrics")).text
    assert 'jettison:worker_alive{model_name="fake",worker="0"} 1.0' in text
    assert 'jettison:worker_alive{model_name="fake",worker="1"}' not in text, "0 would be an alarm"
    assert 'jettison:instances_provisioned{model_name="fake"} 1.0' in text
    assert 'jettison:devices_asleep{model_name="fake"} 0.0' in text
    app_engine.sleep, app_engine.waits = ["awake", "starting"], {1: "no host has room"}
    health = (await app_client.get("/health")).json()
    assert health["instances"]["starting"] == [1] and health["instances"]["waits"] == {"1": "no host has room"}
    assert not health["degraded"]


async def test_health_and_metrics_say_who_sleeps(app_client, app_engine):
    app_engine.sleep = ["asleep", "awake"]
    health = (await app_client.get("/health")).json()
    assert health["asleep"] == [0] and not health["degraded"]
    text = (await app_client.get("/metrics")).text
    assert 'jettison:devices_asleep{model_name="fake"} 1.0' in text
    assert 'jettison:devices_awake{model_name="fake"} 1.0' in text
    assert 'jettison:devices_wanted{model_name="fake"} 0.0' in text
    assert 'jettison:worker_asleep{model_name="fake",worker="0"} 1.0' in text
    assert 'jettison:worker_rss_bytes{model_name="fake",worker="1"} 4096.0' in text


async def test_a_server_that_sleeps_is_ready(app_client, app_engine):
    app_engine.has_groups = False
    app_engine.sleep = ["asleep", "emptying"]
    answer = await app_client.get("/health")
    assert (answer.status_code, answer.json()["status"], answer.json()["asleep"]) == (200, "ready", [0, 1])
    app_engine.dead_workers = {0, 1}
    assert (await app_client.get("/health")).json()["status"] == "recovering"
