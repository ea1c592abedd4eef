"""Engine and HTTP server together, until told to stop. Installs signal handlers and logging; the one place that does."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from jettison.config import EngineConfig
from jettison.live.engine import Engine
from jettison.server.app import create_app
from jettison.server.serving import run_server
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer


def serve(config: EngineConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. Raises ModelError, BudgetError, ConfigError."""
    logging.basicConfig(level=str(config.log_level).upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        return runner.run(_serve(config))


async def _serve(config: EngineConfig) -> int:
    model_dir = Path(config.model.model)
    tokenizer = Tokenizer.from_dir(model_dir)
    engine = Engine(config)
    settings = ServerSettings(
        model_names=(config.model.served_model_name or model_dir.name or "model",),
        api_keys=config.server.api_keys,
    )
    try:
        await engine.start()
        app = create_app(engine, tokenizer, settings)
        return await run_server(
            app,
            config.server.host,
            config.server.port,
            shutdown_timeout_s=config.server.shutdown_timeout_s,
            on_drain=engine.drain,
        )
    finally:
        await engine.close()
