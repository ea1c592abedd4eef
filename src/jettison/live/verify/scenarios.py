"""The memory events that ``jettison verify`` puts requests through, each on a real cluster of one or two instances.

A scenario returns what the requests produced and whether the event really happened: a table of zero
mismatches proves nothing about an exchange that did not take place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jettison.config import EngineConfig
from jettison.config.devices import CARD_PAGE_BYTES
from jettison.core.moving.merging import MergePhase
from jettison.core.moving.restoring import RestorePhase
from jettison.core.requests import RequestState
from jettison.core.totals import counters
from jettison.cost.hardware import HardwareProfile
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import Completion, LocalCluster, Pace, Until
from jettison.live.verify.applicable import Needs
from jettison.memory.kvtransfers import ExchangeMode
from jettison.types import FinishReason, Grammar, SamplingParams, ServiceClass, TokenLogprobs

BLOCK_SIZE = 4
PAGE_BYTES = 4096
NUM_REQUESTS = 8
MAX_NUM_SEQS = 32
MAX_NUM_TOKENS = 256
CHUNK = 13
LONG_CONTEXT = 4096
NUM_LONG = 5
"""Requests with a long context: one instance holds them all."""
NEVER_MS = 3_600_000
"""A queue waits for so long before the engine drops or turns a restore round of its own accord."""
MAX_UNITS = 100_000
"""Of work that anything in an event may take: they come to about 1,300 in all."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One request: what it asked and what came out."""

    prompt: list[int]
    output: list[int]
    problem: str = ""
    """Why it counts as cut off: it ended early though no client cancelled it."""
    was_live: bool = False
    """It attended to KV at its old home for a while: its attention was computed in parts."""
    logprobs: Sequence[TokenLogprobs | None] = ()
    """Of each token of the output, where ``Setting.num_logprobs`` asks for them."""
    grammar: Grammar | None = None
    """What the output had to follow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of a scenario, and why it counts (or an explanation why it does not)."""

    requests: list[Observed]
    happened: bool
    evidence: str


@dataclass(frozen=True, slots=True)
class Setting:
    """What all scenarios share."""

    model_dir: Path
    dtype: str
    num_output_tokens: int
    seed: int
    max_model_len: int | None = None
    """Context that is served; None: the model's."""
    kernels: str = "auto"
    step_ahead: str = "auto"
    device: str = "cpu"
    """As ``--device``."""
    num_logprobs: int | None = None
    """Likeliest tokens that are told beside each token of every request."""

    @property
    def page_bytes(self) -> int:
        """Small pages, so that little memory is divided into many."""
        return CARD_PAGE_BYTES if self.device == "cuda" else PAGE_BYTES

    def rng(self) -> random.Random:
        """Prompts depend on the seed only."""
        return random.Random(self.seed)


Scenario = Callable[[Setting], Outcome]

ALONE = Needs()
TWO = Needs(num_instances=2)
MERGED = Needs(num_stages=2, num_instances=2)
"""What most events ask of a model."""


@dataclass(frozen=True, slots=True)
class Event:
    """A scenario, and what a model must have for it."""

    scenario: Scenario
    needs: Needs = ALONE

    def __call__(self, setting: Setting) -> Outcome:
        return self.scenario(setting)


@contextmanager
def make_cluster(
    setting: Setting, *, num_blocks: int, instances: int = 2, profile: HardwareProfile | None = None, **flags: object
) -> Iterator[LocalCluster]:
    """A cluster whose instances hold about ``num_blocks`` blocks each beside parameters and workspace."""
    config = make_config(setting, num_blocks, instances, **flags)
    with LocalCluster(
        config, seed=setting.seed, max_units=MAX_UNITS, profile=profile, num_logprobs=setting.num_logprobs
    ) as cluster:
        yield cluster


def make_config(setting: Setting, num_blocks: int, instances: int, **flags: object) -> EngineConfig:
    """Of ``make_cluster``'s. Raises ModelError, ConfigError."""
    base: dict[str, object] = {
        "model": str(setting.model_dir),
        "dtype": setting.dtype,
        "instances": instances,
        "memory": "1GiB",
        "page_size": setting.page_bytes,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_TOKENS,
        "exchange_piece_bytes": 1 << 14,
        "num_threads": 1,
        "max_model_len": setting.max_model_len,
        "kernels": setting.kernels,
        "step_ahead": setting.step_ahead,
        "device": setting.device,
    } | flags
    sized = assemble(EngineConfig.resolve(**base))  # type: ignore[arg-type]
    base["memory"] = sized.memory_for_blocks(num_blocks)
    # Small pieces, so that much happens while they travel; but not so many that requests end before the last.
    arena_bytes = num_blocks * sized.shape.num_layers * sized.shape.block_bytes_per_layer(BLOCK_SIZE)
    base["exchange_piece_bytes"] = max(1 << 14, sized.shape.parameter_bytes // 256, arena_bytes // 1024)
    return EngineConfig.resolve(**base)  # type: ignore[arg-type]


def make_prompts(
    setting: Setting, cluster: LocalCluster, low: int, high: int, num: int = NUM_REQUESTS
) -> list[list[int]]:
    """Random prompts of ``low`` to ``high`` tokens, of the whole vocabulary, from the setting's seed."""
    rng = setting.rng()
    vocab = cluster.assembly.shape.vocab_size
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(num)]


def submit(
    cluster: LocalCluster, prompts: list[list[int]], num_tokens: int, first: int = 0,
    service_class: ServiceClass = ServiceClass.ONLINE, grammars: Sequence[Grammar | None] = (),
) -> None:
    """Greedy requests ``request-<first>`` and on, of exactly ``num_tokens`` tokens each. ``grammars``: what each of
    them follows; none where it is empty."""
    for i, prompt in enumerate(prompts, start=first):
        grammar = grammars[i - first] if grammars else None
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
        cluster.submit(f"request-{i}", prompt, params, service_class=service_class)


def observed(cluster: LocalCluster, prompts: list[list[int]]) -> list[Observed]:
    """What ``request-0`` and on have produced."""
    found = [(prompt, cluster.completions[f"request-{i}"]) for i, prompt in enumerate(prompts)]
    context = cluster.assembly.limits.max_model_len
    return [
        Observed(
            prompt, done.token_ids, _problem(len(prompt), done, context), done.num_live_rows > 0,
            [token.logprobs for token in done.tokens], done.params.grammar,
        )
        for prompt, done in found
    ]


def _problem(num_prompt: int, done: Completion, context: int) -> str:
    """Why a request is not whole. Whole: ended by length, with all the tokens it asked for or that the context has."""
    wanted = min(done.params.max_tokens, context - num_prompt)
    if done.was_cancelled or (done.finish_reason is FinishReason.LENGTH and len(done.tokens) == wanted):
        return ""
    return f"ended with {done.finish_reason} after {len(done.tokens)} of {wanted} tokens ({done.error or 'no error'})"


def overwrite_tail(cluster: LocalCluster) -> None:
    """Requests that fill what a drop has freed, and end: a restore now has to pull, mapping alone is not enough.

    A drop of a large model frees room for many; where prompts go first (``step_priority``) others stand still for them.
    """
    names: list[str] = []
    rng = random.Random(7)
    free = min(ledger.num_free for group in cluster.core.groups.values() for ledger in group.blocks.ledgers)
    vocab = cluster.assembly.shape.vocab_size
    length = min(120, cluster.assembly.limits.max_model_len - 1)
    for i in range(max(1, (free - 8) * BLOCK_SIZE // (length + BLOCK_SIZE))):
        prompt = [rng.randrange(vocab) for _ in range(length)]
        names.append(f"filler-{i}-{len(cluster.completions)}")
        cluster.submit(names[-1], prompt, SamplingParams(max_tokens=1, temperature=0.0))
    cluster.run(Until(
        "requests that fill the dropped layers' pages", lambda: all(cluster.completions[n].finish_reason for n in names)
    ))  # fmt: skip


def produced(cluster: LocalCluster, num_tokens: int) -> Until:
    """Until the requests have produced this many tokens together."""
    goal = sum(len(c.tokens) for c in cluster.completions.values()) + num_tokens
    return Until(
        f"{num_tokens} more tokens", lambda: sum(len(c.tokens) for c in cluster.completions.values()) >= goal
    )


def moves_over(cluster: LocalCluster, move: str) -> Until:
    """Until nothing is on the move; ``move``: what was begun."""
    return Until(f"the end of {move}", lambda: not cluster.core.in_transition)


def finish(cluster: LocalCluster, move: str) -> None:
    """Run until nothing is on the move, requests as little as that allows: they are there when it is over."""
    cluster.run(moves_over(cluster, move), Pace.STEPS_LAST)


def drop(cluster: LocalCluster, mode: ExchangeMode = ExchangeMode.AUTO) -> None:
    """Merge under running requests, to the end. With KV that is attended to elsewhere (``LIVE``) links wait for a step
    that does so."""
    cluster.request_drop()
    if mode is ExchangeMode.LIVE:
        core, before = cluster.core, counters(cluster.core)["live_rows"]
        cluster.run(
            Until("KV on a link", lambda: _is_exchanging(cluster, mode) or not core.in_transition), Pace.STEPS_LAST
        )
        is_attended = Until(
            "attention to KV elsewhere", lambda: counters(core)["live_rows"] > before or not core.in_transition
        )
        cluster.run(is_attended, Pace.STEPS_FIRST)
    finish(cluster, "the drop")


def restore(cluster: LocalCluster) -> None:
    """Split under running requests, to the end."""
    cluster.request_restore()
    finish(cluster, "the restore")


def blocks_for_all(setting: Setting, prompt: int) -> int:
    """Blocks that hold all requests at their full length, with some room, on one instance."""
    return -(-NUM_REQUESTS * (prompt + setting.num_output_tokens) // BLOCK_SIZE) + 16


def chunked_prefill(priority: str) -> Scenario:
    """Prompts longer than the token budget; decodes beside them, or what prompts leave to decodes."""

    def scenario(setting: Setting) -> Outcome:
        with make_cluster(
            setting, num_blocks=blocks_for_all(setting, 60), step_priority=priority, max_num_batched_tokens=CHUNK,
            max_num_seqs=CHUNK,
        ) as cluster:
            prompts = make_prompts(setting, cluster, 30, 60)
            submit(cluster, prompts, setting.num_output_tokens)
            parts: set[int] = set()

            def look() -> bool:
                flights = (f for group in cluster.core.groups.values() for f in group.in_flight.values())
                parts.update(row.num_tokens for flight in flights for row in flight.step.rows)
                return cluster.num_open == 0

            cluster.run(Until("the end of all requests", look))
            cluster.run()
            happened = 1 < max(parts) <= CHUNK
            evidence = f"prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, " \
                       f"parts of at most {max(parts)}"
            return Outcome(observed(cluster, prompts), happened, evidence)

    return scenario


def prefix_hit(setting: Setting) -> Outcome:
    """Prompts that share their first tokens, one after the other."""
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 60), instances=1) as cluster:
        prefix = make_prompts(setting, cluster, 41, 41, 1)[0]
        prompts = [prefix + tail for tail in make_prompts(setting, cluster, 1, 12)]
        for i, prompt in enumerate(prompts):
            submit(cluster, [prompt], setting.num_output_tokens, i)
            cluster.run(produced(cluster, 3))
        cluster.run()
        hits = counters(cluster.core)["prefix_cache_hits"]
        return Outcome(observed(cluster, prompts), hits > 0, f"{hits:.0f} prompt tokens from the cache")


def preempt_and_recompute(setting: Setting) -> Outcome:
    """Too little memory for all: the youngest are preempted and start again."""
    need = -(-(40 + setting.num_output_tokens) // BLOCK_SIZE)
    with make_cluster(setting, num_blocks=2 * need, overload="recompute") as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        count = counters(cluster.core)["num_preemptions"]
        return Outcome(observed(cluster, prompts), count > 0, f"{count:.0f} preemptions")


def swap_out_and_in(setting: Setting) -> Outcome:
    """The same shortage with the swap baseline: KV goes to the host in small pieces and comes back."""
    need = -(-(40 + setting.num_output_tokens) // BLOCK_SIZE)
    with make_cluster(setting, num_blocks=2 * need, overload="swap", swap_budget_blocks=3) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        totals = counters(cluster.core)
        out, back = totals["swapped_out_blocks"], totals["swapped_in_blocks"]
        return Outcome(observed(cluster, prompts), out == back > 0, f"{out:.0f} blocks to the host, {back:.0f} back")


def static_pipeline(setting: Setting) -> Outcome:
    """Two instances that each load half of the layers (the pipeline baseline), with too little memory for all."""
    need = -(-(40 + setting.num_output_tokens) // BLOCK_SIZE)
    with make_cluster(setting, num_blocks=need, overload="pipeline") as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        (group,) = cluster.core.groups.values()
        happened = len(group.stages) == 2 and group.blocks.capacity > 2 * need
        return Outcome(observed(cluster, prompts), happened, f"{group.blocks.capacity} blocks where {need} each were")


def drop_and_exchange(mode: ExchangeMode) -> Scenario:
    """Layers are dropped under running requests; their KV changes hands, is computed again, or is attended to."""

    def scenario(setting: Setting) -> Outcome:
        with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), exchange=str(mode)) as cluster:
            prompts = make_prompts(setting, cluster, 10, 40)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(produced(cluster, 60))
            drop(cluster, mode)
            cluster.run()
            happened, evidence = exchange_evidence(cluster, mode)
            return Outcome(observed(cluster, prompts), happened, evidence)

    return scenario


def long_contexts(setting: Setting) -> Outcome:
    """A drop and a restore under requests as long as the model's context (or ``LONG_CONTEXT`` tokens)."""
    longest = min(make_config(setting, BLOCK_SIZE, 1).model.max_model_len or LONG_CONTEXT, LONG_CONTEXT)
    with make_cluster(setting, num_blocks=NUM_LONG * longest // BLOCK_SIZE + 16) as cluster:
        length = min(longest, cluster.assembly.limits.max_model_len) - setting.num_output_tokens
        prompts = make_prompts(setting, cluster, length * 3 // 4, length, NUM_LONG)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, NUM_LONG * 4))
        drop(cluster)
        cluster.run(produced(cluster, NUM_LONG * 4))
        restore(cluster)
        cluster.run()
        totals = counters(cluster.core)
        happened = totals["exchanged_bytes"] > 0 and totals["restores"] == 1
        longest_prompt = max(map(len, prompts))
        evidence = f"prompts of up to {longest_prompt} tokens, {totals['exchanged_bytes']:.0f} bytes of KV exchanged"
        return Outcome(observed(cluster, prompts), happened, evidence)


def exchange_evidence(cluster: LocalCluster, mode: ExchangeMode) -> tuple[bool, str]:
    """Whether the exchanges of a cluster did what their mode says, and by what one can tell."""
    chosen: Counter[str] = Counter()
    for record in cluster.records:
        if record.kind == "exchange_done":
            requests = record.fields["requests"]
            assert isinstance(requests, dict)
            chosen.update(requests)
    totals = counters(cluster.core)
    moved, rows = totals["exchanged_bytes"], totals["live_rows"]
    happened = chosen.total() > 0 if mode is ExchangeMode.AUTO else chosen[str(mode)] > 0
    if mode is ExchangeMode.RECOMPUTE:
        happened &= moved == 0
    elif mode is not ExchangeMode.AUTO:
        happened &= moved > 0 and (rows > 0) == (mode is ExchangeMode.LIVE)
    what = ", ".join(f"{num} {choice}" for choice, num in sorted(chosen.items()))
    return happened, f"{what}; {moved:.0f} bytes exchanged, {rows:.0f} rows attended to KV elsewhere"


def restore_and_split(setting: Setting) -> Outcome:
    """A pipeline becomes two instances again under running requests."""
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), step_priority="prefill") as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, 60))
        drop(cluster)
        overwrite_tail(cluster)
        cluster.run(produced(cluster, 20))
        restore(cluster)
        cluster.run()
        totals = counters(cluster.core)
        pulled, returned = totals["pulled_bytes"], totals["returned_bytes"]
        happened = totals["restores"] == 1 and pulled > 0 and returned > 0
        evidence = f"{pulled:.0f} bytes of parameters pulled, {returned:.0f} of KV returned"
        return Outcome(observed(cluster, prompts), happened, evidence)


def drop_again_during_restore(setting: Setting) -> Outcome:
    """A second burst turns a restore round: once while shards are pulled, once while requests go home."""
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), step_priority="prefill") as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run(produced(cluster, 30))
        cluster.request_drop()
        phases = []
        for phase in (RestorePhase.PULL, RestorePhase.RETURN):
            finish(cluster, "the drop")
            overwrite_tail(cluster)
            cluster.run(produced(cluster, 20))
            cluster.request_restore()
            cluster.run(_reaches(cluster, phase), Pace.STEPS_LAST)
            phases.append(_restore_phase(cluster))
            cluster.request_drop()
        cluster.run()
        turned = counters(cluster.core)["restores_turned"]
        happened = turned == 2 and phases == [RestorePhase.PULL, RestorePhase.RETURN]
        return Outcome(observed(cluster, prompts), happened, f"{turned:.0f} restores turned round")


def cancel_in_mid_exchange(mode: ExchangeMode) -> Scenario:
    """Two clients leave while their KV is on a link; the others must not notice."""

    def scenario(setting: Setting) -> Outcome:
        with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), exchange=str(mode)) as cluster:
            prompts = make_prompts(setting, cluster, 10, 40, NUM_REQUESTS + 2)
            submit(cluster, prompts, setting.num_output_tokens)
            cluster.run(produced(cluster, 60))
            cluster.request_drop()
            cluster.run(Until("KV on a link", lambda: _is_exchanging(cluster, mode)), Pace.STEPS_LAST)
            moving = _on_a_link(cluster, mode)[:2]
            for state in moving:
                cluster.cancel(state.request_id)
            cluster.run()
            cluster.core.check()
            evidence = f"{len(moving)} requests cancelled with their KV on a link"
            return Outcome(observed(cluster, prompts), len(moving) > 0, evidence)

    return scenario


def _reaches(cluster: LocalCluster, phase: RestorePhase) -> Until:
    """Until the restore is in this phase, or over."""
    return Until(f"phase {phase} of the restore", lambda: _restore_phase(cluster) in (phase, None))


def _restore_phase(cluster: LocalCluster) -> RestorePhase | None:
    return cluster.core.restores[0].phase if cluster.core.restores else None


def _is_exchanging(cluster: LocalCluster, mode: ExchangeMode) -> bool:
    exchanging = any(m.phase is MergePhase.EXCHANGE for m in cluster.core.merges)
    return exchanging and bool(_on_a_link(cluster, mode))


def _on_a_link(cluster: LocalCluster, mode: ExchangeMode) -> list[RequestState]:
    """Requests that stand still for their KV, or run meanwhile, by the mode."""
    groups = cluster.core.groups.values()
    states = [s for g in groups for s in (g.queues.running if mode is ExchangeMode.LIVE else g.queues.moving).values()]
    return [s for s in states if s.transfers]


SENDING_MODES = (ExchangeMode.TRANSFER, ExchangeMode.LIVE)
"""Modes in which KV is on its way."""

SCENARIOS: dict[str, Event] = {
    "chunked prefill": Event(chunked_prefill("decode"), TWO),
    "chunked prefill, prompts first": Event(chunked_prefill("prefill"), TWO),
    "prefix hit": Event(prefix_hit),
    "preempt and recompute": Event(preempt_and_recompute, TWO),
    "swap out + in": Event(swap_out_and_in, TWO),
    "static pipeline": Event(static_pipeline, Needs(num_stages=2)),
    **{f"drop + exchange ({mode})": Event(drop_and_exchange(mode), MERGED) for mode in ExchangeMode},
    "restore + split": Event(restore_and_split, MERGED),
    "drop + restore, long contexts": Event(long_contexts, MERGED._replace(num_tokens=NUM_LONG * LONG_CONTEXT)),
    "drop again during restore": Event(drop_again_during_restore, MERGED),
    **{f"cancel in mid-exchange ({mode})": Event(cancel_in_mid_exchange(mode), MERGED) for mode in SENDING_MODES},
}
"""By name, in the order of the table."""
