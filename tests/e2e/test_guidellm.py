"""GuideLLM's own benchmark against a running server: every request is a success, with the tokens that it asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from e2e_server import MODEL, child_environment

from client_environments import python_with

pytestmark = pytest.mark.live


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_of_a_few_requests(server, model_dir, tmp_path: Path, route: str) -> None:
    guidellm = python_with("guidellm", "guidellm").with_name("guidellm")
    report = tmp_path / "report.json"
    command = [
        guidellm, "run", "--backend", f"kind=openai_http,target={server.url},request_format={route}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--tokenizer", f"kind=hf_auto,model={model_dir}",
        "--output", f"kind=json,path={report}", "--disable-console",
    ]  # fmt: skip
    ended = subprocess.run(
        command, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (3, 0)
    for one in requests["successful"]:
        assert one["output_tokens"] == 8 and one["prompt_tokens"] >= 20
        assert one["time_to_first_token_ms"] > 0 and json.loads(one["request_args"])["body"]["model"] == MODEL
    server.wait_idle()
