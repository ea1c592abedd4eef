"""Conversations as clients send them: what templates of real families meet."""

from __future__ import annotations

import json

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
DOCUMENTS = [{"title": "Möbius", "text": "A strip with <one> side."}, {"doc_id": 7, "title": "Torus", "text": "Ring."}]


def says(role, content, **fields):
    return {"role": role, "content": content, **fields}


def text(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(arguments, call_id="abcdefghi", name="weather"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"city": "Köln", "days": 2}
USER, ANSWER = says("user", "How is the weather?"), says("assistant", "It rains.")
RESULT = says("tool", '{"rain": true}', tool_call_id="abcdefghi", name="weather")
SYSTEM = says("system", "You are terse.")

# Name -> messages, and what the template is told besides.
CONVERSATIONS = {
    "one question": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([USER, ANSWER, says("user", "And tomorrow?")], {}),
    "system and turns": ([SYSTEM, USER, ANSWER, says("user", "And tomorrow?")], {}),
    "many scripts": ([says("user", "你好 שלום é e\u0301 😀\u200d🔥 \u2028 \x85 ﷽ <b>&amp;</b>")], {}),
    "empty": ([says("user", "")], {}),
    "spaces": ([says("system", " \n padded \n "), says("user", "  \t two \n\n lines  ")], {}),
    "looks like a template": ([says("user", "{{ 7 * 7 }} {% raw %} <|im_end|> </s> [INST] <start_of_turn>")], {}),
    "one part": ([says("user", text("Only text."))], {}),
    "parts": ([says("system", text("Be kind.")), says("user", text("First.", "Second."))], {}),
    "parts in the answer": ([USER, says("assistant", text("It ", "rains.")), says("user", "Oh.")], {}),
    "a call": ([USER, says("assistant", "", tool_calls=[call(ASKED)]), RESULT], {}),
    "a call without content": ([USER, {"role": "assistant", "tool_calls": [call(ASKED)]}, RESULT, ANSWER,
                                says("user", "Thanks.")], {}),
    "a call as text": ([SYSTEM, USER, says("assistant", None, tool_calls=[call(json.dumps(ASKED))]), RESULT], {}),
    "two calls": ([USER, says("assistant", "", tool_calls=[call(ASKED), call({"city": "Rom"}, "jklmnopqr")]), RESULT,
                   says("tool", "dry", tool_call_id="jklmnopqr")], {}),
    "ends in a call": ([USER, says("assistant", "", tool_calls=[call({})])], {"add_generation_prompt": False}),
    "no calls": ([USER, says("assistant", "None.", tool_calls=[]), says("user", "Good.")], {}),
    "reasoning": ([USER, says("assistant", "It rains.", reasoning_content="Clouds\nbring rain."), says("user", "Why?")],
                  {}),
    "reasoning of today": ([USER, says("assistant", "Rain.", reasoning="Clouds.")], {"add_generation_prompt": False}),
    "reasoning in the text": ([USER, says("assistant", "<think>\nClouds.\n</think>\n\nRain."), says("user", "Why?")],
                              {}),
    "reasoning and a call": ([USER, says("assistant", "", reasoning_content="Ask.", tool_calls=[call(ASKED)]), RESULT],
                             {}),
    "prefill": ([USER, says("assistant", "It rains in")], {"continue_final_message": True}),
    "prefill with a space": ([SYSTEM, USER, says("assistant", "It rains ")], {"continue_final_message": True}),
    "prefill in parts": ([USER, says("assistant", text("It rains", " in "))], {"continue_final_message": True}),
    "prefill of nothing": ([USER, says("assistant", "")], {"continue_final_message": True}),
    "no prompt": ([SYSTEM, USER, ANSWER], {"add_generation_prompt": False}),
    "names": ([says("user", "I: Ann.", name="ann"), says("assistant", "Hi."), says("user", "I am Bo.", name="bo")], {}),
    "fields of their own": ([says("user", "Hi.", weight=0.5, tags=["a"], extra={"b": [1, None, True]})], {}),
    "long": ([SYSTEM, *[message for at in range(40) for message in (says("user", f"Question {at}?" * 50), ANSWER)],
              says("user", "The last.")], {}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "effort": ([USER], {"reasoning_effort": "high", "thinking": True, "controls": {"length": "short"}}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "tools and a call": ([USER, says("assistant", "", tool_calls=[call(ASKED)]), RESULT], {"tools": [TOOL]}),
    "documents": ([USER], {"documents": DOCUMENTS}),
    "two questions in a row": ([USER, says("user", "Hello?")], {}),
    "developer": ([says("developer", "You are terse."), USER], {}),
    "system and developer": ([SYSTEM, says("developer", "You are kind."), USER], {}),
    "a second system message": ([SYSTEM, USER, ANSWER, says("system", "Now rhyme."), says("user", "Go.")], {}),
    "two system messages": ([SYSTEM, says("system", "Now rhyme."), says("user", "Go.")], {}),
}
