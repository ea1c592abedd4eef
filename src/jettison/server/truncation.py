"""``truncate_prompt_tokens``: the tokens of a prompt that are kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jettison.server.errors import bad_request
from jettison.server.fields import GenerationFields
from jettison.server.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Truncation:
    """A request's rule for too long prompts."""

    num_tokens: int | None
    """Most tokens that are kept; None: as many as the context holds beside the requested answer."""
    keeps_end: bool = True


def plan_truncation(fields: GenerationFields, max_model_len: int) -> Truncation | None:
    """The rule of a request; None where it has none. Raises ApiError 400."""
    wanted = fields.truncate_prompt_tokens
    if wanted is None:
        return None
    if not -1 <= wanted <= max_model_len or wanted == 0:
        raise bad_request(
            f"truncate_prompt_tokens must be from 1 to {max_model_len}, or -1 for what fits.", "truncate_prompt_tokens")
    return Truncation(None if wanted == -1 else wanted, keeps_end=fields.truncation_side != "right")


def truncated(prompts: Sequence[Prompt], rule: Truncation | None, num_fitting: int) -> list[Prompt]:
    """The prompts, cut by the rule; ``num_fitting``: most tokens of a prompt that leave room for the answer.

    A cut prompt has no text.
    """
    if rule is None:
        return list(prompts)
    limit = num_fitting if rule.num_tokens is None else rule.num_tokens
    return [_cut(prompt, limit, rule.keeps_end) for prompt in prompts]


def _cut(prompt: Prompt, limit: int, keeps_end: bool) -> Prompt:
    ids = prompt.token_ids
    if len(ids) <= limit:
        return prompt
    return replace(prompt, token_ids=ids[-limit:] if keeps_end else ids[:limit], text=None)
