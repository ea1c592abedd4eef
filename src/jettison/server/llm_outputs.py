"""From the events of one prompt's choices to its ``RequestOutput``."""

from __future__ import annotations

from jettison.live.engine.api import TokenEvent
from jettison.server.choice import Delta
from jettison.server.generation import Generation, Job
from jettison.server.llm_types import CompletionOutput, Logprob, RequestOutput
from jettison.server.logprobs import finite
from jettison.server.sampling import GenerationPlan
from jettison.server.tokenizer import Tokenizer
from jettison.types import TokenLogprobs


class Collector:
    """Collects one prompt's answers."""

    def __init__(self, tokenizer: Tokenizer, plan: GenerationPlan) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._choices: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}
        self._prompt_entries: list[TokenLogprobs | None] | None = None

    def keep(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """Add what one event brings."""
        if event.prompt_logprobs is not None:
            self._prompt_entries = event.prompt_logprobs
        choice = self._choices.setdefault(job.index, CompletionOutput(job.index))
        self._texts.setdefault(job.index, []).append(delta.text)
        choice.token_ids += delta.token_ids
        if self._plan.params.logprobs is not None:
            self._add_logprobs(choice, delta)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = job.text.stop_reason

    def output(self, generation: Generation) -> RequestOutput:
        """All of it, at the end."""
        first = generation.jobs[0]
        for index, choice in self._choices.items():
            choice.text = "".join(self._texts[index])
        wanted, entries = self._plan.prompt_logprobs, self._prompt_entries
        return RequestOutput(
            request_id=first.request.request_id.rpartition("-")[0],
            prompt=first.prompt.text,
            prompt_token_ids=list(first.prompt.token_ids),
            prompt_logprobs=None if wanted is None or entries is None else [
                None if entry is None else self._named(entry, wanted) for entry in entries
            ],
            outputs=[self._choices[job.index] for job in generation.jobs],
            num_cached_tokens=generation.num_cached_tokens,
        )

    def _add_logprobs(self, choice: CompletionOutput, delta: Delta) -> None:
        entries = [entry for entry in delta.logprobs if entry is not None]
        named = [self._named(entry, len(entry.top)) for entry in entries]
        choice.logprobs = [*(choice.logprobs or []), *named]
        choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(finite(e.logprob) for e in entries)

    def _named(self, entry: TokenLogprobs, num_top: int) -> dict[int, Logprob]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, 1 + at) for at, (token_id, logprob) in enumerate(entry.top[:num_top])]
        named: dict[int, Logprob] = {}
        for token_id, logprob, rank in ranked:
            named.setdefault(token_id, Logprob(finite(logprob), rank, self._tokenizer.token_text(token_id)))
        return named
