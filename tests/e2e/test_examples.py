"""The programs of ``examples/`` run as they are, but for their port, their threads and the length of the load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from e2e_server import as_environment, child_environment

from jettison.live.experiments.server_process import free_port
from jettison.report.results import read_results

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example as a module, told another port than the one that it fixes."""
    (path,) = [path for path in EXAMPLES if path.name == name]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    port, fixed = free_port(), str(module.PORT)
    monkeypatch.setattr(module, "PORT", port)
    monkeypatch.setattr(module, "URL", f"http://127.0.0.1:{port}")
    if hasattr(module, "SERVE"):
        serve = [str(port) if word == fixed else word for word in module.SERVE]
        monkeypatch.setattr(module, "SERVE", [*serve, "--num-threads", "1"])  # other tests want the other cores
    return module


def test_every_example_is_run_here() -> None:
    assert [path.name for path in EXAMPLES] == [
        "01_serve_and_ask.py", "02_watch_a_drop.py", "03_batch_beside_chat.py",
    ]  # fmt: skip


@pytest.mark.live
@pytest.mark.slow
def test_serve_and_ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    example = loaded("01_serve_and_ask.py", monkeypatch)
    with as_environment(child_environment()):
        example.main()
    shown = capfd.readouterr().out
    assert "answer: '" in shown and "'prompt_tokens': 8" in shown


@pytest.mark.live
@pytest.mark.slow
def test_watch_a_drop(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example = loaded("02_watch_a_drop.py", monkeypatch)
    monkeypatch.setattr(example, "BENCH", [*example.BENCH, "--num-requests", "4"])
    monkeypatch.setattr(example, "rate_scale", lambda setup: 10.0)  # the demo's own test measures
    monkeypatch.setattr("sys.argv", ["02_watch_a_drop.py", str(tmp_path)])
    with as_environment(child_environment()):
        example.main()
    shown = capfd.readouterr().out
    assert all(word in shown for word in (*example.WATCHED, "TTFT p99", "nothing was dropped", "report: "))
    (run,) = read_results(tmp_path / "run.json")
    assert run.requests.completed == 4
    assert (tmp_path / "report.html").is_file()


@pytest.mark.live
@pytest.mark.slow
def test_batch_beside_chat(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    example = loaded("03_batch_beside_chat.py", monkeypatch)
    monkeypatch.setattr(example, "CHAT", [*example.CHAT, "--num-requests", "3"])
    monkeypatch.setattr(example, "NUM_LINES", 40)
    with as_environment(child_environment()):
        example.main()
    shown = capfd.readouterr().out
    assert "with batch" in shown and "of 40 requests" in shown
    assert shown.rstrip().endswith(("it is cancelled", "it is completed")), "whichever comes first"
    assert all(label in shown for label in ("first token, median", "first token, P99", "gap of tokens, P99"))
