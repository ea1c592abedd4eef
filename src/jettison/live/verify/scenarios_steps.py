"""Scenarios of ``jettison verify`` about what a step computes: how many requests it has, and where a prompt is cut.

Memory stays as it is here. As in ``live.verify.scenarios``, each says whether what it is about really happened.
"""

from __future__ import annotations

from jettison.live.engine.local_cluster import Until
from jettison.live.verify.scenarios import (
    BLOCK_SIZE,
    NUM_REQUESTS,
    Event,
    Observed,
    Outcome,
    Setting,
    make_cluster,
    make_prompts,
    observed,
    submit,
)

MAX_BATCH = 64
LONGEST = 40
"""Tokens of a prompt in the batches."""
SHORTEST_ANSWER = 24
"""Tokens, by when all prompts of the batches have been computed."""
CUT_PROMPT = 72
"""Tokens of a prompt that is cut: more than a tile of keys in the kernels (64)."""
CUT_OUTPUT = 16


def batches_of_all_sizes(setting: Setting) -> Outcome:
    """Requests that come together and leave one by one: each decodes beside 63 others at first, the last alone."""
    blocks = MAX_BATCH * -(-(LONGEST + SHORTEST_ANSWER + MAX_BATCH) // BLOCK_SIZE) + 16
    with make_cluster(setting, num_blocks=blocks, instances=1, max_num_seqs=MAX_BATCH) as cluster:
        prompts = make_prompts(setting, cluster, 10, LONGEST, MAX_BATCH)
        for index, prompt in enumerate(prompts):
            submit(cluster, [prompt], SHORTEST_ANSWER + index, index)
        (group,) = cluster.core.groups.values()
        sizes: set[int] = set()

        def look() -> bool:
            sizes.update(len(flight.step.rows) for flight in group.in_flight.values())
            return cluster.num_open == 0

        cluster.run(Until("the end of all requests", look))
        cluster.run()
        evidence = f"steps of {min(sizes)} to {max(sizes)} requests, {len(sizes)} sizes"
        return Outcome(observed(cluster, prompts), sizes >= set(range(1, MAX_BATCH + 1)), evidence)


def cut_at_every_position(setting: Setting) -> Outcome:
    """Prompts in chunks of 1, of 2, and so on to the whole: each position is once the first that the next step has."""
    requests: list[Observed] = []
    firsts: set[int] = set()
    blocks = -(-(CUT_PROMPT + CUT_OUTPUT) // BLOCK_SIZE) + 4
    for chunk in range(1, CUT_PROMPT + 1):
        with make_cluster(
            setting, num_blocks=blocks, instances=1, max_num_batched_tokens=chunk, max_num_seqs=1,
            enable_prefix_caching=False,
        ) as cluster:
            prompts = make_prompts(setting, cluster, CUT_PROMPT, CUT_PROMPT)[chunk % NUM_REQUESTS :][:1]
            submit(cluster, prompts, CUT_OUTPUT)
            (group,) = cluster.core.groups.values()
            cluster.run(Until("the first chunk", lambda group=group: bool(group.in_flight)))  # type: ignore[misc]
            firsts.update(flight.step.rows[0].num_tokens for flight in group.in_flight.values())
            cluster.run()
            requests += observed(cluster, prompts)
    evidence = f"prompts of {CUT_PROMPT} tokens, the first chunk of {min(firsts)} to {max(firsts)}, {len(firsts)} sizes"
    return Outcome(requests, firsts == set(range(1, CUT_PROMPT + 1)), evidence)


STEPS: dict[str, Event] = {
    "batches of 1 to 64": Event(batches_of_all_sizes),
    "prompts cut at every position": Event(cut_at_every_position),
}
"""By name."""
