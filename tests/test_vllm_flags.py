"""vLLM's flags: each has a verdict, and lines and mappings of them become ours."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cli.vllm_lines import own_options
from jettison.config import KEYS, EngineConfig
from jettison.config.vllm.engine_rules import ENGINE
from jettison.config.vllm.facts import FACTS_FILE, OLDER, Fact, known_aliases, known_flags, read_facts
from jettison.config.vllm.rules import Drop, Keep, Refuse, Set
from jettison.config.vllm.serving_rules import SERVING
from jettison.config.vllm.table import RULES
from jettison.config.vllm.translate import decide, note_of, translate_line, translate_values
from jettison.errors import ConfigError

OURS = own_options()


def translated(*words):
    return translate_line(words, OURS)


def test_the_model_may_be_a_flag_beside_another_place():
    for words in (["in.jsonl", "--model", "m"], ["--model", "m", "in.jsonl"]):
        found = translate_line(words, OURS, 2)
        assert not found.refusals and found.line == ["in.jsonl", "m"]
    for words in (["in.jsonl", "n", "--model", "m"], ["in.jsonl", "--model", "m", "--model", "n"]):
        assert "named twice" in str(translate_line(words, OURS, 2).refusals)
    told = str(translate_line(["--model", "m"], OURS, 2).refusals)
    assert told == "--model m: what stands before the model is missing"


def test_every_flag_has_one_verdict_and_a_meaning():
    names = [rule.name for rule in (*SERVING, *ENGINE)]
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert set(names) == set(known_flags())
    assert [name for name, rule in RULES.items() if not rule.meaning.endswith(".") or len(rule.meaning) < 4] == []
    assert [name for name, rule in RULES.items() if rule.verdict != "done" and len(rule.answer) < 10] == []


def test_what_is_done_is_ours():
    assert {name for name, rule in RULES.items() if rule.verdict == "done"} <= OURS.keys()
    rule = RULES["--seed"]
    assert isinstance(decide(rule, known_flags()[rule.name], "1", ()), Refuse), "without a key: never dropped"


def test_what_is_both_ours_and_vllms_is_done_or_mapped():
    """A key that is added later counts, whatever the table says of its name."""
    both = {key.flag for key in KEYS.values()} & RULES.keys()
    assert len(both) > 35
    for name in both:
        assert not isinstance(decide(RULES[name], known_flags()[name], known_flags()[name].default, OURS), Refuse)


def test_older_flags_are_no_current_ones_by_another_spelling():
    _, current = read_facts()
    assert len(current) > 300 and len({fact.name for fact in OLDER}) == len(OLDER) > 40
    assert not {fact.name for fact in OLDER} & current.keys()
    assert all(not name.startswith("--no-") and "_" not in name for name in known_flags())


def test_the_data_reads_back():
    document = json.loads(FACTS_FILE.read_text())
    _, facts = read_facts()
    assert [fact.to_json() for fact in facts.values()] == document["flags"]


def test_what_is_mapped_goes_to_keys_that_there_are():
    values = {"--watermark": "0.1", "--device-ids": "0", "--data-parallel-size": "2", "--swap-space": "4",
              "--kv-offloading-size": "2.5", "--gpu-memory-utilization": "0.5", "--log-level": "WARNING",
              "--api-server-count": "2"}  # fmt: skip
    for name, rule in RULES.items():
        if rule.verdict == "mapped":
            fact = known_flags()[name]
            default = True if fact.kind == "boolean" else fact.default
            outcome = rule.act(values.get(name, "auto" if default is None else default))
            if isinstance(outcome, Set):
                assert outcome.key in KEYS
                KEYS[outcome.key].parse(outcome.value)
            elif not isinstance(outcome, Drop):
                assert name in OURS or isinstance(outcome, Refuse)


def default_of(fact: Fact):
    return False if fact.kind in ("switch", "boolean") and fact.default is None else fact.default


@pytest.mark.parametrize("name", [name for name, fact in known_flags().items() if default_of(fact) is not None])
def test_what_vllm_takes_without_the_flag_is_never_refused(name):
    fact = known_flags()[name]
    found = translate_values({name.removeprefix("--"): default_of(fact)}, KEYS)
    assert not found.refusals
    for key, value in found.values.items():
        KEYS[key.replace("-", "_")].parse(value)
    if fact.kind not in ("switch", "boolean") and name != "--model" and not isinstance(fact.default, (dict, list)):
        assert not translated("m", name, str(fact.default)).refusals


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("m -tp 1 -pp=1", "m"),
        ("m --tensor_parallel_size 1 --max_model_len=4k", "--max-model-len=4k m"),
        ("m --dtype half", "--dtype=bfloat16 m"),
        ("m --dtype float", "--dtype=float32 m"),
        ("m --dtype bfloat16", "--dtype=bfloat16 m"),
        ("m --max-model-len -1", "--max-model-len=-1 m"),
        ("m --load-format dummy", "--load-format=random m"),
        ("m --load_format safetensors", "--load-format=auto m"),
        ("m -dp 4", "--instances=4 m"),
        ("m --data-parallel-size 4 --instances 3", "--instances 3 m"),
        ("m -O3 -O 2 -O=1 -O", "m"),
        ("m --optimization-level 3 --enforce-eager", "m"),
        ("m -q awq --kv-cache-dtype auto", "m"),
        ("m --swap-space 4", "--host-memory=4GiB m"),
        ("m --swap-space 0.5", "--host-memory=512MiB m"),
        ("m --swap-space 0", "m"),
        ("m --device-ids 0,2", "--cards=0,2 m"),
        ("m --async-scheduling", "--step-ahead=on m"),
        ("m --no-async-scheduling", "--step-ahead=off m"),
        ("m --served-model-name a b", "--served-model-name=a --served-model-name=b m"),
        ("--served-model-name a m", "--served-model-name=a m"),
        ("m --api-key a b --api-key c", "--api-key=a --api-key=b --api-key=c m"),
        ("--api-key a m", "--api-key=a m"),
        ("--model m --port 1", "--port=1 m"),
        ("--model=m", "m"),
        ("--served-model-name a b --model m", "--served-model-name=a --served-model-name=b m"),
        ("m --no-enable-prefix-caching", "--no-enable-prefix-caching m"),
        ("m --enable-prefix-caching=false", "--no-enable-prefix-caching m"),
        ("m --no-enable-log-requests --disable-log-requests", "m"),
        ("m --uvicorn-log-level warning --log-level WARNING", "--log-level=warning m"),
        ("m --default-chat-template-kwargs.enable_thinking false",
         '--default-chat-template-kwargs={"enable_thinking": false} m'),
        ("m --override-generation-config.temperature=0.5 --override-generation-config.top_k 3",
         '--override-generation-config={"temperature": 0.5, "top_k": 3} m'),
        ("m --compilation-config.pass_config.fuse_x true --compilation-config.cudagraph_capture_sizes+ 1,2", "m"),
        ("m --max-num-batched 8k", "--max-num-batched-tokens=8k m"),
        ("m --hf-token", "m"),
        ("m --tokenizer other --tokenizer-revision v1", "--tokenizer=other --tokenizer-revision=v1 m"),
        ("--tokenizer m --model m", "--tokenizer=m m"),
        ("m --memory 1GiB --no-rebalance --host_memory=2GiB", "--memory 1GiB --no-rebalance --host-memory=2GiB m"),
        ("m --tool-call-parser hermes --enable-auto-tool-choice --reasoning-parser qwen3", None),
        ("m --limit-mm-per-prompt.image 0 --language-model-only", "m"),
        ("m --structured-outputs-config.disable_any_whitespace true --structured-outputs-config.backend=xgrammar",
         '--structured-outputs-config={"disable_any_whitespace": true} m'),
        ('m --structured-outputs-config {"backend":"auto","reasoning_parser":""}', "m"),
        ("m --guided-decoding-disable-any-whitespace",
         '--structured-outputs-config={"disable_any_whitespace": true} m'),
        ("m --reasoning-parser= --tool-call-parser=", "m"),
        ("m --response-role assistant --no-enable-per-request-metrics", "m"),
        ("m --distributed-executor-backend ray --data-parallel-size 3", "--launcher=ray --instances=3 m"),
        ("m --distributed-executor-backend ray --data-parallel-backend ray --launcher ray", None),
        ("m --help=ModelConfig", "--help"),
        ("m --config-format mistral --config f.yaml", "--config=f.yaml m"),
        ("m --allowed-origins [\"*\"] -- -x", '--allowed-origins=["*"] m -- -x'),
    ],
)
def test_a_line_becomes_one_of_ours(words, line):
    found = translated(*words.split())
    found.check()
    if line is not None:
        assert " ".join(found.line) == line
    assert not found.refusals


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("m -tp 2", "-tp 2: an instance is one worker"),
        ("m --trust-remote-code", "--trust-remote-code: nothing from a model folder is executed"),
        ("m -q bitsandbytes", "-q bitsandbytes: FP8, AWQ"),
        ("m --load-format gguf", "`jettison model import"),
        ("m --kv-cache-dtype fp8", "--kv-cache-dtype fp8: KV has the precision"),
        ("m --task embed", "--task embed: all models are served to generate text"),
        ("m --runner pooling", "--runner pooling: embeddings"),
        ("m --hf-overrides {\"rope_theta\":1}", "--hf-overrides: edit config.json"),
        ("m --model other", "--model other: the model is named twice"),
        ("m --max-model-len", "--max-model-len: needs a value"),
        ("m --tensor-parallel-size --enforce-eager", "--tensor-parallel-size: needs a value"),
        ("m --skip-tokenizer-init", "--skip-tokenizer-init: prompts and answers are texts"),
        ("m --memoryy 3", "--memoryy: no such option, here or in vLLM"),
        ("m --tensor-paralel-size 1", "did you mean '--tensor-parallel-size'?"),
        ("m --lora x", "--lora: adapters (LoRA) are not served"),
        ('m --structured-outputs-config {"enable_in_reasoning":true}', "not enable_in_reasoning"),
        ("m --structured-outputs-config.reasoning_parser qwen3", "not reasoning_parser: say --reasoning-parser"),
        ("m --structured-outputs-config xgrammar", "needs a JSON object"),
        ("m --response-role bot", "--response-role bot: answers have OpenAI's form"),
        ("m --fingerprint-value x", "--fingerprint-value x: answers have"),
        ("m --enable-per-request-metrics", "--enable-per-request-metrics: answers have"),
        ("m --device-ids GPU-1", "CUDA_VISIBLE_DEVICES takes names"),
        ("m --swap-space much", "--swap-space much: needs a number"),
        ("m --distributed-executor-backend external_launcher", "--launcher ray finds other hosts"),
        ("m --hf-token secret --nnodes 2 --uds secret2", "--nnodes 2: one server has all instances"),
    ],
)
def test_what_does_not_fit_is_told(words, told):
    found = translated(*words.split())
    with pytest.raises(ConfigError) as caught:
        found.check()
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert "secret " not in str(caught.value) + str(found.notes)


def test_all_that_does_not_fit_is_told_at_once_and_each_reason_once():
    words = "m --enable-lora --max-lora-rank 64 -tp 2 --nonsense --trust-remote-code --port 8"
    told = str(translated(*words.split()).refusals)
    assert "--enable-lora, --max-lora-rank 64: adapters" in told and told.count("adapters (LoRA)") == 1
    assert all(flag in told for flag in ("-tp 2:", "--nonsense:", "--trust-remote-code:")) and "--port" not in told


def test_what_has_no_effect_is_told_in_one_line():
    line = "m --enforce-eager -O2 --dtype half --disable-log-requests --enable-chunked-prefill"
    found = translated(*line.split(" "))
    (line,) = note_of(found.notes)
    assert "--enforce-eager: what is captured or compiled" in line and "--dtype half: computed as bfloat16" in line
    assert "--disable-log-requests: requests and answers are never logged" in line and "\n" not in line
    assert note_of(translated("m", "--port", "1").notes) == ()


@given(st.lists(st.one_of(
    st.sampled_from([*known_flags(), *known_aliases(), *OURS]),
    st.sampled_from(["m", "1", "auto", "{}", "[", "-1", "--", "-", "", "=", "--a.b", "--model=", "-O", "fp8", "a=b"]),
    st.text(max_size=6),
), max_size=8))  # fmt: skip
def test_any_line_is_read_or_refused(words):
    found = translated(*words)
    at_rest = found.line.index("--") if "--" in found.line else len(found.line)
    if not found.refusals:
        flags = [word.partition("=")[0] for word in found.line[:at_rest] if word.startswith("--")]
        assert set(flags) <= OURS.keys()
    assert bool(str(found.refusals)) == bool(found.refusals)


# --- files and keywords


def test_a_mapping_becomes_ours():
    found = translate_values({
        "tensor-parallel-size": 1, "dtype": "half", "data_parallel_size": 2, "max-model-len": "4k",
        "enforce_eager": True, "served_model_name": ["a", "b"], "quantization": None, "memory": "1GiB",
        "trust_remote_code": False,
        "compilation-config": {"mode": 3}, "model": "m", "limit_mm_per_prompt": {"image": 0}, "enable_lora": False,
    }, KEYS)  # fmt: skip
    found.check()
    assert found.values == {"dtype": "bfloat16", "instances": 2, "max-model-len": "4k", "served_model_name": ["a", "b"],
                            "memory": "1GiB", "model": "m"}  # fmt: skip
    assert found.origins["instances"] == "data_parallel_size"
    config = EngineConfig.resolve(**{name.replace("-", "_"): value for name, value in found.values.items()})
    assert config.model.max_model_len == 4000 and config.model.served_model_names == ("a", "b")
    assert config.model.served_model_name == "a" and config.instances == 2


def test_a_mapping_names_all_that_does_not_fit():
    values = {"tensor_parallel_size": 2, "enable_lora": True, "nonsense": 1}
    found = translate_values(values, KEYS, lambda key: f"f: {key}")
    assert found.values == {"nonsense": 1}, "resolve names it, with its place"
    told = str(found.refusals)
    assert "tensor_parallel_size (f: tensor_parallel_size): an instance" in told and "enable_lora (f: " in told


def test_our_own_key_goes_before_vllms():
    found = translate_values({"data_parallel_size": 2, "instances": 3}, KEYS)
    assert found.values == {"instances": 3} and "instances says it: " not in str(found.notes)
    assert "data_parallel_size: instances says it" in str(found.notes)


@pytest.mark.parametrize(
    ("text", "length"),
    [("4k", 4000), ("32K", 32768), ("25.6k", 25600), ("1m", 10**6), ("1M", 1 << 20), (-1, None), ("-1", None),
     ("auto", None), (4096, 4096)],
)  # fmt: skip
def test_lengths_are_read_as_vllm_reads_them(text, length):
    assert EngineConfig.resolve(model="m", max_model_len=text).model.max_model_len == length


@pytest.mark.parametrize("text", ["1.5K", "k", "4kk", "-2", 0, "0", "4 x", True, 1.5])
def test_what_is_no_length_is_named(text):
    with pytest.raises(ConfigError, match="--max-model-len"):
        EngineConfig.resolve(model="m", max_model_len=text)


def test_a_token_budget_grows_with_the_requests_that_run():
    assert EngineConfig.resolve(model="m", max_num_seqs=1024).scheduler.max_num_batched_tokens == 1024
    assert EngineConfig.resolve(model="m", max_num_seqs=8).scheduler.max_num_batched_tokens == 512
    assert EngineConfig.resolve(model="m", max_num_batched_tokens="8k").scheduler.max_num_batched_tokens == 8000


def test_a_share_of_a_card_is_told_where_there_is_none():
    config = EngineConfig.resolve(model="m", gpu_memory_utilization=0.9)
    assert config.memory.gpu_memory_utilization is None and "--memory bounds" in config.notes[0]
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        EngineConfig.resolve(model="m", gpu_memory_utilization=0.9, device="cpu")


def test_names_are_taken_once_and_auto_is_none():
    assert EngineConfig.resolve(model="m", served_model_name=["a", "b", "a"]).model.served_model_names == ("a", "b")
    assert EngineConfig.resolve(model="x/m", served_model_name="auto").model.served_model_names == ("m",)
    for wrong in ([""], 7, [7]):
        with pytest.raises(ConfigError, match="--served-model-name"):
            EngineConfig.resolve(model="m", served_model_name=wrong)


def test_keep_is_the_outcome_of_our_own():
    assert isinstance(decide(RULES["--port"], known_flags()["--port"], "1", OURS), Keep)
