"""What fields of vLLM's do to prompts and answers, beyond having an effect at all."""

from __future__ import annotations

import json

import pytest
import tokenizers
from fake_engine import FakeEngine, bytes_of
from served import CHAT_TEMPLATE, EOS, write_tokenizer
from tokenizers import processors

from jettison.server.tokenizer import Tokenizer

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "Sure"}]
BASE = {
    CHAT: {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "seed": 3},
    COMPLETIONS: {"prompt": "hi there", "max_tokens": 8, "temperature": 0, "seed": 3},
}  # fmt: skip


def script(request):
    return [*b"abcdefgh"][: request.params.max_tokens]


def the_text(answer) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.fixture
def with_bos(tmp_path):
    """A tokenizer that puts a token before every text, unless told not to."""
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_dir(tmp_path)


async def test_special_tokens_of_the_tokenizer_itself(serve, with_bos):
    """They are added to a prompt, and to a chat only where that is asked for: the template writes its own."""
    assert CHAT_TEMPLATE.startswith("{{ bos_token }}")
    engine = FakeEngine(script)
    async with serve(engine, tokenizer=with_bos) as served:
        for endpoint, value, num_bos in (
            (COMPLETIONS, None, 1), (COMPLETIONS, False, 0), (COMPLETIONS, True, 1), (CHAT, None, 1), (CHAT, False, 1),
            (CHAT, True, 2),
        ):  # fmt: skip
            answer = await served.post(endpoint, BASE[endpoint] | {"add_special_tokens": value})
            assert answer.status_code == 200
            assert list(engine.accepted[-1].prompt_token_ids[:3]).count(256) == num_bos, (endpoint, value)
        tokenized = await served.post(TOKENIZE, {"messages": MESSAGES, "add_special_tokens": True})
        assert tokenized.json()["tokens"][:2] == [256, 256]


def test_special_tokens_side_by_side_are_joined(tmp_path):
    """A tokenizer without a decoder has a space between any two tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.add_special_tokens(["<x>", "<y>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)

    def text(*, joins, skips=False):
        detokenizer = tokenizer.detokenizer(skips, joins_special_tokens=joins)
        return "".join(detokenizer.push(token) for token in (0, 3, 4, 3, 1, 4)) + detokenizer.flush()

    assert text(joins=False) == tokenizer.decode([0, 3, 4, 3, 1, 4], False) == "a <x> <y> <x> b <y>"
    assert text(joins=True) == "a <x><y><x> b <y>"
    assert text(joins=True, skips=True) == "a b"


# --- what becomes of an answer


async def test_what_stopped_an_answer_may_stay_in_it(serve):
    async with serve(FakeEngine(lambda request: [*b"abc", EOS, *b"def"])) as served:
        for fields, text in (
            ({}, "abc"), ({"include_stop_str_in_output": True}, "abc"),  # a special token is no text
            ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "abc</s>"),
            ({"skip_special_tokens": False}, "abc"),
            ({"include_stop_str_in_output": True, "stop_token_ids": [98]}, "ab"),
            ({"include_stop_str_in_output": True, "stop": ["bc", "c"]}, "abc"),
            ({"include_stop_str_in_output": True, "stop": ["b"], "min_tokens": 2}, "abc"),
        ):  # fmt: skip
            for stream in (False, True):
                answer = await served.post(COMPLETIONS, BASE[COMPLETIONS] | fields | {"stream": stream})
                if stream:
                    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
                    found = "".join(event["choices"][0]["text"] for event in events)
                else:
                    found = the_text(answer.json())
                assert found == text, (fields, stream)


async def test_an_answer_that_repeats_itself_ends(serve):
    engine = FakeEngine(bytes_of("xyz"))
    async with serve(engine) as served:
        for detection, num_tokens in (
            ({"max_pattern_size": 3, "min_count": 2}, 6), ({"max_pattern_size": 3, "min_count": 4}, 12),
            ({"max_pattern_size": 2, "min_count": 2}, 40), ({"max_pattern_size": 0}, 40),
            ({"max_pattern_size": 6, "min_pattern_size": 4, "min_count": 2}, 12),
        ):  # fmt: skip
            answer = await served.post(CHAT, BASE[CHAT] | {"max_tokens": 40, "repetition_detection": detection})
            choice = answer.json()["choices"][0]
            assert answer.json()["usage"]["completion_tokens"] == num_tokens, detection
            assert choice["finish_reason"] == ("repetition" if num_tokens < 40 else "length")
            assert choice["message"]["content"] == ("xyz" * 14)[:num_tokens]
        later = {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "min_tokens": 20, "max_tokens": 40}
        assert (await served.post(CHAT, BASE[CHAT] | later)).json()["usage"]["completion_tokens"] == 20


async def test_a_prompt_is_cut_on_the_side_that_was_named(serve):
    engine = FakeEngine(script)
    async with serve(engine) as served:
        async def kept(**fields):
            answer = await served.post(COMPLETIONS, BASE[COMPLETIONS] | {"prompt": "abcdef"} | fields)
            assert answer.status_code == 200, answer.text
            return bytes(engine.accepted[-1].prompt_token_ids), answer.json()

        assert (await kept(truncate_prompt_tokens=2))[0] == b"ef"
        assert (await kept(truncate_prompt_tokens=2, truncation_side="left"))[0] == b"ef"
        assert (await kept(truncate_prompt_tokens=2, truncation_side="right"))[0] == b"ab"
        assert (await kept(truncate_prompt_tokens=50))[0] == b"abcdef"
        assert (await kept(truncation_side="right"))[0] == b"abcdef"
        ids, answer = await kept(truncate_prompt_tokens=4, echo=True, logprobs=1, max_tokens=1)
        assert (ids, the_text(answer)) == (b"cdef", "cdefa")
        assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert answer["usage"]["prompt_tokens"] == 4
        await kept(prompt=["abcdef", "xy"], truncate_prompt_tokens=3)
        assert [bytes(request.prompt_token_ids) for request in engine.accepted[-2:]] == [b"def", b"xy"]
        # -1: what the context (300 tokens here) holds beside the answer that is asked for
        for num_tokens in (1, 5, 298):
            ids, _ = await kept(prompt="x" * 500 + "y", truncate_prompt_tokens=-1, max_tokens=num_tokens)
            assert (len(ids), ids[-1:]) == (300 - num_tokens, b"y")
            assert engine.accepted[-1].params.max_tokens == num_tokens
        ids, _ = await kept(prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=None)
        assert len(ids) == 300 - 16
        too_much = {"prompt": "x" * 500, "truncate_prompt_tokens": -1, "max_tokens": 300}
        refused = await served.post(COMPLETIONS, BASE[COMPLETIONS] | too_much)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        cut = {"prompt": "x" * 500, "truncate_prompt_tokens": 299}
        refused = await served.post(COMPLETIONS, BASE[COMPLETIONS] | cut)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        chat = BASE[CHAT] | {"messages": [{"role": "user", "content": "x" * 500}], "truncate_prompt_tokens": -1}
        for length in ({}, {"max_tokens": None}, {"max_tokens": None, "min_tokens": 7}):
            assert (await served.post(CHAT, chat | length)).json()["usage"]["total_tokens"] == 300


async def test_prompt_logprobs_are_shaped_as_vllms(serve):
    async with serve(FakeEngine(script)) as served:
        fields = {"prompt": [104, 105, 33], "prompt_logprobs": 1}
        (choice,) = (await served.post(COMPLETIONS, BASE[COMPLETIONS] | fields)).json()["choices"]
        assert choice["prompt_logprobs"] == [
            None,
            {"105": {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
             "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"}},
            {"33": {"logprob": -1.5, "rank": 2, "decoded_token": "!"},
             "32": {"logprob": -0.5, "rank": 1, "decoded_token": " "}},
        ]  # fmt: skip
        assert choice["logprobs"] is None
        own = (await served.post(COMPLETIONS, BASE[COMPLETIONS] | fields | {"prompt_logprobs": 0})).json()
        assert [len(entry) for entry in own["choices"][0]["prompt_logprobs"][1:]] == [1, 1]
        both = fields | {"echo": True, "logprobs": 2, "prompt_logprobs": 1}
        (choice,) = (await served.post(COMPLETIONS, BASE[COMPLETIONS] | both)).json()["choices"]
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [2, 2]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [2, 2]
        chat = (await served.post(CHAT, BASE[CHAT] | {"prompt_logprobs": 3, "n": 2})).json()
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        streamed = await served.post(CHAT, BASE[CHAT] | {"prompt_logprobs": 0, "stream": True})
        assert streamed.status_code == 200 and "prompt_logprobs" not in streamed.text


async def test_logprobs_of_named_tokens_and_their_names(serve):
    """The fake engine's sampler does not know which were named; shapes are what is tested here."""
    async with serve(FakeEngine(script), max_logprobs=None) as served:
        named = {"logprobs": 1, "logprob_token_ids": [5, 6], "max_tokens": 1}
        (choice,) = (await served.post(CHAT, BASE[CHAT] | named)).json()["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
        as_ids = {"logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 2}
        (choice,) = (await served.post(COMPLETIONS, BASE[COMPLETIONS] | as_ids)).json()["choices"]
        assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
        assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:96", "token_id:97"}
        chat = BASE[CHAT] | as_ids | {"logprobs": True, "top_logprobs": 1}
        (choice,) = (await served.post(CHAT, chat)).json()["choices"]
        first = choice["logprobs"]["content"][0]
        assert (first["token"], first["bytes"]) == ("token_id:97", [97])
        assert (await served.post(COMPLETIONS, BASE[COMPLETIONS] | {"logprobs": -1})).status_code == 200
        assert served.state.engine.accepted[-1].params.logprobs == 300


async def test_a_token_is_biased_once_however_it_is_written(serve):
    async with serve(FakeEngine(script)) as served:
        bias = {"logit_bias": {"5": 1, "7": 3, "05": 2}}
        assert (await served.post(COMPLETIONS, BASE[COMPLETIONS] | bias)).status_code == 200
        assert served.state.engine.accepted[-1].params.logit_bias == ((5, 2.0), (7, 3.0))


async def test_as_many_stops_as_editors_and_harnesses_send(serve):
    """Continue sends twelve to Qwen's coders, lm-eval's HumanEval six."""
    async with serve(FakeEngine(script)) as served:
        many = {"stop": [*map(str, range(11)), "d"]}
        assert the_text((await served.post(COMPLETIONS, BASE[COMPLETIONS] | many)).json()) == "abc"


async def test_more_stops_and_logprobs_where_the_server_allows_them(serve):
    async with serve(FakeEngine(script), max_stops=6, max_logprobs=30) as served:
        many = {"stop": ["1", "2", "3", "4", "5", "d"]}
        assert the_text((await served.post(COMPLETIONS, BASE[COMPLETIONS] | many)).json()) == "abc"
        for fields, param in (({"stop": list("1234567")}, "stop"), ({"logprobs": 31}, "logprobs")):
            answer = await served.post(COMPLETIONS, BASE[COMPLETIONS] | fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await served.post(COMPLETIONS, BASE[COMPLETIONS] | {"logprobs": 30})).status_code == 200


async def test_an_echo_in_a_chat_is_the_answers_beginning(serve):
    async with serve(FakeEngine(script)) as served:
        parts = [{"type": "text", "text": "Su"}, {"type": "text", "text": "re"}]
        for messages, text in (
            (MESSAGES, "Sureabcdefgh"), (MESSAGES[:1], "abcdefgh"),
            ([*MESSAGES[:1], {"role": "assistant", "content": parts}], "Su\nreabcdefgh"),
            ([*MESSAGES[:1], {"role": "assistant", "content": None}], "abcdefgh"),
        ):  # fmt: skip
            fields = BASE[CHAT] | {"messages": messages, "echo": True, "n": 2}
            answer = (await served.post(CHAT, fields)).json()
            assert [choice["message"]["content"] for choice in answer["choices"]] == [text] * 2
            events = (await served.post(CHAT, fields | {"stream": True})).text.split("\n\n")
            choices = [json.loads(event[6:])["choices"][0] for event in events if event.startswith("data: {")]
            for index in (0, 1):
                pieces = [choice["delta"]["content"] for choice in choices if choice["index"] == index]
                assert "".join(pieces) == text


async def test_the_prompts_text_is_in_a_streams_first_chunk(serve):
    async with serve(FakeEngine(script)) as served:
        answer = await served.post(CHAT, BASE[CHAT] | {"return_prompt_text": True, "stream": True, "n": 2})
        events = [json.loads(event[6:]) for event in answer.text.split("\n\n") if event.startswith("data: {")]
        told = [event["prompt_text"] for event in events if "prompt_text" in event]
        assert told == ["<s>user: hi there\nassistant: Sure\nassistant: "]
