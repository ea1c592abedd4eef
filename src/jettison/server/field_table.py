"""Every request field of vLLM's and OpenAI's request models, with its treatment here and the reason.

``Done``: it has its effect. ``Refused``: ignoring it would change the answer, so any value but a neutral one is 400
with the field's name. ``Ignored``: the answer is the same without it; one line is logged. Unknown fields are ignored
with a line, too. Both projects' lists are in ``tests/server/peer_fields.json``; a test walks them. Requests, and the
effects of fields, are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jettison.server.coercion import as_kind


@dataclass(frozen=True, slots=True)
class Done:
    """The field has its effect."""

    what: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The field is not supported, and the answer without it would not be the requested one."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Values without effect (null never has one)."""
    same_as: str | None = None
    """Another field; a value equal to that field's has no effect."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The answer is the same without the field."""

    reason: str
    neutral: tuple[Any, ...] = ()
    """Values that are not logged."""


Table = Mapping[str, Done | Refused | Ignored]

_CHAT_ONLY = "it belongs to /v1/chat/completions"
_NO_BEAM = "there is no beam search"
_NO_SAMPLER = "there is no such sampler here"
_NO_MEDIA = "there are no images, sound or video"
_NO_STORE = "answers are not kept"
_NO_TRANSFER = "KV moves between instances of one server only"
_RENDER_ONLY = "it belongs to endpoints that render without generating"
_LABEL = "a label for the provider's own books"
_PLACEMENT = "requests are placed by load, and prefixes found by their content"
_TEMPLATE_KWARGS = "say it in chat_template_kwargs, as the model's template calls it"

_SAMPLING: Table = {
    "model": Done("checked against the served names"),
    "max_tokens": Done("most tokens of the answer"),
    "max_completion_tokens": Done("the same; in a chat it beats max_tokens"),
    "max_new_tokens": Done("the same, by the name of Hugging Face and TGI"),
    "n_predict": Done("the same, by llama.cpp's name; -1 says nothing"),
    "temperature": Done("of the draw; 0 is greedy"),
    "do_sample": Done("false is greedy, as in Hugging Face's generate"),
    "top_p": Done("of the draw"),
    "top_k": Done("of the draw; 0 and -1 are all tokens"),
    "min_p": Done("of the draw"),
    "n": Done("choices of each prompt"),
    "stop": Done("strings that end the answer; as many as --max-stop-strings"),
    "stop_token_ids": Done("tokens that end the answer"),
    "include_stop_str_in_output": Done("what stopped the answer stays in its text"),
    "seed": Done("of the draws; -1 is none"),
    "stream": Done("server-sent events"),
    "stream_options": Done("include_usage and continuous_usage_stats"),
    "logit_bias": Done("added to logits"),
    "allowed_token_ids": Done("no other token is drawn"),
    "bad_words": Done("their tokens are not drawn behind one another, with and without a space before"),
    "presence_penalty": Done("of the draw"),
    "frequency_penalty": Done("of the draw"),
    "repetition_penalty": Done("of the draw"),
    "min_tokens": Done("no stop before so many"),
    "ignore_eos": Done("the model's end tokens do not stop"),
    "skip_special_tokens": Done("special tokens are no text"),
    "spaces_between_special_tokens": Done("false: special tokens that follow one another are joined"),
    "logprobs": Done("of the answer's tokens"),
    "logprob_token_ids": Done("of these tokens instead of the likeliest"),
    "prompt_logprobs": Done("of the prompt's tokens; not in a stream"),
    "echo": Done("what the answer continues comes before it"),
    "truncate_prompt_tokens": Done("tokens that are kept of the prompt; -1: what the context holds beside the answer"),
    "truncation_side": Done("which end is cut; left, unless asked otherwise"),
    "add_special_tokens": Done("whether the tokenizer adds its own"),
    "return_token_ids": Done("ids beside the text"),
    "return_tokens_as_token_ids": Done("token_id:N in place of a token's text in logprobs"),
    "repetition_detection": Done("an answer that repeats itself ends"),
    "service_tier": Done("flex is offline; every other is the default"),
    "priority": Done("lower is sooner"),
    "request_id": Done("part of the answer's id"),
    "cache_salt": Done("only requests of one salt share a prefix"),
    "response_format": Done("text, any JSON object, a JSON schema, or structural tags"),
    "structured_outputs": Done("a JSON schema, regular expression, choice, grammar, or structural tags"),
}

_NOT_SUPPORTED: Table = {
    "thinking_token_budget": Refused("thoughts end where the model ends them", (-1,)),
    "best_of": Refused("every choice that is computed is returned: use n", (1,), same_as="n"),
    "use_beam_search": Refused(_NO_BEAM, (False,)),
    "length_penalty": Refused(_NO_BEAM, (1.0,)),
    "early_stopping": Refused(_NO_BEAM, (False,)),
    "suffix": Refused("nothing is filled in before a suffix", ("",)),
    "prompt_embeds": Refused("a prompt is text or token ids", ([],)),
    "watermarking": Refused("no watermark is put into answers", (False,)),
    "audio": Refused(_NO_MEDIA, ({},)),
    "modalities": Refused(_NO_MEDIA, (["text"], [])),
    "media_io_kwargs": Refused(_NO_MEDIA, ({},)),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
    "web_search_options": Refused("nothing is looked up"),
    "moderation": Refused("nothing is moderated"),
    "verbosity": Refused("say it in the prompt", ("medium",)),
    "kv_transfer_params": Refused(_NO_TRANSFER, ({},)),
    "ec_transfer_params": Refused(_NO_TRANSFER, ({},)),
    "vllm_xargs": Refused("there are no extensions of vLLM's", ({},)),
}

_WITHOUT_EFFECT: Table = {
    "user": Ignored(_LABEL),
    "metadata": Ignored(_NO_STORE, ({},)),
    "store": Ignored(_NO_STORE, (False,)),
    "safety_identifier": Ignored(_LABEL),
    "session_id": Ignored(_PLACEMENT),
    "prompt_cache_key": Ignored(_PLACEMENT),
    "prompt_cache_options": Ignored(_PLACEMENT, ({},)),
    "prompt_cache_retention": Ignored(_PLACEMENT),
    "prediction": Ignored("a guess at the answer makes it no other"),
    "stream_interval": Ignored("a chunk has the tokens that are there; the text is the same", (1,)),
    "routed_experts_prompt_start": Ignored("what experts were asked is not reported", (0,)),
    "return_token_offsets": Ignored(_RENDER_ONLY, (False,)),
    "mm_payload": Ignored(_RENDER_ONLY, ("tensors", "none")),
    "return_mm_kwargs": Ignored(_RENDER_ONLY, (True, False)),
}

_OTHER_PROJECTS: Table = {
    **dict.fromkeys(
        ("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar",
         "guided_whitespace_pattern"),
        Done("as in structured_outputs")),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "structural_tag"), Done("as in structured_outputs")),
    "format": Done("'json' or a JSON schema"),
    **dict.fromkeys(
        ("guided_decoding_backend", "grammar_lazy", "grammar_triggers"),
        Ignored("it says only how a schema is followed")),
    **dict.fromkeys(("max_length", "max_output_tokens"), Refused("use max_tokens")),
    **dict.fromkeys(("min_new_tokens", "min_length"), Refused("use min_tokens", (0,))),
    "repeat_penalty": Refused("use repetition_penalty", (1.0,)),
    "no_stop_trim": Refused("use include_stop_str_in_output", (False,)),
    "stop_regex": Refused("use stop", ([], "")),
    "num_beams": Refused(_NO_BEAM, (1,)),
    "num_return_sequences": Refused("use n", (1,), same_as="n"),
    "no_repeat_ngram_size": Refused(_NO_SAMPLER, (0,)),
    **dict.fromkeys(
        ("mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range", "top_a", "smoothing_factor",
         "epsilon_cutoff", "eta_cutoff"), Refused(_NO_SAMPLER, (0,))),
    **dict.fromkeys(("typical_p", "tfs_z", "tfs"), Refused(_NO_SAMPLER, (1.0,))),
    "top_n_sigma": Refused(_NO_SAMPLER, (-1, 0)),
    **dict.fromkeys(("samplers", "logits_processors"), Refused(_NO_SAMPLER, ([],))),
    **dict.fromkeys(("custom_logit_processor", "custom_params"), Refused(_NO_SAMPLER, ({}, ""))),
    **dict.fromkeys(("lora", "lora_path", "lora_request", "adapter_id"), Refused("no adapters are served", ([], ""))),
    "watermark": Refused("no watermark is put into answers", (False,)),
    "return_hidden_states": Refused("hidden states are not returned", (False,)),
    "n_probs": Refused("use logprobs", (0,)),
    "separate_reasoning": Refused("say it to the server, with --reasoning-parser", (True,)),
    "reasoning_format": Refused("say it to the server, with --reasoning-parser", ("auto", "deepseek")),
    **dict.fromkeys(
        ("enable_thinking", "think", "thinking", "thinking_budget", "reasoning"), Refused(_TEMPLATE_KWARGS)),
    "extra_body": Refused("its fields belong into the body itself", ({},)),
    **dict.fromkeys(("options", "parameters"), Refused("its fields belong into the body itself", ({},))),
}
"""Names from older versions of vLLM, and from SGLang, llama.cpp, TGI, Hugging Face's generate, Ollama and OpenRouter:
their clients send them to any server."""

_BOTH: Table = {**_SAMPLING, **_NOT_SUPPORTED, **_WITHOUT_EFFECT, **_OTHER_PROJECTS}

_TEMPLATE: Table = {
    "messages": Done("through the model's chat template"),
    "add_generation_prompt": Done("whether the template opens an answer"),
    "continue_final_message": Done("the last message is gone on with"),
    "chat_template": Done("in place of the model's, where --trust-request-chat-template allows it"),
    "chat_template_kwargs": Done("given to the template"),
}

_CALLING: Table = {
    "tools": Done("functions that the model may call"),
    "tool_choice": Done("whether it may, has to, or has to call one by name"),
    "parallel_tool_calls": Done("false: an answer has one call at most"),
    "functions": Done("tools, as OpenAI's older API says it"),
    "function_call": Done("tool_choice, likewise"),
    "include_reasoning": Done("false: thoughts are left out of the answer"),
    "reasoning": Done("OpenRouter's reasoning_effort and include_reasoning"),
}

_PROMPT_ONLY = "a prompt goes through no template"

CHAT: Table = {
    **_BOTH,
    **_TEMPLATE,
    **_CALLING,
    "documents": Done("given to the template"),
    "reasoning_effort": Done("given to the template"),
    "prompt": Refused("it belongs to /v1/completions; here the field is messages"),
    "top_logprobs": Done("alternatives to each token"),
    "return_prompt_text": Done("the prompt as the template wrote it"),
}

COMPLETION: Table = {
    **_BOTH,
    "prompt": Done("text or token ids, one or several"),
    "messages": Refused("they belong to /v1/chat/completions; here the field is prompt"),
    "top_logprobs": Refused("here logprobs says how many", (0,)),
    **dict.fromkeys(
        (*(name for name in _TEMPLATE if name != "messages"), "documents", "reasoning_effort"), Ignored(_PROMPT_ONLY)),
    "return_prompt_text": Refused("use echo", (False,)),
    **dict.fromkeys(("tools", "functions"), Refused(_CHAT_ONLY, ([],))),
    **dict.fromkeys(("tool_choice", "function_call"), Refused(_CHAT_ONLY, ("none", "auto"))),
    **dict.fromkeys(("parallel_tool_calls", "include_reasoning"), Ignored(_CHAT_ONLY, (True, False))),
}

TOKENIZE: Table = {
    **_TEMPLATE,
    "documents": CHAT["documents"],
    "reasoning_effort": CHAT["reasoning_effort"],
    "model": _SAMPLING["model"],
    "prompt": Done("one text"),
    "add_special_tokens": _SAMPLING["add_special_tokens"],
    "return_token_strs": Done("tokens as the vocabulary spells them"),
    "tools": Done("what the template writes of them"),
    "media_io_kwargs": _NOT_SUPPORTED["media_io_kwargs"],
    "mm_processor_kwargs": _NOT_SUPPORTED["mm_processor_kwargs"],
}

DETOKENIZE: Table = {
    "model": _SAMPLING["model"],
    "tokens": Done("token ids"),
}

STREAM_OPTIONS: Table = {
    "include_usage": Done("a last chunk with the counts"),
    "continuous_usage_stats": Done("the counts in every chunk"),
    "include_obfuscation": Ignored("chunks are padded with nothing", (True, False)),
}

STRUCTURED_OUTPUTS: Table = {
    "json": Done("a JSON schema, as an object or as text"),
    "regex": Done("of the whole answer"),
    "choice": Done("the answer is one of these"),
    "grammar": Done("Lark or GBNF"),
    "json_object": Done("any JSON object"),
    "structural_tag": Done("tags whose contents follow schemas"),
    "disable_any_whitespace": Done("JSON without white space"),
    "disable_additional_properties": Done("objects have the named properties only"),
    "whitespace_pattern": Done("white space between tokens of JSON"),
    "disable_fallback": Ignored("there is one way to follow a grammar", (True, False)),
}

BATCH: Table = {
    "input_file_id": Done("the lines"),
    "endpoint": Done("where the lines go"),
    "completion_window": Done("how long it may take"),
    "metadata": Done("kept with the batch"),
    "output_expires_after": Refused("files stay until they are deleted"),
}

FILE: Table = {
    "file": Done("the lines"),
    "purpose": Done("only batch"),
    "expires_after": Refused("files stay until they are deleted"),
}


def asks_for_nothing(rule: Refused | Ignored, value: Any, document: Mapping[str, Any]) -> bool:
    """Whether a field's value is neutral, given the other fields of its body."""
    value = _without_nulls(value)
    if value is None or any(as_kind(value, type(neutral)) == neutral for neutral in rule.neutral):
        return True
    if isinstance(rule, Ignored):
        return False
    return rule.same_as is not None and value == document.get(rule.same_as)


def _without_nulls(value: Any) -> Any:
    """The value without members that are null, which count as not sent."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value
