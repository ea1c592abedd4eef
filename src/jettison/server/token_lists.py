"""Fields that name tokens by id: valid ids, most ids, and errors that name the field.

Pure. ``bad_words`` turns words into tokens.
"""

from __future__ import annotations

from jettison.device.step import pack_token_set, unpack_token_set
from jettison.server.errors import bad_request
from jettison.types import SamplingParams

MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024


def stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Raises ApiError 400."""
    return _few_ids("stop_token_ids", ids or [], MAX_STOP_TOKEN_IDS, vocab_size)


def logprob_token_ids(ids: list[int] | None, vocab_size: int, *, has_logprobs: bool) -> tuple[int, ...]:
    """The ids, each once, in their order. Raises ApiError 400, also where no logprobs are requested."""
    if ids and not has_logprobs:
        raise bad_request("logprob_token_ids needs logprobs.", "logprob_token_ids")
    return tuple(dict.fromkeys(_few_ids("logprob_token_ids", ids or [], MAX_LOGPROB_TOKEN_IDS, vocab_size)))


def allowed_token_ids(ids: list[int] | None, vocab_size: int) -> bytes:
    """The allowed ids in the sampler's form, with at most a bit for each id of the vocabulary. Raises ApiError 400."""
    if ids is None:
        return b""
    if not ids:
        raise bad_request("allowed_token_ids must not be empty: some token has to be drawn.", "allowed_token_ids")
    _check_ids("allowed_token_ids", ids, vocab_size)
    return pack_token_set(ids)


def check_some_token_is_left(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
    """Raises ApiError 400 where no allowed token could ever begin the answer."""
    if not params.allowed_token_ids:
        return
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(params.stop_token_ids)
        banned.update(() if params.ignore_eos else eos_token_ids)
    if banned and banned.issuperset(unpack_token_set(params.allowed_token_ids).tolist()):
        why = "bad_words, or stop tokens before min_tokens, forbid every one of them"
        raise bad_request(f"allowed_token_ids leave no token: {why}.", "allowed_token_ids")


def logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Each token once: the last of several spellings counts. Raises ApiError 400."""
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias may have at most {MAX_LOGIT_BIAS} entries.", "logit_bias")
    values = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(f"logit_bias: {key[:40]!r} is no token id below {vocab_size}.", "logit_bias")
        if not -100.0 <= value <= 100.0:
            raise bad_request("logit_bias values must be from -100 to 100.", "logit_bias")
        values[int(key)] = value
    return tuple(values.items())


def _few_ids(name: str, ids: list[int], most: int, vocab_size: int) -> tuple[int, ...]:
    if len(ids) > most:
        raise bad_request(f"{name} may have at most {most} entries.", name)
    _check_ids(name, ids, vocab_size)
    return tuple(ids)


def _check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise bad_request(f"{name} must lie in [0, {vocab_size}).", name)
