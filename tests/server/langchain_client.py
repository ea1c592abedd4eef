"""LangChain as a program of its own: the server's URL as its argument, what its callers met on standard output.

See test_langchain.py. Of its own because it may live in another environment.
"""

import json
import os
import sys

os.environ |= {"NO_PROXY": "*", "no_proxy": "*", "LANGSMITH_TRACING": "false"}

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

OPTIONS = {"model": "fake", "base_url": sys.argv[1], "api_key": "right", "max_retries": 0, "timeout": 60}


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(description="Where")
    is_sunny: bool


@tool
def get_weather(city: str) -> str:
    """Says the weather of a city."""
    return f"rain in {city}"


@tool
def now() -> str:
    """Says the time."""
    return "noon"


TOOLS = {one.name: one for one in (get_weather, now)}


def loop(chat, stream):
    """An agent's loop: calls until there are none; what was called, and the last text."""
    messages, called = [HumanMessage("Weather in Oslo?")], []
    for _ in range(6):
        if stream:
            answer = None
            for chunk in chat.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = chat.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return {"called": called, "text": answer.text, "invalid": len(answer.invalid_tool_calls)}
        for call in answer.tool_calls:
            called.append([call["name"], call["args"]])
            messages.append(ToolMessage(TOOLS[call["name"]].invoke(call["args"]), tool_call_id=call["id"]))
    return {"called": called, "text": None}


def plain(chat):
    answer = chat.invoke([SystemMessage("Be kind."), HumanMessage([{"type": "text", "text": "hi"}])], stop=["zzz"])
    return {"text": answer.text, "usage": answer.usage_metadata["output_tokens"],
            "reason": answer.response_metadata.get("finish_reason")}


def streamed(chat):
    pieces = list(chat.stream("hi"))
    used = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    return {"text": "".join(piece.text for piece in pieces), "usage": sum(used), "many": len(pieces) > 2}


def structured(chat, method, **options):
    return chat.with_structured_output(Weather, method=method, **options).invoke("As JSON, please.").model_dump()


def failed(call):
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what kind it is is what is asked
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "told": str(error)[:300]}
    return None


def main():
    chat = ChatOpenAI(**OPTIONS, temperature=0, stream_usage=True)
    items = ChatOpenAI(**OPTIONS, temperature=0, use_responses_api=True)
    met = {
        "chat": plain(chat), "stream": streamed(chat),
        "loop": loop(chat.bind_tools(TOOLS.values()), stream=False),
        "loop, streamed": loop(chat.bind_tools(TOOLS.values(), parallel_tool_calls=True), stream=True),
        "loop, items": loop(items.bind_tools(TOOLS.values()), stream=False),
        "loop, items, streamed": loop(items.bind_tools(TOOLS.values(), strict=False), stream=True),
        "any": chat.bind_tools(TOOLS.values(), tool_choice="any").invoke("any, please").tool_calls[0]["name"],
        "json_schema": structured(chat, "json_schema"),
        "json_schema, strict": structured(chat, "json_schema", strict=True),
        "json_schema, items": structured(items, "json_schema"),
        "json_mode": structured(chat, "json_mode"), "function_calling": structured(chat, "function_calling"),
        "batch": [answer.text for answer in chat.batch(["hi", "hi"])],
        "completion": OpenAI(**OPTIONS, max_tokens=8, best_of=1).invoke("hi"),
        "completion, streamed": "".join(OpenAI(**OPTIONS, max_tokens=8).stream("hi")),
        "image": failed(lambda: chat.invoke([HumanMessage([
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])])),
        "key": failed(lambda: ChatOpenAI(**OPTIONS | {"api_key": "wrong"}).invoke("hi")),
    }  # fmt: skip
    json.dump(met, sys.stdout)


if __name__ == "__main__":
    main()
