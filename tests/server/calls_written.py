"""How models write calls: each form from a list of (name, arguments), as its chat templates and model cards show it."""

from __future__ import annotations

import json


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def hermes(calls):
    return "\n".join(
        f'<tool_call>\n{{"name": {as_json(name)}, "arguments": {as_json(told)}}}\n</tool_call>' for name, told in calls)


def hermes_ascii(calls):
    return "".join(
        f'<tool_call>{json.dumps({"arguments": told, "name": name}, indent=1)}</tool_call>' for name, told in calls)


def granite(calls):
    return "<|tool_call|>" + as_json([{"name": name, "arguments": told} for name, told in calls])


def phi(calls):
    return granite(calls) + "<|/tool_call|>"


def granite_of_old(calls):
    return "\n".join(
        f'<function_call> {{"name": {as_json(name)}, "arguments": {as_json(told)}}}' for name, told in calls)


def functools(calls):
    return "functools" + as_json([{"name": name, "arguments": told} for name, told in calls])


def llama(calls):
    return "; ".join(f'{{"name": {as_json(name)}, "parameters": {as_json(told)}}}' for name, told in calls)


def llama_tagged(calls):
    return "<|python_tag|>" + llama(calls)


def plain(calls):
    return as_json([{"name": name, "arguments": told} for name, told in calls])


def mistral_list(calls):
    return "[TOOL_CALLS] " + as_json([{"name": name, "arguments": told, "id": "abcdefghi"} for name, told in calls])


def mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{as_json(told)}" for name, told in calls)


def mistral_bare(calls):
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1[ARGS]{as_json(told)}" for name, told in calls[:1]) + "".join(
        f"[TOOL_CALLS]{name}{as_json(told)}" for name, told in calls[1:])


def deepseek_v3(calls):
    return "<｜tool▁calls▁begin｜>" + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(told)}\n```<｜tool▁call▁end｜>"
        for name, told in calls) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    return "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(told)}<｜tool▁call▁end｜>"
        for name, told in calls) + "<｜tool▁calls▁end｜>"


def _text(value):
    return value if isinstance(value, str) else as_json(value)


def glm(calls):
    return "\n".join(
        f"<tool_call>{name}\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in told.items())
        + "</tool_call>" for name, told in calls)


def qwen_coder(calls):
    return "\n".join(
        f"<tool_call>\n<function={name}>\n" + "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in told.items())
        + "</function>\n</tool_call>" for name, told in calls)


def seed(calls):
    return "\n".join(
        f"<seed:tool_call>\n{qwen_coder_bare([one])}\n</seed:tool_call>" for one in calls)


def qwen_coder_bare(calls):
    return "".join(
        f"<function={name}>" + "".join(f"<parameter={key}>{_text(value)}</parameter>" for key, value in told.items())
        + "</function>" for name, told in calls)


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(told)}<|call|>"
        for name, told in calls)


def harmony_in_role(calls):
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{as_json(told)}<|call|>" for name, told in calls)


FORMS = {
    "hermes": (hermes, hermes_ascii), "granite": (granite, phi, granite_of_old),
    "phi4_mini_json": (functools, phi), "llama3_json": (llama, llama_tagged),
    "json": (plain,), "mistral": (mistral_list, mistral_named, mistral_bare),
    "deepseek_v3": (deepseek_v3, deepseek_v31), "glm45": (glm,), "qwen3_coder": (qwen_coder, qwen_coder_bare, seed),
    "gpt_oss": (harmony, harmony_in_role),
}  # fmt: skip
"""Parser -> the forms that it reads."""

ENDS_OF_VALUES = {"glm45": "</arg_value>", "qwen3_coder": "</parameter>"}
"""What a text between marks cannot hold: the form has no escape for it."""
