"""What a server tells of its deployment: what decides how it serves, and nothing else."""

from __future__ import annotations

from jettison.config import EngineConfig
from jettison.live.engine.deployed import settings_of


def test_no_path_no_address_and_no_secret_is_told() -> None:
    config = EngineConfig.resolve(
        model="m", port=8001, api_key="secret", ssl_certfile="/c.pem", ssl_keyfile="/k.pem",
        chat_template="{{ messages }}", otlp_traces_endpoint="http://user:password@collector:4318",
        max_num_seqs=7, sleep="auto",
    )  # fmt: skip
    assert settings_of(config) == {"max_num_seqs": 7, "sleep": "auto"}
