"""The command line: what it prints, how it fails, and that it starts without the heavy libraries."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from jettison import __version__
from jettison.cli.main import app, main
from jettison.config import KEYS
from jettison.config.files import read_yaml_mapping
from jettison.device.model.create import create_model
from jettison.device.model.end_tokens import EndTokens
from jettison.errors import ConfigError
from jettison.report.results import RequestCounts, RunResult
from jettison.workload.synthetic import PRESETS

COMMANDS = ["batch run", "bench", "bill", "config show", "demo", "explain", "model create", "plan", "profile",
            "reproduce", "serve", "simulate", "top", "trace info", "trace slice", "trace upscale", "trace synth",
            "trace fetch", "validate", "verify", "version"]  # fmt: skip

NO_TOKENIZER = SimpleNamespace(turn_end=lambda: None, special_tokens={}, chat=SimpleNamespace(
    settings=SimpleNamespace(tool_call_parser="none", reasoning_parser="none"), source=None, source_with_tools=None))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert "Usage: jettison " + command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "folder", "--memoryy", "5MiB"], r"--memoryy.* see jettison serve --help"),
        (["frobnicate"], r"frobnicate.* see jettison --help"),
        (["trace", "slice"], r"[Mm]issing .*; see jettison trace slice --help"),
        (["serve", "folder", "--enable-lora"], r"--enable-lora: adapters .*; see jettison serve --help"),
        (["serve", "folder", "--lora", "x"], r"--lora: adapters \(LoRA\) are not served; merge .* --help"),
        (["serve", "folder", "--task", "embed"], r"--task embed: all models are served to generate text, .* --help"),
        (["serve", "folder", "--pooler-config", '{"a": 1}'], r"--pooler-config.*: embeddings and scores are .* --help"),
        (["serve", "folder", "--limit-mm-per-prompt", '{"image": 2}'], r"--limit-mm-per-prompt.*: images, .* --help"),
        (["bench", "--cancel-fraction", "7"], r"--cancel-fraction.*; see jettison bench --help"),
    ],
)
def test_misuse_is_one_line(arguments, told, capsys):
    assert main(arguments) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert re.fullmatch(f"jettison: .*{told}\n", caught.err), caught.err


def test_numbers_of_instances_are_flags_and_one_line_where_they_contradict_each_other(capsys):
    assert main(["config", "show", "--instances", "2", "--max-instances", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [shown[name]["value"] for name in ("max_instances", "min_instances", "sleep")] == [3, 2, "auto"]
    assert main(["config", "show", "--min-instances", "3", "--max-instances", "2"]) == 2
    assert capsys.readouterr().err == "jettison: --min-instances 3 is above --max-instances 2\n"


def test_without_a_word_the_page_is_shown(capsys):
    for arguments in ([], ["trace"]):
        assert main(arguments) == 2
        caught = capsys.readouterr()
        assert "Usage: jettison" in caught.err + caught.out and "jettison: Usage" not in caught.err


@pytest.mark.parametrize(
    "detail", [[{"error": why, "status": "failed"} for why in (None, "HTTP 404: no such model")], None]
)
def test_a_bench_that_nobody_answered_says_why(detail, monkeypatch, capsys):
    run = RunResult("run", requests=RequestCounts(2, failed=2), requests_detail=detail)
    monkeypatch.setattr("jettison.workload.bench.run_bench", lambda *_: run)
    assert main(["bench", "--workload", "burst"]) == 1
    why = "; the first error: HTTP 404: no such model" if detail else ""
    assert capsys.readouterr().err == f"jettison: none of 2 requests was answered{why}\n"
    assert main(["bench", "--workload", "burst", "--allow-failures", "1"]) == 1, "nothing was measured"


@pytest.mark.parametrize(
    ("allowed", "code"), [([], 1), (["--allow-failures", "0.7"], 1), (["--allow-failures", "0.8"], 0)]
)
def test_a_bench_with_failures_is_no_good_one(allowed, code, monkeypatch, capsys):
    """It ended with 0 once, and with the percentiles of what a dead server had still answered."""
    run = RunResult("run", requests=RequestCounts(23, completed=6, failed=16, rejected=1))
    monkeypatch.setattr("jettison.workload.bench.run_bench", lambda *_: run)
    assert main(["bench", "--workload", "burst", *allowed]) == code
    told = "jettison: run: 17 of 23 requests were not answered (16 failed, 1 rejected)\n"
    assert capsys.readouterr().err == (told if code else "")


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_flag_and_choice_in_full(command, columns, capsys, monkeypatch):
    """A user who cannot read a flag cannot type it, however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for variadic in ("[ARGS]...", "ARGS...", "NAME...}...", "NAME..."):
        shown = shown.replace(variadic, "")
    assert "…" not in shown and "..." not in shown
    words = set(re.findall(r"[^\s,]+", shown))
    for option in found.params:
        assert set(option.opts + option.secondary_opts) <= words or option.param_type_name == "argument", option.name
    if command in ("serve", "config show"):
        choices = {key.metavar for key in KEYS.values() if "|" in key.metavar}
        assert len(choices) > 5 and choices <= words


def test_every_key_says_what_it_is():
    assert [key.name for key in KEYS.values() if len(key.text) < 16 or not key.text.endswith(".")] == []


def test_the_commands_are_these(capsys):
    """A promise to scripts: a command is added here on purpose, and removed with a line in the changelog."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    listed = re.findall(r"^. (\w+) ", shown.partition("Commands")[2], re.MULTILINE)
    assert sorted(listed) == sorted({command.split()[0] for command in COMMANDS})


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"jettison {__version__}\n"


def test_help_loads_nothing_heavy():
    script = "import sys, jettison.cli.main; jettison.cli.main.main(['--help']); print(*sys.modules, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in run.stderr.split()}
    assert "jettison" in loaded
    assert not loaded & {"torch", "numpy", "fastapi", "uvicorn", "aiohttp", "matplotlib", "scipy", "transformers"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], ["no model folder"]),
        (["serve", "m", "--memory", "lots"], ["--memory", "'lots'"]),
        (["serve", "m", "--config", "absent.yaml"], ["absent.yaml", "No such file"]),
        (["config", "show", "--max-num-seqs", "-3"], ["--max-num-seqs", "'-3'"]),
        (["bench"], ["--trace", "--workload"]),
        (["model", "create", "x", "--shard-bytes", "big"], ["--shard-bytes", "'big'"]),
        (["bench", "--url", "http://127.0.0.1:1", "--workload", "burst", "--offline-max-input", "9"], [
            "--offline-lengths NAME"]),
    ],
)
def test_a_user_s_mistake_is_one_line_and_exit_2(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jettison: ")
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), "a/b: No such file or directory", 2),
        (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use", 2),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused", 1),
        (OSError(errno.ENOSPC, "No space left on device", "out.json"), "out.json: No space left on device", 1),
        (TimeoutError(), "TimeoutError", 1),
    ],
)
def test_what_the_operating_system_refuses_is_one_line(error, line, code, monkeypatch, capsys):
    def serve(config, line):
        raise error

    monkeypatch.setitem(sys.modules, "jettison.server.launch", _module(serve=serve))
    assert main(["serve", "models/tiny"]) == code
    assert capsys.readouterr().err == f"jettison: {line}\n"


SMALL_MODEL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1"]


def run_limited(num_bytes, *arguments, cwd):
    """In a process of its own that may have so many bytes of addresses."""
    return subprocess.run(
        [sys.executable, "-m", "jettison", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes)),
    )


@pytest.mark.parametrize("command", [
    ["serve", "m", "--instances", "2"], ["verify"], ["demo"], ["profile", "m"], ["model", "create", "m"],
], ids=" ".join)
def test_too_few_addresses_for_the_libraries_are_one_line_and_exit_2(command, tmp_path):
    """Where some libraries would end the process, and others end in a traceback."""
    run = run_limited(600 << 20, *command, cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == "" and not list(tmp_path.iterdir())
    assert re.fullmatch(
        r"jettison: ulimit -v lets a process have 0\.59 GiB of addresses, and this command needs at least "
        r"1\.[05]0 GiB: .*`ulimit -v unlimited`\n", run.stderr), run.stderr


def test_too_few_addresses_for_a_worker_s_memory_are_one_line_with_both_numbers(tmp_path):
    assert main(["model", "create", str(tmp_path / "m"), *SMALL_MODEL]) == 0
    run = run_limited(4 << 30, "serve", "m", "--memory", "4GiB", "--port", "0", cwd=tmp_path)
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert "--memory 4GiB for each instance: ulimit -v lets a process have 4.00 GiB" in run.stderr
    assert "needs about 9.0" in run.stderr


def test_an_allocation_that_the_limit_refused_is_one_line(monkeypatch, capsys):
    def serve(config, line):
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setitem(sys.modules, "jettison.server.launch", _module(serve=serve))
    monkeypatch.setattr("jettison.live.machine.address_space.address_limit", lambda: 8 << 30)
    assert main(["serve", "models/tiny"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jettison: MemoryError: Unable to allocate 3 GiB; ulimit -v lets a process have 8.00 GiB")
    assert err.count("\n") == 1
    monkeypatch.setattr("jettison.live.machine.address_space.address_limit", lambda: None)
    with pytest.raises(MemoryError):
        main(["serve", "models/tiny"])


def test_an_unwritable_result_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    must_not_run = _module(run_verify=lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setitem(sys.modules, "jettison.live.verify.run", must_not_run)
    (tmp_path / "no").write_text("a file")
    assert main(["verify", "--json", str(tmp_path / "no" / "folder.json")]) == 2
    assert capsys.readouterr().err == f"jettison: {tmp_path / 'no' / 'folder.json'}: cannot be written: File exists\n"


def test_a_verify_that_is_told_to_end_leaves_nothing_behind(monkeypatch):
    """Its models and engines are closed as the stack unwinds."""
    closed = []

    def run_verify(*_, **__):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the signal ends it")
        finally:
            closed.append("folder")

    monkeypatch.setitem(sys.modules, "jettison.live.verify.run", _module(run_verify=run_verify))
    assert main(["verify"]) == 143 and closed == ["folder"]


def test_a_time_line_that_cannot_be_written_is_told_before_the_model_loads(tmp_path, monkeypatch, capsys):
    launch = pytest.importorskip("jettison.server.launch")
    prepared = SimpleNamespace(end_tokens=EndTokens((), ()), byte_tokens=None)
    monkeypatch.setattr(launch.Engine, "prepare", lambda self: prepared)
    monkeypatch.setattr(launch, "health_details", lambda _: {})
    monkeypatch.setattr(launch.Tokenizer, "from_dir", lambda *_, **__: NO_TOKENIZER)
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("it loaded"))
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "line.json"
    assert main(["serve", str(tmp_path), "--port", "0", "--timeline", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == f"jettison: {path}: cannot be written: File exists", err


def test_a_port_in_use_is_one_line(tmp_path, monkeypatch, capsys):
    launch = pytest.importorskip("jettison.server.launch")
    prepared = SimpleNamespace(end_tokens=EndTokens((), ()), byte_tokens=None)
    monkeypatch.setattr(launch.Engine, "prepare", lambda self: prepared)
    monkeypatch.setattr(launch, "health_details", lambda _: {})
    monkeypatch.setattr(launch.Tokenizer, "from_dir", lambda *_, **__: NO_TOKENIZER)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(f"jettison: cannot listen on 127.0.0.1:{port}: "), err
    assert "Traceback" not in err


def _must_not_listen(*_, **__):
    raise AssertionError("the server listens")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "64KiB"], "a memory budget of 65536 bytes is too small"),
        (["--memory", "64KiB", "--overload", "pipeline", "--instances", "2"], "a memory budget of 65536 bytes is too"),
        (["--overload", "pipeline", "--instances", "1"], "--overload pipeline divides the layers between two"),
        (["--memory", "999999GiB"], "--memory 999999GiB for each instance: the system has no addresses"),
        (["--max-model-len", "100000"], "max_model_len 100000 must be from 1 to the model's context"),
    ],
)
def test_what_the_folder_s_configuration_forbids_is_told_before_the_server_listens(
    flags, words, tmp_path, monkeypatch, capsys
):
    launch = pytest.importorskip("jettison.server.launch")
    monkeypatch.setattr(launch, "run_server", _must_not_listen)
    folder = str(tmp_path / "model")
    assert main(["model", "create", folder, "--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1"]) == 0
    capsys.readouterr()
    assert main(["serve", folder, "--port", "0", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"jettison: {words}") and err.count("\n") == 1, err


def test_a_start_that_ends_for_want_of_a_model_has_begun_no_fork_server(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process"))
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("lacks", ["everything", "config.json", "model.safetensors.index.json"])
def test_a_folder_without_a_model_is_one_line(lacks, tmp_path, monkeypatch, capsys):
    launch = pytest.importorskip("jettison.server.launch")
    monkeypatch.setattr(launch, "run_server", _must_not_listen)
    folder = tmp_path / "model"
    if lacks != "everything":
        small = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--shard-bytes", "8KiB"]
        assert main(["model", "create", str(folder), *small]) == 0
        (folder / lacks).unlink()
        capsys.readouterr()
    assert main(["serve", str(folder), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jettison: ") and str(folder) in err and err.count("\n") == 1, err


@pytest.mark.parametrize("arguments", [["serve", "m", "--no-such-flag"], ["nonsense"]])
def test_an_unknown_flag_or_command_is_exit_2(arguments, capsys):
    assert main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err


def shown_config(capsys, *arguments) -> dict:
    assert main(["config", "show", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_config_show_says_what_and_from_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JETTISON_API_KEY", "secret")
    path = tmp_path / "jettison.yaml"
    path.write_text("model: models/tiny\nmemory: 256MiB\nport: 9000\nenable-prefix-caching: false\n")
    shown = shown_config(capsys, "--config", str(path), "--port", "9001")
    assert list(shown) == list(KEYS)
    assert shown["model"] == {"value": "models/tiny", "source": "file"}
    assert shown["memory"] == {"value": 256 << 20, "source": "file"}
    assert shown["enable_prefix_caching"] == {"value": False, "source": "file"}
    assert shown["port"] == {"value": 9001, "source": "flag"}
    assert shown["block_size"] == {"value": 16, "source": "default"}
    assert shown["api_key"] == {"value": "***", "source": "env"}


def test_config_show_as_a_table(capsys, monkeypatch):
    monkeypatch.delenv("JETTISON_API_KEY", raising=False)
    assert main(["config", "show", "models/tiny", "--no-enable-prefix-caching", "--memory", "1GiB"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["memory"] == ["1GiB", "flag"]
    assert rows["enable_prefix_caching"] == ["false", "flag"]
    assert rows["max_model_len"] == ["auto", "default"]
    assert rows["served_model_name"] == ["tiny", "default"]


FLAGS = [key for key in KEYS.values() if key.section and key.name != "model"]
FLAG_SETS = [FLAGS[i::12] for i in range(12)] + [FLAGS[i : i + 12] for i in range(0, len(FLAGS), 12)]
"""Each flag is in two of them, and no two flags are together in both: what one sets beside its own key is seen."""
OF_MANY = [key for key in KEYS.values() if not key.section and key.name != "model"]
"""They set others."""


@pytest.mark.parametrize("keys", [*FLAG_SETS, *([key] for key in OF_MANY)], ids=lambda keys: keys[0].name)
def test_every_key_is_a_flag(keys, capsys):
    texts = {"api_key": "k", "admin_key": "k", "served_model_name": "name",
             "structured_outputs_config": '{"disable_any_whitespace": true}'}
    words = [word for key in keys
             for word in ([key.flag] if key.is_bool else [key.flag, texts.get(key.name, key.show(key.default))])]
    shown = shown_config(capsys, "m", *words)
    given = {"model", *(key.name for key in keys)}
    assert {name for name in given if shown[name]["source"] != "flag"} == set()
    told = {name for name, row in shown.items() if row["source"] == "flag"}
    assert told == given or keys[0] in OF_MANY, told ^ given


def test_no_two_flags_are_always_tried_together():
    pairs = [pair for keys in FLAG_SETS for pair in itertools.combinations([key.name for key in keys], 2)]
    assert len(pairs) == len(set(pairs))
    assert {key.name for keys in [*FLAG_SETS, OF_MANY] for key in keys} == KEYS.keys() - {"model"}


def test_serve_hands_over_the_resolved_configuration(monkeypatch):
    seen = []
    serve = lambda config, line: seen.append(config) or 3  # noqa: E731
    monkeypatch.setitem(sys.modules, "jettison.server.launch", _module(serve=serve))
    assert main(["serve", "models/tiny", "--instances", "2", "--api-key", "a", "--api-key", "b"]) == 3
    assert (seen[0].model.model, seen[0].instances, seen[0].server.api_keys) == ("models/tiny", 2, ("a", "b"))


def _module(**names):
    return type("Module", (), {name: staticmethod(value) for name, value in names.items()})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2\n", ["line 1", "'port'", "twice"]),
        ("port: [1\n", ["line"]),
        ("- 1\n", ["key: value", "list"]),
        ("x: !!python/object/apply:os.system [ls]\n", ["line 1"]),
    ],
)
def test_a_bad_file_is_named_with_its_line(text, words, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml_mapping(path)
    assert all(word in str(caught.value) for word in ["bad.yaml", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("text", "flags", "told"),
    [
        ("model: m\nblocksize: 1\n", [], ", line 2: unknown key 'blocksize' (did you mean 'block_size'?)"),
        ("model: m\n\nport: http\n", [], ", line 3: port needs a whole number from 0 to 65535, not 'http'"),
        ("# first\nmax-num-seqs: -3\n", [], ", line 2: max_num_seqs needs a whole number"),
        ("block-size: 16\nblock_size: 16\n", [], ", line 2: key 'block_size' is given twice"),
        ("3: 1\n", [], ": unknown key 3"),
        ("model: m\nmax_num_seqs: 600\n", ["--max-num-batched-tokens", "9"],
         "max_num_seqs 600 (FILE, line 2) is above --max-num-batched-tokens 9: "),
        ("model: m\nmax_num_batched_tokens: 9\n", ["--max-num-seqs", "10"],
         "--max-num-seqs 10 is above max_num_batched_tokens 9 (FILE, line 2): "),
        ("model: m\npage_size: 2MiB\nmemory: 1MiB\n", [],
         "memory 1MiB (FILE, line 3) is less than one page (page_size 2MiB (FILE, line 2))"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_file_and_line(text, flags, told, tmp_path, capsys):
    path = tmp_path / "jettison.yaml"
    path.write_text(text)
    for command in (["serve"], ["config", "show"]):
        assert main([*command, "--config", str(path), *flags]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        wanted = told.replace("FILE", str(path)) if "FILE" in told else f"{path}{told}"
        assert err.startswith(f"jettison: {wanted}"), err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_model_len: 99999\n", "(max_model_len: FILE, line 2)"),
        ("memory: 1MiB\n", "(memory: FILE, line 2)"),
        ("host: 192.0.2.7\nmemory: 64MiB\n", "(host: FILE, line 2)"),
        ("api_key_file: /nonexistent/keys\n", "(api_key_file: FILE, line 2)"),
    ],
)
def test_what_is_found_wrong_later_is_told_with_file_and_line_too(text, told, tmp_path, capsys):
    """By what reads the model, lays out memory, listens or reads another file."""
    create_model(tmp_path / "m", arch="llama", layers=1, hidden=64, heads=4, kv_heads=2, max_position_embeddings=64)
    path = tmp_path / "jettison.yaml"
    path.write_text(f"model: {tmp_path / 'm'}\n{text}")
    assert main(["serve", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(told.replace("FILE", str(path))), err


def test_what_is_wrong_elsewhere_names_the_flag_or_the_variable(tmp_path, capsys, monkeypatch):
    """And not the file, which a flag beats."""
    path = tmp_path / "jettison.yaml"
    path.write_text("model: m\nport: 1\napi_key: right\n")
    assert main(["serve", "--config", str(path), "--port", "http"]) == 2
    assert capsys.readouterr().err.startswith("jettison: --port needs")
    monkeypatch.setenv("JETTISON_API_KEY", " wrong")
    assert main(["serve", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith("jettison: JETTISON_API_KEY needs")


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert read_yaml_mapping(path) == {}


def test_flags_of_bench_and_of_synthetic_traces_are_those_that_scripts_know():
    """Names, metavars, defaults, help, panels: made from fields, and the same as when they were typed by hand."""
    known = json.loads((Path(__file__).parent / "bench_and_synth_flags.json").read_text())
    root = get_command(app)
    commands = {"bench": root.commands["bench"], "trace synth": root.commands["trace"].commands["synth"]}
    for name, command in commands.items():
        shown = [
            [*p.opts, *p.secondary_opts, p.metavar or "", repr(p.default), p.help or "", p.rich_help_panel or ""]
            for p in command.params
        ]
        assert sorted(shown) == sorted(known[name]), name


def test_the_help_of_bench_names_every_built_in_workload(capsys):
    assert main(["bench", "--help"]) == 0
    shown = re.sub(r"[\s│]", "", capsys.readouterr().out)  # a table folds words at their hyphens
    assert [name for name in PRESETS if name not in shown] == []


def test_model_create_writes_a_folder_from_its_seed(tmp_path, capsys):
    small = ["--layers", "1", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--shard-bytes", "8KiB"]
    for name in ("a", "b"):
        assert main(["model", "create", str(tmp_path / name), "--seed", "3", *small]) == 0
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= first.keys()
    capsys.readouterr()
    assert main(["model", "create", str(tmp_path / "a"), *small]) == 2
    assert str(tmp_path / "a") in capsys.readouterr().err


@pytest.mark.parametrize("value", [True, False])
def test_what_a_server_of_ones_own_is_given_comes_through_its_command_line(value, capsys):
    from jettison.live.experiments.server_process import flag_arguments

    switches = {key.name: value for key in KEYS.values() if key.is_bool}
    assert len(switches) >= 3
    arguments = flag_arguments({**switches, "memory": "1GiB", "exchange_piece_bytes": 16 << 20})
    assert main(["config", "show", "models/tiny", *arguments]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert all(rows[name] == [str(value).lower(), "flag"] for name in switches)
    assert rows["exchange_piece_bytes"] == ["16MiB", "flag"] and rows["memory"] == ["1GiB", "flag"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://[::1", "http://localhost:port"])
@pytest.mark.parametrize("command", [["bench", "--workload", "burst", "--url"], ["top", "--once"], ["top"]])
def test_an_address_that_no_client_can_ask_says_what_to_write(command, url, capsys) -> None:
    assert main([*command, url]) == 2
    assert capsys.readouterr().err.rstrip() == f"jettison: {url!r} is no server's root: write http://HOST:PORT"
