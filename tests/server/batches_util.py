"""What tests of files and batches share."""

from __future__ import annotations

import json


def line(custom_id, prompt="hi", url="/v1/completions", **body):
    """A line of an input file."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*documents) -> bytes:
    """Objects and raw lines, as a file has them."""
    texts = [d if isinstance(d, bytes) else json.dumps(d).encode() for d in documents]
    return b"".join(text + b"\n" for text in texts)


def documents(content: bytes) -> list[dict]:
    return [json.loads(text) for text in content.splitlines()]
