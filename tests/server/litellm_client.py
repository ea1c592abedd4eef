"""LiteLLM as a program of its own: cases come in on standard input, what became of them goes out. See test_litellm.py.

Of its own because its import takes seconds, and changes loggers and event loops of the process that imports it.
"""

import json
import os
import sys

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*", "no_proxy": "*"}

import litellm

litellm.suppress_debug_info = True
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "num_retries": 0, "max_retries": 0}


def outcome(case):
    """What the caller of LiteLLM meets."""
    try:
        if (router := case.get("router")) is not None:
            answer = litellm.Router(num_retries=0, **router).completion(model=case["model"], messages=case["messages"])
            return {"text": answer.choices[0].message.content}
        call = litellm.text_completion if "prompt" in case else litellm.completion
        answer = call(**ASK | case) if "prompt" not in case else call(**{"max_tokens": 3, "max_retries": 0} | case)
        if case.get("stream"):
            return {"text": "".join(chunk.choices[0].delta.content or "" for chunk in answer)}
        return {"text": answer.choices[0].text if "prompt" in case else answer.choices[0].message.content}
    except Exception as error:  # noqa: BLE001  # what kind it is is what is asked
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "status": getattr(error, "status_code", None), "message": str(error)}


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    outcomes = {name: outcome(case) for name, case in cases.items()}
    json.dump(outcomes, sys.stdout)
