"""Lines of ``vllm serve``, pasted behind ``jettison serve``; the page and the data that they are taken by."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jettison.cli import from_vllm
from jettison.cli.main import main
from jettison.cli.vllm_lines import LINES, pasted, words_of
from jettison.cli.vllm_page import page
from jettison.config import API_KEY_VARIABLES
from jettison.config.vllm.facts import FACTS_FILE, read_facts

REFUSED = {
    "The same on two cards": ["--tensor-parallel-size 2"],
    "A longer context by YaRN": ["--rope-scaling"],
    "Gemma with images": ["--limit-mm-per-prompt"],
    "bitsandbytes": ["--quantization bitsandbytes", "--load-format bitsandbytes"],
    "Adapters": ["--enable-lora", "--lora-modules", "--max-lora-rank 64"],
    "KV in LMCache": ["--kv-transfer-config"],
    "Code of the folder's": ["--trust-remote-code", "--kv-cache-dtype fp8", "--tensor-parallel-size 2"],
    "An embedding model": ["--task embed", "--pooler-config"],
}
"""Flags that the one line names; the other commands run."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HOME", raising=False)
    for name in API_KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shown(capsys, *words) -> dict:
    assert main(["config", "show", "--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {name: row["value"] for name, row in rows.items() if row["source"] != "default"}


@pytest.mark.parametrize("title", [title for title, _ in LINES])
def test_a_command_of_a_guide_runs_or_is_refused_in_one_line(title, capsys):
    words = words_of(dict(LINES)[title])
    if title not in REFUSED:
        model = next(word for word in words if "/" in word)
        assert shown(capsys, *words)["model"] == model
        assert main(["serve", *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"`hf download {model}`" in err, "nothing stops it but the missing model"
        return
    assert main(["serve", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("; see jettison serve --help\n")
    assert [flag for flag in REFUSED[title] if not re.search(rf"{re.escape(flag)}\b", err)] == []


def test_there_are_twenty_and_one_of_each_outcome():
    assert len(LINES) >= 20 and len({title for title, _ in LINES}) == len(LINES)
    outcomes = {title for title, line in LINES if pasted(line).refusals}
    assert outcomes == REFUSED.keys()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("Qwen/Qwen3-0.6B -tp 1 --dtype half --max-model-len 4k --swap-space 0 --no-enable-log-requests",
         {"model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16", "max_model_len": 4000}),
        ("--model m --data-parallel-size 2 --served-model-name a b --max_num_seqs 700",
         {"model": "m", "instances": 2, "served_model_name": ["a", "b"], "max_num_seqs": 700}),
        ("m --gpu_memory_utilization=0.9 --log-level WARNING --async-scheduling",
         {"model": "m", "log_level": "warning", "step_ahead": "on", "gpu_memory_utilization": None}),
        ("m --default-chat-template-kwargs.enable_thinking false --allowed-origins '[\"*\"]'".replace("'", ""),
         {"model": "m", "default_chat_template_kwargs": '{"enable_thinking": false}', "allowed_origins": ["*"]}),
    ],
)  # fmt: skip
def test_a_pasted_line_is_a_configuration(line, values, capsys):
    found = shown(capsys, *line.split(" "))
    assert found == values


def test_other_commands_take_the_same_line(tmp_path, capsys):
    for command in (["batch", "run", str(tmp_path / "in.jsonl")], ["profile"], ["config", "show"]):
        assert main([*command, "m", "-tp", "2", "--enable-lora", "--enforce-eager"]) == 2
        err = capsys.readouterr().err
        assert "-tp 2: " in err and "--enable-lora: " in err and err.count("\n") == 1


def test_keys_of_both_in_a_file(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: Org/Name\ntensor-parallel-size: 1\ndtype: half\nserved-model-name: [a, b]\nmemory: 64MiB\n"
        "data_parallel_size: 2\ncompilation-config:\n  mode: 3\nenforce-eager: true\nmax-model-len: 1k\n")
    found = shown(capsys, "--config", str(path), "--max-model-len", "2k")
    assert found == {"model": "Org/Name", "dtype": "bfloat16", "served_model_name": ["a", "b"], "memory": 64 << 20,
                     "instances": 2, "max_model_len": 2000}  # fmt: skip


def test_a_file_and_a_line_are_told_together(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\n\npipeline_parallel_size: 2\nenable-lora: true\n")
    assert main(["serve", "--config", str(path), "--trust-remote-code"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--trust-remote-code: " in err
    assert f"pipeline_parallel_size ({path}, line 3): " in err and f"enable-lora ({path}, line 4): " in err


def test_what_a_key_of_vllm_becomes_keeps_its_line(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\n\ndata-parallel-size: many\n")
    assert main(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"jettison: {path}, line 3: instances needs a whole number")


def test_what_has_no_effect_reaches_the_log_and_only_the_commands_own(monkeypatch, capsys):
    seen = []
    launch = type("Module", (), {"serve": staticmethod(lambda config, line: seen.append(config.notes) or 0)})
    monkeypatch.setitem(sys.modules, "jettison.server.launch", launch)
    assert main(["serve", "m", "--enforce-eager", "--gpu-memory-utilization", "0.8", "--hf-token", "s3cret"]) == 0
    assert main(["serve", "m"]) == 0
    first, second = seen
    assert second == () and len(first) == 2 and "--enforce-eager: " in first[0] and "--memory bounds" in first[1]
    assert "--hf-token: nothing is downloaded" in first[0] and "s3cret" not in first[0]


# --- the page, the data, and another vLLM


def test_the_page_is_of_the_data():
    written = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    assert written == page(), "run: python -m jettison.cli.from_vllm page"


def test_the_page_is_written_by_the_command(tmp_path):
    assert from_vllm.main(["page", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page()


PARSER = '''
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
'''
FLAGS = '''
import argparse
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    for name, options in OPTIONS:
        parser.add_argument(*name, **options)
    return parser
'''


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """``fake_vllm(options, place=...)``: a package with a parser like vLLM's."""

    def make(options, place="entrypoints/openai/cli_args.py", home="utils/__init__.py"):
        package = tmp_path / "vllm"
        for name, text in ((place, f"import argparse\nOPTIONS = {options}\n{FLAGS}"), (home, PARSER)):
            file = package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            for folder in (package, *(p for p in file.parents if package in p.parents)):
                (folder / "__init__.py").touch()
            file.write_text(text)
        (package / "__init__.py").write_text("__version__ = '9.9'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


OPTIONS = """[
    (["--port"], {"type": int, "default": 8001}),
    (["--tensor-parallel-size", "-tp"], {"type": int, "default": 1}),
    (["--enable-lora"], {"action": argparse.BooleanOptionalAction}),
    (["--api-key"], {"nargs": "+"}),
    (["--brand-new"], {"choices": ["a", None], "default": object()}),
]"""


@pytest.mark.parametrize(("place", "home"), [
    ("entrypoints/openai/cli_args.py", "utils/__init__.py"),
    ("entrypoints/openai/cli_args.py", "utils/argparse_utils.py"),
    ("entrypoints/launchers/cli_args.py", "utils/argparse_utils.py"),
])  # fmt: skip
def test_another_vllm_is_compared(place, home, fake_vllm, capsys):
    fake_vllm(OPTIONS, place, home)
    assert from_vllm.main(["compare"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "--brand-new: new in vLLM 9.9" in lines and "--port: default 8000 is 8001" in lines
    version, _ = read_facts()
    assert f"--block-size: in vLLM {version}, gone in 9.9" in lines
    assert not [line for line in lines if line.startswith(("--tensor-parallel-size", "--enable-lora", "--api-key"))]


def test_data_are_written_and_compare_equal(fake_vllm, tmp_path, capsys, monkeypatch):
    fake_vllm(OPTIONS)
    written = tmp_path / "facts.json"
    assert from_vllm.main(["facts", str(written)]) == 0
    version, facts = read_facts(written)
    assert version == "9.9" and facts["--tensor-parallel-size"].aliases == ("-tp",)
    assert facts["--brand-new"].choices == ("a",) and facts["--enable-lora"].kind == "boolean"
    monkeypatch.setattr(from_vllm, "read_facts", lambda: read_facts(written))
    assert from_vllm.main(["compare"]) == 0
    assert "are those of the data" in capsys.readouterr().out
    assert read_facts(FACTS_FILE)[0] != "9.9"


def test_without_a_vllm_the_command_says_so(fake_vllm, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert from_vllm.main(["compare"]) == 2
    assert capsys.readouterr().err.startswith("jettison: no vLLM can be imported here")
    monkeypatch.delitem(sys.modules, "vllm")
    fake_vllm("[]", "elsewhere.py", "utils/__init__.py")
    assert from_vllm.main(["facts", str(tmp_path / "x")]) == 2
    assert "vLLM 9.9 has its parser in none of" in capsys.readouterr().err


