"""The burst on a trained model: its spec, its prompts, how answers are compared, and the table of its figures."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.figures import made
from benchmarks.overload import trained
from jettison.config.files import read_yaml_mapping
from jettison.device.model.create import create_model
from jettison.server.tokenizer import Tokenizer
from jettison.simulate.spec import parse_spec

SPEC = trained.HERE / "trained.yaml"
TEXT = (trained.HERE / "prose.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("trained") / "tiny"
    create_model(model, arch="qwen3", layers=2, hidden=32, heads=2, kv_heads=1, max_position_embeddings=1024)
    return model


def test_a_prompt_is_the_text_from_a_sentence_on(folder: Path) -> None:
    tokenizer = Tokenizer.from_dir(folder)
    sentences = trained.sentences_of(tokenizer, TEXT)
    plain = tokenizer.decode([token for sentence in sentences for token in sentence])
    assert plain == " ".join(TEXT.split()) and len(sentences) > 100
    prompts = trained.Prose(seed=3, sentences=sentences)
    lengths = [1, 64, 700, len(plain) + 50]
    texts = [tokenizer.decode(prompts.token_ids(index, length)) for index, length in enumerate(lengths)]
    assert [len(text) for text in texts] == lengths  # a token is a byte here
    assert all(text in f"{plain}{plain}" for text in texts)
    assert texts == [tokenizer.decode(prompts.token_ids(i, length)) for i, length in enumerate(lengths)]
    others = trained.Prose(seed=4, sentences=sentences)
    assert any(others.token_ids(i, 64) != prompts.token_ids(i, 64) for i in range(4))


def test_every_contender_meets_the_same_requests(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "fetch_model", lambda name, tell: (folder, True))
    experiment = trained.make_experiment(Namespace(spec=SPEC, duration=None), tmp_path)
    spec, setup = parse_spec(dict(read_yaml_mapping(SPEC))), experiment.setup
    assert (spec.cluster.model, [variant.name for variant in spec.variants]) == ("smollm2", ["recompute", "drop"])
    assert setup.flags()["enable_prefix_caching"] is False and setup.flags()["max_model_len"] == 1024
    assert setup.capacity_tokens() == setup.instances * setup.kv_tokens_per_instance  # as many as vLLM is given
    experiment.rate_scale = 0.5
    load = experiment.load(1)
    assert load.rows == experiment.load(1).rows and load.duration_s == 60.0
    assert max(row.input_tokens + row.output_tokens for row in load.rows) <= 1024
    answers = trained.Answers()
    options = experiment.options("a", 1, answers)
    assert options.prompts.token_ids(0, 40) == experiment.options("b", 1, answers).prompts.token_ids(0, 40)


def test_answers_are_compared_by_their_letters() -> None:
    found = {name: trained.Answers() for name in ("drop", "recompute")}
    events = [{"choices": [{"text": "Sé"}]}, {"choices": [{"text": "a."}]}, {"choices": [], "usage": {}}]
    stream = b"".join(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events)
    for cut in range(len(stream)):  # wherever the socket cuts
        found["drop"].add(cut, stream[:cut])
        found["drop"].add(cut, stream[cut:] + b"data: [DONE]\n\n")
        found["recompute"].add(cut, stream)
    texts = {name: answers.texts() for name, answers in found.items()}
    assert set(texts["drop"].values()) == {"Séa."}
    assert trained.compared(texts) == {"answers_compared": len(stream), "answers_differ": 0}
    texts["recompute"][0] += "!"
    del texts["recompute"][1]
    assert trained.compared(texts) == {"answers_compared": len(stream), "answers_differ": 2}


def test_figures_stand_beside_those_of_drop() -> None:
    times = {f"{name}_{of}_s": 2.0 for name in ("ttft", "tpot", "e2e") for of in ("mean", "p50", "p99")}
    others = {"tokens_per_s": 100.0, "drops": 1, "preemptions": 0}
    rows = [
        {"seed": 0, "contender": "recompute", **times, **others, "ttft_p99_s": 9.0},
        {"seed": 0, "contender": "drop", **times, **others, "answers_differ": 0},
        {"seed": 1, "contender": "vllm", **times, **others},
    ]
    rows = trained.with_ratios(rows)
    assert [row["ttft_p99_s_over_drop"] for row in rows] == [4.5, 1.0, None]
    assert [row["e2e_mean_s_over_drop"] for row in rows] == [1.0, 1.0, None]
    page = made("overload_trained", {"rows": rows}).splitlines()
    assert page[2].startswith("| 0 | recompute | 2 | 9 | 2,000 | 2,000 | 2 | 2 |") and page[3].endswith("| 1 | 0 | 0 |")
