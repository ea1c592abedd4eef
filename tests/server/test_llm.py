"""``from jettison import LLM``: the engine in scripts and notebooks, over real worker processes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import jettison
from jettison import LLM, SamplingParams
from jettison.device.model.create import create_model
from jettison.errors import BudgetError, ConfigError, JettisonError, NotReadyError, RequestError, UserError
from jettison.server.llm_types import Logprob
from waiting import PATIENCE_S

pytestmark = pytest.mark.live

SMALL = {"memory": "64MiB", "num_threads": 1, "max_num_seqs": 16}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "model"
    create_model(folder, arch="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, seed=1, std=0.2)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return folder


@pytest.fixture(scope="module")
def llm(model_dir):
    with LLM(model_dir, **SMALL, tensor_parallel_size=1, max_model_len="1k", enforce_eager=True) as made:
        yield made


def quietly(llm, *arguments, **options):
    return llm.generate(*arguments, use_tqdm=False, **options)


def test_answers_come_in_the_order_of_the_prompts(llm):
    prompts = [f"number {i} " + "x" * (i * 7 % 90) for i in range(80)]
    outputs = quietly(llm, prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(o.outputs) == 1 and o.finished and o.outputs[0].index == 0 for o in outputs)
    assert all(1 <= len(o.outputs[0].token_ids) <= 6 for o in outputs)
    assert {o.outputs[0].finish_reason for o in outputs} <= {"length", "stop"}
    assert len({output.request_id for output in outputs}) == 80
    alone = [quietly(llm, prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts[:4]]
    assert alone == [output.outputs[0].token_ids for output in outputs[:4]]


def test_a_prompt_is_a_text_or_token_ids_in_every_form(llm):
    (text,) = quietly(llm, "Hello", GREEDY)
    ids = text.prompt_token_ids
    forms = [ids, tuple(ids), [ids], {"prompt_token_ids": ids}, {"prompt": "Hello"}, [{"prompt": "Hello"}]]
    for form in forms:
        (output,) = quietly(llm, form, GREEDY)
        assert output.outputs[0].token_ids == text.outputs[0].token_ids and output.prompt_token_ids == ids
    assert quietly(llm, ids, GREEDY)[0].prompt is None
    assert quietly(llm, [], GREEDY) == []


def test_parameters_of_each_prompt(llm):
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 5, 3)]
    outputs = quietly(llm, ["a", "b", "c"], each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    several = quietly(llm, "a", SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True))[0].outputs
    assert [choice.index for choice in several] == [0, 1, 2]
    assert quietly(llm, "a", SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True))[0].outputs == several
    longest = quietly(llm, "a" * 900, SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0]
    assert len(longest.prompt_token_ids) + len(longest.outputs[0].token_ids) == 1000


def test_logprobs_have_vllms_shape(llm):
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = quietly(llm, "Hello", params)
    choice = output.outputs[0]
    assert len(choice.logprobs) == 4 and all(len(entry) in (2, 3) for entry in choice.logprobs)
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert isinstance(entry[token], Logprob) and entry[token].rank == 1
        assert isinstance(entry[token].decoded_token, str)
    own = sum(entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
    assert choice.cumulative_logprob == pytest.approx(own)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(token in entry for token, entry in pairs)
    plain = quietly(llm, "Hello", GREEDY)[0]
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None


def test_what_stopped_an_answer(llm):
    free = quietly(llm, "Hello", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].outputs[0]
    token = free.token_ids[4]
    by_token = quietly(llm, "Hello", SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[token]))[0].outputs[0]
    assert (by_token.finish_reason, by_token.stop_reason, by_token.token_ids[-1]) == ("stop", token, token)
    piece = next(c for c in free.text if c.isascii())
    params = SamplingParams(max_tokens=12, temperature=0, stop=piece, ignore_eos=True)
    by_text = quietly(llm, "Hello", params)[0].outputs[0]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", piece) and piece not in by_text.text
    kept = quietly(llm, "Hello", SamplingParams(max_tokens=12, temperature=0, stop=[piece], ignore_eos=True,
                                                include_stop_str_in_output=True))[0].outputs[0]  # fmt: skip
    assert kept.text == by_text.text + piece


def test_chats_go_through_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert "Hi" in output.prompt and output.outputs[0].token_ids
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [each.outputs[0].text for each in both] == [output.outputs[0].text] * 2
    template = "{% for m in messages %}[{{ m.content }}{{ extra }}]{% endfor %}"
    (own,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"extra": "!"},
                      tools=None, chat_template_content_format="auto")  # fmt: skip
    assert own.prompt == "[Hi!]"
    logprobs = llm.chat(messages, SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)[0].outputs[0].logprobs
    assert len(logprobs) in (1, 2)


def test_a_chat_takes_the_names_of_the_template_and_no_others(llm):
    messages = [{"role": "user", "content": "Hi"}]
    for wrong in ({"max_tokens": 500}, {"n": 2}, {"nonsense": 1}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            llm.chat(messages, GREEDY, use_tqdm=False, **wrong)
    with pytest.raises(RequestError, match="say it to LLM"):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template_content_format="openai")
    (output,) = llm.chat(messages, GREEDY, False, None, "[{{ messages[0].content }}]")
    assert output.prompt == "[Hi]"


def test_the_tokenizer_is_the_engines(llm):
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == output.prompt_token_ids
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == output.prompt
    assert tokenizer.decode(tokenizer.encode("Hello", add_special_tokens=False)) == "Hello"
    assert max(tokenizer.encode("Hello")) < len(tokenizer) and tokenizer.chat_template
    if tokenizer.eos_token is not None:
        assert tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
    with pytest.raises(RequestError, match="role"):
        tokenizer.apply_chat_template([{"content": "Hi"}])


def test_a_grammar_begins_behind_the_thoughts_of_a_named_parser(model_dir):
    messages = [{"role": "user", "content": "Hi"}]
    opened = {"chat_template": "{{ messages[0].content }}<think>"}
    closed = {"chat_template": "{{ messages[0].content }}<think></think>"}
    params = SamplingParams(max_tokens=12, temperature=0, structured_outputs={"regex": "a{9}"})
    with LLM(model_dir, **SMALL, reasoning_parser="qwen3") as llm:
        (thinks,), (answers,) = (llm.chat(messages, params, use_tqdm=False, **each) for each in (opened, closed))
        assert answers.outputs[0].text == "aaaaaaaaa"
        assert not set(thinks.outputs[0].text) <= {"a"}, "free, and told: texts are what the model writes"
        free = llm.chat(messages, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False, **opened)[0]
        assert thinks.outputs[0].text == free.outputs[0].text


def test_without_a_named_parser_a_grammar_binds_from_the_first_token(llm):
    params = SamplingParams(max_tokens=12, temperature=0, structured_outputs={"regex": "a{9}"})
    template = "{{ messages[0].content }}<think>"
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False, chat_template=template)
    assert output.outputs[0].text == "aaaaaaaaa"


def test_calls_are_text_so_no_channel_stands_before_what_a_grammar_binds(model_dir):
    """Nor has its end anything of it where the collector finds it on its own thread."""
    params = SamplingParams(max_tokens=12, temperature=0, structured_outputs={"regex": "a{9}"})
    llm = LLM(model_dir, **SMALL, chat_template="{{ messages[0].content }}{# <|channel|> #}")
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert output.outputs[0].text == "aaaaaaaaa"
    loop, llm.own = llm._loop, llm  # a cycle
    del llm

    async def collect():
        gc.collect()

    loop.run(collect())
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive()


def test_no_length_is_the_longest_whatever_the_maker_says_and_no_longer_than_the_operator_does(llm, monkeypatch):
    longest = SamplingParams(max_tokens=None, min_tokens=32, temperature=0, ignore_eos=True)
    state, messages = llm._served.state, [{"role": "user", "content": "Hi"}]

    def lengths(**defaults):
        told = msgspec.structs.replace(state.settings.sampling_defaults, **defaults)
        monkeypatch.setattr(state, "settings", replace(state.settings, sampling_defaults=told))
        outputs = [*quietly(llm, "a" * 900, longest), *llm.chat(messages, longest, use_tqdm=False)]
        return [(len(output.prompt_token_ids), len(output.outputs[0].token_ids)) for output in outputs]

    assert [sum(each) for each in lengths(max_tokens=3)] == [1000, 1000]
    assert [answer for _, answer in lengths(max_tokens=40, max_tokens_bound=40)] == [40, 40]
    cut = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True, truncate_prompt_tokens=-1)
    assert len(quietly(llm, "a" * 2000, cut)[0].prompt_token_ids) == 999


def test_the_makers_sampling_holds_where_none_is_given(llm):
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.6, 20, 16)
    assert len(quietly(llm, "a")[0].outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda llm: quietly(llm, ["a", "b"], SamplingParams(temperature=-1)), "prompt 0: temperature must be from"),
        (lambda llm: quietly(llm, ["a", ""]), "prompt 1: prompt must not be empty."),
        (lambda llm: quietly(llm, [[1, 2], [10**6]]), "prompt 1: prompt: token ids must lie in"),
        (lambda llm: quietly(llm, "a" * 2000), "prompt 0: This model's maximum context length is 1000 tokens"),
        (lambda llm: quietly(llm, "a", GREEDY, lora_request=object()), "lora_request: adapters (LoRA) are not served"),
        (lambda llm: quietly(llm, 7), "prompts need a text, token ids, or a list of them, not int"),
        (lambda llm: quietly(llm, [None]), "prompt 0: needs a text or token ids, not NoneType"),
        (lambda llm: quietly(llm, {"prompt": "a", "multi_modal_data": {"image": 1}}), "multi_modal_data is not served"),
        (lambda llm: quietly(llm, ["a", "b"], [GREEDY]), "1 sampling_params for 2 prompts"),
        (lambda llm: quietly(llm, "a", {"temperature": 1}), "sampling_params need jettison.SamplingParams"),
        (lambda llm: llm.chat("hi", use_tqdm=False), "messages need a list of messages"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], use_tqdm=False), "messages"),
    ],
)
def test_a_mistake_is_one_line_and_costs_nothing(call, told, llm):
    with pytest.raises(RequestError) as caught:
        call(llm)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert len(quietly(llm, "still", GREEDY)) == 1


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"trust_remote_code": True, "tensor_parallel_size": 2}, ConfigError,
         ["trust_remote_code: ", "tensor_parallel_size: "]),
        ({"memoryy": "1GiB"}, ConfigError, ["memoryy", "did you mean 'memory'"]),
        ({"max_num_seqs": "many"}, ConfigError, ["--max-num-seqs", "'many'"]),
        ({"reasoning_parser": "nonsense"}, ConfigError, ["nonsense"]),
        ({"memory": "64KiB"}, BudgetError, ["65536 bytes is too small"]),
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_are_one_line(flags, error, words, model_dir):
    before = threading.active_count()
    with pytest.raises(error) as caught:
        LLM(model_dir, **(SMALL | flags))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    assert threading.active_count() <= before, "no thread is left"


def test_a_missing_model_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="`hf download Org/Name`"):
        LLM("Org/Name")


def test_a_model_of_the_hubs_cache_by_its_name(model_dir, monkeypatch, tmp_path, caplog):
    snapshots = tmp_path / "models--Org--Tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / ("a" * 40)).symlink_to(model_dir)
    caplog.set_level(logging.INFO, logger="jettison.server.llm")
    with LLM("Org/Tiny", download_dir=str(tmp_path), revision="aaaaaaa", seed=3, swap_space=0, **SMALL) as llm:
        assert len(quietly(llm, "Hello", GREEDY)) == 1
    assert not [record for record in caplog.records if "\n" in record.getMessage()]


@pytest.fixture(scope="module")
def other_tokenizer(model_dir, tmp_path_factory) -> Path:
    """The model's tokenizer with "a" and "b" exchanged and a template of its own, in a folder without a model."""
    folder = tmp_path_factory.mktemp("other")
    document = json.loads((model_dir / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    words = json.loads((model_dir / "tokenizer_config.json").read_text())
    words["chat_template"] = "{{ messages[0].content }}!"
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


def test_another_tokenizer_counts_for_prompts_templates_grammars_and_answers(llm, model_dir, other_tokenizer):
    a, b = (llm.get_tokenizer().encode(letter) for letter in "ab")
    only = SamplingParams(max_tokens=4, structured_outputs={"choice": ["abba"]})
    with LLM(model_dir, tokenizer=str(other_tokenizer), **SMALL) as made:
        assert made.get_tokenizer().encode("ab") == b + a
        assert made.chat([{"role": "user", "content": "b"}], GREEDY, use_tqdm=False)[0].prompt == "b!"
        output = quietly(made, "x", only)[0].outputs[0]
    assert output.text == "abba" and output.token_ids == [*b, *a, *a, *b]


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(model_dir, tmp_path):
    create_model(tmp_path / "wide", arch="qwen3", layers=1, hidden=32, heads=4, kv_heads=2, vocab=300)
    with pytest.raises(ConfigError, match=r"--tokenizer .*wide has tokens up to 2.*: it is another model's"):
        LLM(model_dir, tokenizer=str(tmp_path / "wide"), **SMALL)
    with pytest.raises(UserError, match=r"tokenizer\.json is missing: .*`hf download Org/Tok`"):
        LLM(model_dir, tokenizer="Org/Tok", **SMALL)


def test_progress_is_a_bar_or_what_makes_one(llm, capsys):
    made = []

    class Bar:
        def __init__(self, **options):
            made.append(options)
            self.count = 0

        def update(self, number):
            self.count += number

        def close(self):
            made.append(self.count)

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    assert made == [{"total": 3, "desc": "Answered prompts"}, 3]
    quietly(llm, "a", GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    assert "Answered prompts: 100%" in capsys.readouterr().err


async def test_inside_a_running_loop_as_in_a_notebook(llm):
    assert asyncio.get_running_loop().is_running()
    assert len(quietly(llm, ["a", "b"], GREEDY)) == 2
    both = await asyncio.gather(*(asyncio.to_thread(quietly, llm, f"t{i}", GREEDY) for i in range(4)))
    assert [outputs[0].prompt for outputs in both] == ["t0", "t1", "t2", "t3"]


def test_after_its_end_it_says_so(model_dir):
    with LLM(model_dir, **SMALL, instances=2) as llm:
        assert len(quietly(llm, ["a"] * 40, GREEDY)) == 40
    llm.shutdown()
    with pytest.raises(NotReadyError, match="shut down"):
        llm.generate("a")


SCRIPT = """
import sys
from jettison import LLM, SamplingParams
llm = LLM(sys.argv[1], memory="64MiB", num_threads=1)
params = SamplingParams(max_tokens=3, structured_outputs={"regex": "a{9}"})
outputs = llm.generate(["a", "b"], params, use_tqdm=False)
assert "torch" not in sys.modules  # its workers have it
print(len(outputs[1].outputs[0].token_ids))
if len(sys.argv) > 2:
    raise SystemExit(llm.shutdown())
"""


@pytest.mark.parametrize("arguments", [[], ["closes"]])
def test_a_plain_script_needs_no_guard_and_leaves_nothing(arguments, model_dir, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    marked = os.environ | {"LLM_TEST": str(tmp_path)}
    run = subprocess.run([sys.executable, str(script), str(model_dir), *arguments], capture_output=True, text=True,
                         timeout=120, env=marked)  # fmt: skip
    assert run.returncode == 0 and run.stdout == "3\n" and run.stderr == "", "the engine is closed, told or not"
    deadline = time.monotonic() + PATIENCE_S
    while (left := _marked(f"LLM_TEST={tmp_path}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _marked(word):
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and word.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def test_an_interrupt_ends_a_call_and_not_the_model(llm):
    def interrupt():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        _ask_for_long(llm)
    assert len(quietly(llm, "after", GREEDY)) == 1


def _ask_for_long(llm):
    for _ in range(1000):
        quietly(llm, ["x" * 500] * 64, SamplingParams(max_tokens=200, ignore_eos=True))


def test_its_own_loop_cannot_wait_for_itself(llm):
    async def inside():
        with pytest.raises(JettisonError, match="its own event loop"):
            quietly(llm, "a")
        return True

    assert llm._loop.run(inside())


def test_the_package_stays_light_until_the_class_is_asked_for():
    script = ("import sys, jettison, json; light = sorted({'torch', 'starlette', 'numpy'} & set(sys.modules));"
              "from jettison import SamplingParams; params = sorted({'torch'} & set(sys.modules));"
              "print(json.dumps([light, params, 'LLM' in dir(jettison), hasattr(jettison, 'Nothing')]))")  # fmt: skip
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    light, _, offered, other = json.loads(run.stdout)
    assert light == [] and offered and not other
    assert jettison.SamplingParams is SamplingParams
