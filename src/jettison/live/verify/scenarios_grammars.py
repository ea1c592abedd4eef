"""A scenario of ``jettison verify`` with grammars: requests that follow one, and others beside them, through moves."""

from __future__ import annotations

import json

from jettison.core.totals import counters
from jettison.live.verify.applicable import Needs
from jettison.live.verify.scenarios import (
    Event,
    Outcome,
    Setting,
    blocks_for_all,
    drop,
    make_cluster,
    make_prompts,
    observed,
    overwrite_tail,
    produced,
    restore,
    submit,
)
from jettison.types import Grammar

_SCHEMA = {
    "type": "array", "minItems": 1000,
    "items": {
        "type": "object", "required": ["name", "size"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    },
}  # fmt: skip
GRAMMAR = Grammar(json.dumps({"grammars": [{"json_schema": _SCHEMA}]}))
"""It does not end before the answers do, and is sometimes wide and sometimes leaves one token."""


def grammars(setting: Setting) -> Outcome:
    """Every second request follows a grammar; preempted, in a drop and in a restore it goes on with it."""
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), step_priority="prefill") as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        bound = [GRAMMAR if i % 2 else None for i in range(len(prompts))]
        submit(cluster, prompts, setting.num_output_tokens, grammars=bound)
        cluster.run(produced(cluster, 60))
        drop(cluster)
        overwrite_tail(cluster)
        cluster.run(produced(cluster, 20))
        restore(cluster)
        cluster.run()
        totals, found = counters(cluster.core), observed(cluster, prompts)
        num_bound = sum(len(request.output) for request in found if request.grammar is not None)
        happened = totals["drops"] == totals["restores"] == 1 and num_bound > 0
        return Outcome(found, happened, f"{num_bound} tokens under grammars, through a drop and a restore")


GRAMMARS: dict[str, Event] = {"grammars: drop, restore": Event(grammars, Needs(2, 2, has_tokenizer=True))}
"""By name."""
