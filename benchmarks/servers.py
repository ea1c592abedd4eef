"""Loads, servers and batches that measurements meet: one request or many, ours or another's, over HTTP.

Not here: engines without HTTP, and other makers' servers (``engines``).
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from benchmarks.shared import Row
from jettison.live.experiments.server_process import ServerProcess, flag_arguments
from jettison.report.failures import check_answered
from jettison.report.results import RunResult
from jettison.types import SamplingParams
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import TraceRow, Workload

if TYPE_CHECKING:
    import openai

    from jettison.live.experiments.overload import ExperimentSetup

__all__ = ["ServerProcess"]

JETTISON = (sys.executable, "-m", "jettison")


def greedy(max_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def replayed(url: str, load: Workload | Sequence[TraceRow], seed: int = 0, **options: Any) -> RunResult:
    """The load at a server. Raises UserError where a request is not answered: times of the others would say nothing."""
    if not isinstance(load, Workload):
        load = Workload(tuple(load), "at once", "made up")
    options = {"name": load.name, "observe": False} | options
    run = replay_sync(url, load, ReplayOptions(seed=seed, prompts=PromptMaker(seed=seed), **options))
    check_answered([run])
    return run


def profiled(setup: ExperimentSetup, out: Path | None = None, **flags: object) -> None:
    """A quick profile of the setup's model, beside it, where ``serve`` finds it, or at ``out``."""
    to = [] if out is None else ["--out", str(out)]
    command = [*JETTISON, "profile", str(setup.model_dir), "--quick", *to, *flag_arguments(setup.flags() | flags)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def awake(*servers: Any) -> Iterator[None]:
    """Servers run inside, and stand still outside: one that idles polls, and would take time from the measured one."""
    for server in servers:
        server.thaw()
    try:
        yield
    finally:
        for server in servers:
            server.freeze()


def metrics(url: str, *names: str) -> dict[str, float]:
    """Of a server's /metrics those that it has, each summed over its labels."""
    with urlopen(f"{url}/metrics", timeout=30.0) as response:
        text = response.read().decode()
    found = {name: re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names}
    return {name: sum(map(float, values)) for name, values in found.items() if values}


# --- batches


def completion(model: str, prompt: Sequence[int], max_tokens: int) -> Row:
    """The body of a request that ends after exactly so many tokens, and gets them as numbers."""
    return {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip


def batch_lines(bodies: Iterable[Row]) -> bytes:
    """A batch's file; lines are named by their number."""
    lines = ({"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
             for index, body in enumerate(bodies))  # fmt: skip
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read_answers(output: bytes) -> dict[int, list[int]]:
    """Token ids by line. Raises ValueError of a line that is there twice, or has no answer."""
    found: dict[int, list[int]] = {}
    for line in output.splitlines():
        document = json.loads(line)
        name, response = int(document["custom_id"]), document["response"]
        if name in found or response["status_code"] != 200:
            raise ValueError(f"line {name}: {'twice' if name in found else response}")
        found[name] = response["body"]["choices"][0]["token_ids"]
    return found


def answers_alone(setup: ExperimentSetup, lines: bytes, **flags: object) -> dict[int, list[int]]:
    """What ``jettison batch run`` answers to the file, without a server."""
    with tempfile.TemporaryDirectory(dir=setup.work_dir) as folder:
        path, out = Path(folder) / "lines.jsonl", Path(folder) / "answers.jsonl"
        path.write_bytes(lines)
        command = [*JETTISON, "batch", "run", str(path), str(setup.model_dir), "-o", str(out)]
        subprocess.run([*command, *flag_arguments(setup.flags() | flags)], check=True, stdout=subprocess.DEVNULL)
        return read_answers(out.read_bytes())


class Batch:
    """One batch at a server's Batches API."""

    ENDED = ("completed", "failed", "expired", "cancelled")

    def __init__(self, url: str, lines: bytes | str, window: str = "24h") -> None:
        """``lines``: a file, or the id of one that was uploaded."""
        import openai

        self._client: openai.OpenAI = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        if isinstance(lines, bytes):
            lines = self._client.files.create(file=("lines.jsonl", io.BytesIO(lines)), purpose="batch").id
        self.document = self._client.batches.create(
            input_file_id=lines, endpoint="/v1/completions", completion_window=window,  # type: ignore[arg-type]
        )

    def wait(self, is_there: Callable[[str], bool], most_s: float, each: Callable[[], object] = lambda: None) -> str:
        """Until its status is such, or the time is up; ``each`` is called at every look. Its status."""
        ends_s = time.monotonic() + most_s
        while not is_there(self.document.status) and time.monotonic() < ends_s:
            time.sleep(0.2)
            each()
            self.document = self._client.batches.retrieve(self.document.id)
        return self.document.status

    def cancel(self) -> None:
        self._client.batches.cancel(self.document.id)

    def answers(self) -> dict[int, list[int]]:
        """None where it has no output file."""
        name = self.document.output_file_id
        return read_answers(self._client.files.content(name).content) if name else {}
