"""From logits to tokens on a card: the draws of ``device.sampler``, for all rows at once and without a wait.

``plan`` lists on the host what a step's rows ask for, as arrays that travel with the step; ``launch`` only launches;
``finish`` makes records of what came back. Which rows the host's sampler draws instead, ``plan`` knows: those with
ids that do not fit. All other tokens are on the device when a step ends.

Not here: whether logits are finite (``Kernels.argmax``), and where arrays lie (``staging``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.draws import describe, draw, rows_at_once
from jettison.device.sampler import GREEDY_BELOW, Sampler, uniform_draws
from jettison.device.step import RowMasks, SamplingRow, is_set_inside, token_words, unpack_ints
from jettison.types import FAILED_TOKEN_ID, SampledToken, TokenLogprobs

logger = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]


class Part(NamedTuple):
    """Rows that are drawn together."""

    prefix: str
    """Of the names of their arrays."""
    is_adjusted: bool
    """Whether logits are changed first, which takes a copy of them."""


@dataclass(slots=True)
class Plan:
    """What the rows of one step ask for."""

    rows: list[int]
    arrays: Arrays = field(default_factory=dict)
    """By name: what ``launch`` reads on the device."""
    parts: list[Part] = field(default_factory=list)
    described: list[tuple[int, SamplingRow]] = field(default_factory=list)
    """Slots with log-probabilities, as ``arrays["described"]`` has them."""
    on_host: dict[int, SamplingRow] = field(default_factory=dict)
    """Slots for the host's sampler."""
    instead: dict[int, int] = field(default_factory=dict)
    """Rows whose grammars leave them without a token, and what stands in its place."""


class CudaSampler:
    """Sampler for one vocabulary; it keeps nothing."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._host = Sampler(vocab_size)

    # ------------------------------------------------------------------------------------------------- before a step

    def plan(
        self, rows: Sequence[int], sampling: Sequence[SamplingRow], masks: RowMasks | None = None
    ) -> Plan:
        """``rows``: the step's ``sample_rows``; ``sampling``: entries for some of them; ``masks``: of those with
        grammars, which are waited for. Raises ValueError where an entry's row is not sampled, and GrammarLostError."""
        plan = Plan(list(rows))
        if masks is not None:
            sampling, plan.instead = masks.applied(sampling, self.vocab_size)
        slot_of = {row: slot for slot, row in enumerate(plan.rows)}
        drawn: dict[bool, list[tuple[int, SamplingRow]]] = {False: [], True: []}
        for spec in sampling:
            slot = slot_of.get(spec.row)
            if slot is None:
                raise ValueError(f"row {spec.row} is not among the sampled rows")
            if not self._is_done_here(spec):
                plan.on_host[slot] = spec
                continue
            is_adjusted = _is_adjusted(spec)
            if spec.temperature >= GREEDY_BELOW or is_adjusted:
                drawn[is_adjusted].append((slot, spec))
            if spec.logprobs >= 0:
                plan.described.append((slot, spec))
        for is_adjusted, asked in drawn.items():
            num_parts = -(-len(asked) // rows_at_once(self.vocab_size, is_adjusted=is_adjusted))
            for i in range(num_parts):  # of equal sizes, as a part takes as long as its slowest row
                part = Part(f"part{len(plan.parts)}.", is_adjusted)
                self._plan_part(plan, part, asked[i::num_parts])
        if plan.described:
            plan.arrays["described"] = np.array([slot for slot, _ in plan.described], dtype=np.int64)
            if any(spec.logprob_token_ids for _, spec in plan.described):
                plan.arrays["reported"] = self._reported(plan.described)
        return plan

    def _is_done_here(self, spec: SamplingRow) -> bool:
        ids = [*spec.banned_token_ids, *spec.logprob_token_ids, *(token for token, _ in spec.logit_bias)]
        return (
            is_set_inside(spec.allowed_token_ids, self.vocab_size)
            and len(dict(spec.logit_bias)) == len(spec.logit_bias)
            and all(0 <= token < self.vocab_size for token in ids)
            and all(_are_inside(data, self.vocab_size) for data in (spec.prompt_ids, spec.output_ids))
            and len(spec.output_ids) == len(spec.output_counts)
        )

    def _plan_part(self, plan: Plan, part: Part, drawn: list[tuple[int, SamplingRow]]) -> None:
        specs, slots = [spec for _, spec in drawn], [slot for slot, _ in drawn]
        is_hot = [spec.temperature >= GREEDY_BELOW for spec in specs]
        limits = [s.top_k if 0 < s.top_k < self.vocab_size else 0 for s in specs]
        columns: Arrays = {
            "slots": np.array(slots, dtype=np.int64),
            "lines": np.array(range(len(slots)) if part.is_adjusted else slots, dtype=np.int64),
            "temperature": np.where(is_hot, [s.temperature for s in specs], -1.0),
            "uniform": uniform_draws([s.seed for s in specs], [s.position for s in specs]),
            "min_p": np.array([min(s.min_p, 1.0) for s in specs]),
            "top_k": np.where(is_hot, limits, 0),
            "top_p": np.where(is_hot, [s.top_p if s.top_p < 1.0 else 2.0 for s in specs], 2.0),
        }
        columns["uniform"][np.logical_not(is_hot)] = 0.0  # the first of the largest logits
        plan.parts.append(part)
        columns |= self._allowed(specs) | self._adjustments(specs)
        plan.arrays |= {part.prefix + key: column for key, column in columns.items()}

    def _allowed(self, specs: list[SamplingRow]) -> Arrays:
        lines = [line for line, spec in enumerate(specs) if spec.allowed_token_ids]
        if not lines:
            return {}
        words = np.stack([token_words(specs[line].allowed_token_ids, self.vocab_size) for line in lines])
        return {"allowed.at": np.array(lines, dtype=np.int64), "allowed.bits": words}

    def _adjustments(self, specs: list[SamplingRow]) -> Arrays:
        """Places in the part's logits and what is done there; a key is absent where no row asks for it."""
        bias, bans, penalties, counts = _Places(), _Places(), _Places(), _Places()
        for index, spec in enumerate(specs):
            first = index * self.vocab_size
            if spec.logit_bias:
                bias.add(first, [t for t, _ in spec.logit_bias], [b for _, b in spec.logit_bias])
            if spec.banned_token_ids:
                bans.add(first, list(spec.banned_token_ids), 0.0)
            if spec.repetition_penalty != 1.0:
                seen = np.concatenate((unpack_ints(spec.prompt_ids), unpack_ints(spec.output_ids)))
                penalties.add(first, np.unique(seen), spec.repetition_penalty)
            if (spec.frequency_penalty or spec.presence_penalty) and spec.output_ids:
                taken = spec.frequency_penalty * unpack_ints(spec.output_counts) + spec.presence_penalty
                counts.add(first, unpack_ints(spec.output_ids), taken)
        named = (("bias", bias), ("ban", bans), ("repetition", penalties), ("count", counts))
        return {key: column for name, places in named for key, column in places.columns(name).items()}

    def _reported(self, described: list[tuple[int, SamplingRow]]) -> npt.NDArray[np.int64]:
        """[described, most]: tokens whose log-probabilities are asked for by name; padded with 0."""
        most = max(len(spec.logprob_token_ids) for _, spec in described)
        ids = np.zeros((len(described), most), dtype=np.int64)
        for line, (_, spec) in zip(ids, described, strict=True):
            line[: len(spec.logprob_token_ids)] = spec.logprob_token_ids
        return ids

    # ------------------------------------------------------------------------------------------------- on the device

    def launch(
        self, logits: Tensor, tokens: Tensor, plan: Plan, arrays: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Draw the tokens of a step. ``logits``: [n, >= vocab_size]; ``tokens``: int64 [n], the likeliest of each row
        or -1 where its logits are not finite, overwritten with what is drawn; ``arrays``: ``plan.arrays`` on the
        device. Returns what ``finish`` needs, on the device."""
        logits = logits[:, : self.vocab_size]
        for prefix, is_adjusted in plan.parts:
            mine = {key.removeprefix(prefix): arrays[key] for key in plan.arrays if key.startswith(prefix)}
            draw(logits, tokens, mine, is_adjusted=is_adjusted)
        # What the host draws from comes back with the step: the next one may be under way then, over the same bytes.
        results = {"tokens": tokens} | {f"logits{slot}": logits[slot : slot + 1] for slot in plan.on_host}
        if plan.described:
            lines, reported = arrays["described"], arrays.get("reported")
            num_tops = [0 if spec.logprob_token_ids else spec.logprobs for _, spec in plan.described]
            results |= describe(logits, tokens[lines], max(num_tops), reported, lines)
        return results

    # -------------------------------------------------------------------------------------------------- after a step

    def finish(self, plan: Plan, results: Mapping[str, npt.NDArray[Any]]) -> list[SampledToken]:
        """The tokens, in the order of the plan's rows. ``results``: of ``launch``, on the host. A row that cannot be
        sampled fails alone."""
        tokens: list[int] = results["tokens"].tolist()
        sampled = [SampledToken(token) for token in tokens]
        places = {slot: (at, spec) for at, (slot, spec) in enumerate(plan.described)}
        for slot, token in enumerate(tokens):
            row = plan.rows[slot]
            if token == -1:
                logger.error("row %d of %d cannot be sampled: its logits are not finite", row, len(tokens))
                sampled[slot] = SampledToken(FAILED_TOKEN_ID)
            elif row in plan.instead:
                sampled[slot] = SampledToken(plan.instead[row])
            elif slot in plan.on_host:
                sampled[slot] = self._sampled_on_host(plan.on_host[slot], row, results[f"logits{slot}"])
            elif slot in places:
                sampled[slot] = SampledToken(token, _described(token, results, *places[slot]))
        return sampled

    def _sampled_on_host(self, spec: SamplingRow, row: int, logits: npt.NDArray[Any]) -> SampledToken:
        try:
            return self._host.sample(torch.from_numpy(logits), [row], [spec])[0]
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this row only
            logger.error("row %d cannot be sampled: %s", row, error)
            return SampledToken(FAILED_TOKEN_ID)


def prompt_logprobs(
    targets: Sequence[int], num_top: int, results: Mapping[str, npt.NDArray[Any]]
) -> list[TokenLogprobs]:
    """Records of ``describe`` for the tokens of a prompt; ``results`` on the host."""
    return [_entry(int(token), at, results, num_top) for at, token in enumerate(targets)]


class _Places:
    """Places in flat logits, and a value for each."""

    def __init__(self) -> None:
        self._at: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float64]] = []

    def add(self, first: int, ids: Any, values: Any) -> None:
        at = np.asarray(ids, dtype=np.int64) + first
        self._at.append(at)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), at.shape))

    def columns(self, name: str) -> Arrays:
        if not self._at:
            return {}
        return {f"{name}.at": np.concatenate(self._at), f"{name}.by": np.concatenate(self._values)}


def _is_adjusted(spec: SamplingRow) -> bool:
    return bool(
        spec.logit_bias or spec.allowed_token_ids or spec.banned_token_ids or spec.repetition_penalty != 1.0
        or ((spec.frequency_penalty or spec.presence_penalty) and spec.output_ids)
    )


def _are_inside(packed: bytes, vocab_size: int) -> bool:
    if len(packed) % 4:
        return False
    ids = unpack_ints(packed)
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < vocab_size)


def _described(
    token: int, results: Mapping[str, npt.NDArray[Any]], at: int, spec: SamplingRow
) -> TokenLogprobs:
    """The record of one row: with the tokens that it asks for, or with the likeliest ones."""
    if not spec.logprob_token_ids:
        return _entry(token, at, results, spec.logprobs)
    values = results["reported"][at].tolist()
    return _entry(token, at, results, 0)._replace(top=tuple(zip(spec.logprob_token_ids, values)))


def _entry(token: int, at: int, results: Mapping[str, npt.NDArray[Any]], num_top: int) -> TokenLogprobs:
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        ids, values = results["top_ids"][at, :num_top].tolist(), results["top"][at, :num_top].tolist()
        top = tuple(zip(ids, values, strict=True))
    return TokenLogprobs(token, float(results["own"][at]), int(results["rank"][at]), top)
