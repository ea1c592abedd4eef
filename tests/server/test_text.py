"""Detokenizing, stop strings and the tokenizer folder, without HTTP."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import (
    BOS,
    EOS,
    LLAMA_2,
    SENTENCEPIECE_SPECIAL,
    USER,
    metaspace_tokenizer,
    sentencepiece_tokenizer,
    write_tokenizer,
)
from tokenizers import decoders

from jettison.errors import ModelError
from jettison.server.chat_renderer import ChatRequest
from jettison.server.detokenizer import WindowDetokenizer
from jettison.server.launch import tell_of_turn_end
from jettison.server.prompts import Prompt, chat_prompt, completion_prompts, with_texts
from jettison.server.stops import StopMatcher
from jettison.server.tokenizer import Tokenizer


def pieces(detokenizer, ids):
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.one_of(st.integers(0, 270), st.sampled_from([0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80])), max_size=40))
def test_byte_pieces_add_up_to_the_whole(tokenizer, ids):
    for skip in (True, False):
        assert "".join(pieces(tokenizer.detokenizer(skip), ids)) == tokenizer.decode(ids, skip)


@given(st.text(max_size=30))
def test_no_piece_is_ever_half_a_character(tokenizer, text):
    got = pieces(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(got) == text
    assert "�" in text or not any("�" in piece for piece in got)


@given(st.lists(st.sampled_from(["▁the", "▁cat", "s", "▁", "é", ".", "EURO", "SMILE"]), max_size=30))
def test_window_pieces_add_up_to_the_whole(words):
    backend, vocabulary = metaspace_tokenizer()
    spelled = {"EURO": "€".encode(), "SMILE": "😀".encode()}
    ids = []
    for word in words:
        ids += [vocabulary[f"<0x{byte:02X}>"] for byte in spelled[word]] if word in spelled else [vocabulary[word]]
    got = pieces(WindowDetokenizer(lambda window: backend.decode(window), frozenset()), ids)
    assert "".join(got) == backend.decode(ids)
    assert not any("�" in piece for piece in got)


METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")])
WORDS = st.lists(
    st.sampled_from(["▁the", "▁cat", "s", "▁", "é", ".", "EURO", "SMILE", *SENTENCEPIECE_SPECIAL]), max_size=20)


def spelled(vocabulary, words):
    bytes_of = {"EURO": "€".encode(), "SMILE": "😀".encode()}
    return [
        token_id for word in words for token_id in
        ([vocabulary[f"<0x{byte:02X}>"] for byte in bytes_of[word]] if word in bytes_of else [vocabulary[word]])
    ]  # fmt: skip


@pytest.mark.parametrize("decoder", [LLAMA_2, METASPACE], ids=["llama_2", "metaspace"])
@given(WORDS, WORDS, st.booleans())
def test_output_behind_a_prompt_is_what_it_adds_to_the_whole_text(decoder, prompt, output, skip):
    tokenizer, vocabulary = sentencepiece_tokenizer(decoder)
    prompt_ids, output_ids = spelled(vocabulary, prompt), spelled(vocabulary, output)
    got = pieces(tokenizer.detokenizer(skip, prompt_ids), output_ids)
    assert tokenizer.decode(prompt_ids, skip) + "".join(got) == tokenizer.decode(prompt_ids + output_ids, skip)
    assert not any("�" in piece for piece in got)


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_behind_a_chat_prompt_stays(skip):
    tokenizer, vocabulary = sentencepiece_tokenizer(LLAMA_2)
    prompt = spelled(vocabulary, ["<s>", "▁the", "<|assistant|>"])
    assert pieces(tokenizer.detokenizer(skip, prompt), spelled(vocabulary, ["▁cat", "s", "</s>"]))[:2] == [" cat", "s"]


def test_a_character_that_the_prompt_breaks_off_spoils_nothing_behind_it():
    tokenizer, vocabulary = sentencepiece_tokenizer(LLAMA_2)
    prompt = spelled(vocabulary, ["▁the", "▁cat", "SMILE"])
    output = spelled(vocabulary, ["▁the", "▁cat"])
    for num_left in (3, 2, 1):
        broken = prompt[: len(prompt) - num_left]
        assert "".join(pieces(tokenizer.detokenizer(True, broken), output)) == " the cat"
    completed = pieces(tokenizer.detokenizer(True, prompt[:-1]), [prompt[-1], *output])
    assert "".join(completed) == "� the cat"


def test_window_never_holds_more_than_a_little():
    backend, vocabulary = metaspace_tokenizer()
    detokenizer = WindowDetokenizer(lambda window: backend.decode(window), frozenset())
    got = [detokenizer.push(vocabulary["<0x80>"]) for _ in range(40)]
    assert any(got)
    assert len(detokenizer._window) <= 16


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
       st.lists(st.integers(1, 5), max_size=40))  # fmt: skip
@settings(max_examples=300)
def test_stop_matcher_does_not_depend_on_the_cuts(text, stops, cuts):
    matcher = StopMatcher(stops)
    longest = max(map(len, stops))
    out, at = "", 0
    for width in [*cuts, len(text)]:
        out += matcher.push(text[at : at + width])
        at += width
        assert matcher.matched or len(text[:at]) - len(out) < longest  # nothing is held longer than it must be
    matches = [(found + len(stop), found) for stop in stops if (found := text.find(stop)) >= 0]
    if matches:
        assert out == text[: min(matches)[1]]
        assert matcher.push("more") + matcher.flush() == ""
    else:
        assert matcher.matched is None
        assert out + matcher.flush() == text


def test_tokenizer_folder(tokenizer):
    assert tokenizer.encode("a</s>b") == [97, EOS, 98]
    assert tokenizer.decode([BOS, 97, EOS]) == "a"
    assert tokenizer.decode([BOS, 97, EOS], skip_special_tokens=False) == "<s>a</s>"
    assert tokenizer.special_ids == {BOS, EOS, 258, USER}
    assert tokenizer.token_bytes(0x20) == b" "
    assert tokenizer.token_bytes(9999) == b""
    assert tokenizer.token_id("</s>") == EOS
    assert tokenizer.vocab_size == 260
    request = ChatRequest([{"role": "user", "content": "<x>"}])
    assert tokenizer.render_chat(request) == "<s>user: <x>\nassistant: "


@pytest.fixture
def folder(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"not json"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("chat_template.jinja", b"{{ unclosed"),
    ],
)
def test_a_broken_folder_is_named_in_one_line(folder, name, content):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_dir(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "on_loop"),
    [("x" * 40, True), (["x" * 20] * 2, False), (["x"] * 4, False), ("x" * 60, False), ([1] * 300, True)],
)
async def test_what_a_request_tokenizes_counts_as_a_whole(prompt, on_loop, tokenizer, monkeypatch):
    threads = spy_on(monkeypatch, tokenizer, "encode")
    options = {"add_special_tokens": False, "vocab_size": 300, "max_prompts": 8, "thread_chars": 64}
    made = await completion_prompts(prompt, tokenizer, **options)
    texts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(texts[0], str):
        assert [bytes(item.token_ids).decode() for item in made] == texts
        assert {thread is threading.main_thread() for thread in threads} == {on_loop}
    else:
        assert not threads


@pytest.mark.parametrize(
    ("message", "on_loop"),
    [
        ({"content": "x" * 40}, True),
        ({"content": "x" * 20, "name": "y" * 40}, False),
        ({"content": [{"type": "text", "text": "x" * 20}] * 3}, False),
        ({"content": [{"type": "text", "text": "x" * 10}] * 3}, True),
    ],
)
async def test_names_and_every_part_of_a_message_count(message, on_loop, tokenizer, monkeypatch):
    threads = spy_on(monkeypatch, tokenizer, "render_chat")
    messages = [{"role": "user"} | message]
    await chat_prompt(messages, tokenizer, ChatRequest(()), thread_chars=64)
    assert [thread is threading.main_thread() for thread in threads] == [on_loop]


@pytest.mark.parametrize(("num_prompts", "on_loop"), [(2, True), (9, False)])
async def test_an_echo_of_token_ids_is_decoded_once_and_counts_as_a_whole(num_prompts, on_loop, tokenizer, monkeypatch):
    threads = spy_on(monkeypatch, tokenizer, "decode")
    prompts = [Prompt((97, 98, 257, 99, 99, 99, 99, 99), None)] * num_prompts + [Prompt((100,), "as sent")]
    made = await with_texts(prompts, tokenizer, skip_special_tokens=True, thread_chars=64)
    assert [prompt.text for prompt in made] == ["abccccc"] * num_prompts + ["as sent"]
    assert [thread is threading.main_thread() for thread in threads] == [on_loop] * num_prompts


async def test_many_short_messages_are_not_rendered_on_the_loop(tokenizer, monkeypatch):
    threads = spy_on(monkeypatch, tokenizer, "render_chat")
    await chat_prompt([{"role": "user", "content": ""}] * 5, tokenizer, ChatRequest(()), thread_chars=64)
    assert threads != [threading.main_thread()]


def spy_on(monkeypatch, tokenizer, name):
    """Threads in which a method of the tokenizer runs."""
    threads = []
    original = getattr(tokenizer, name)

    def spy(*arguments, **options):
        threads.append(threading.current_thread())
        return original(*arguments, **options)

    monkeypatch.setattr(tokenizer, name, spy)
    return threads


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}", EOS),
        ("{% for m in messages %}<|user|>{{ m.content }} </s>\n{% endfor %}", EOS),
        ("{% for m in messages %}{{ m.content }}<|user|>{% endfor %}", USER),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content if m.role == 'user' else m.role }}</s>{% endfor %}", None),
        ("{{ raise_exception('never') if messages[-1].role == 'assistant' }}{{ messages[0].content }}", None),
        (None, None),
    ],
)  # fmt: skip
def test_what_a_template_writes_behind_an_answer(tmp_path, caplog, template, expected):
    path = write_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.turn_end() == expected
    tell_of_turn_end(tokenizer, {EOS})
    assert ("<|user|> (259) behind an answer" in caplog.text) == (expected == USER)


def test_a_folder_without_a_tokenizer_has_bytes_as_tokens_where_that_is_asked_for(tmp_path):
    tokenizer = Tokenizer.from_dir(tmp_path, byte_tokens=300)
    text = "Grüße 你好\n"
    assert tokenizer.vocab_size == 300 and len(tokenizer.encode(text)) <= len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template is not None
    with pytest.raises(ModelError, match="too few for bytes"):
        Tokenizer.from_dir(tmp_path, byte_tokens=200)


def test_a_folder_s_own_tokenizer_is_used_whatever_is_asked_for(folder):
    assert Tokenizer.from_dir(folder, byte_tokens=10**6).vocab_size == Tokenizer.from_dir(folder).vocab_size
    (folder / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(folder, byte_tokens=300)
