"""The end of ``jettison demo``: three chats of a small trained model before, in and after a drop, in the same words.

The demo's own model is random, and its answers are noise. This one is fetched once into the user's cache; where it
cannot be had, the demo says so and is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from jettison.config import EngineConfig
from jettison.errors import JettisonError
from jettison.live.engine.assembly import assemble
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.verify.scenarios import drop, produced, restore
from jettison.modelfiles.fetching import fetch_model
from jettison.report.terminal import phase
from jettison.server.chat_renderer import ChatRequest
from jettison.server.tokenizer import Tokenizer
from jettison.types import SamplingParams

CHATS = (
    "What is the capital of France?", "What is the opposite of cold?", "Describe the sea in one sentence.",
)  # fmt: skip

MOMENTS = ("before", "in a drop", "after it")

_MODEL = "smollm2"
_CONTEXT = 256
_BLOCKS = 64
_MOST_TOKENS = 48
_TOKENS_BEFORE_A_MOVE = 12


@dataclass(frozen=True, slots=True)
class Told:
    """What the model said, and what the drop did meanwhile."""

    answers: dict[str, list[str]]
    """Moment -> an answer for each chat."""
    num_layers: int
    blocks: int
    """KV blocks of all instances, undropped."""
    merged_blocks: int
    """The same while layers are dropped."""

    @property
    def num_other(self) -> int:
        """Answers in other words than those before the drop."""
        first = self.answers[MOMENTS[0]]
        return sum(a != b for answers in self.answers.values() for a, b in zip(first, answers, strict=True))


def show_chats(console: Console) -> None:
    """Fetch the model where it is not there, chat with it, and print what it said."""
    console.print()
    try:
        folder, _ = fetch_model(_MODEL, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
        with phase("three chats with a trained model, before, in and after a drop", console):
            told = chat_through_a_drop(folder)
    except (JettisonError, OSError) as error:
        told_why = f"no chats with a trained model at the end: {escape(str(error))}"
        console.print(told_why, highlight=False, soft_wrap=True)
        return
    for i, question in enumerate(CHATS):
        console.print(f"[bold]{question}[/bold]", highlight=False)
        for moment in MOMENTS:
            console.print(f"  {moment:<10} {escape(told.answers[moment][i])}", highlight=False, soft_wrap=True)
    words = "the same words each time" if not told.num_other else f"{told.num_other} answers in other words"
    console.print(
        f"{words}; in the drop two instances gave up {told.num_layers} of their {2 * told.num_layers} layers, and had"
        f" room for {told.merged_blocks:,} blocks of KV in place of {told.blocks:,}. "
        f"To chat with it: [bold].venv/bin/jettison serve {_MODEL}[/bold]", highlight=False, soft_wrap=True,
    )  # fmt: skip


def chat_through_a_drop(folder: Path) -> Told:
    """Ask the same three times, on two instances in this process: undisturbed; with a drop in the middle of the
    answers; with the restore in the middle of them. Greedy. Raises JettisonError."""
    keys: dict[str, object] = {
        "model": str(folder), "device": "cpu", "instances": 2, "max_model_len": _CONTEXT, "memory": "64GiB",
    }  # fmt: skip
    keys["memory"] = assemble(EngineConfig.resolve(**keys)).memory_for_blocks(_BLOCKS)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_dir(folder)
    prompts = [tokenizer.encode(tokenizer.render_chat(ChatRequest([{"role": "user", "content": q}]))) for q in CHATS]
    with LocalCluster(EngineConfig.resolve(**keys), seed=0) as cluster:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=_MOST_TOKENS, temperature=0.0)

        def ask(moment: str) -> None:
            for i, prompt in enumerate(prompts):
                cluster.submit(f"{moment} {i}", prompt, params)

        def room() -> int:
            return sum(min(each.capacity for each in g.blocks.ledgers) for g in cluster.core.groups.values())

        ask(MOMENTS[0])
        cluster.run()
        blocks = room()
        ask(MOMENTS[1])
        cluster.run(produced(cluster, _TOKENS_BEFORE_A_MOVE))
        drop(cluster)
        merged_blocks = room()
        cluster.run()
        ask(MOMENTS[2])
        cluster.run(produced(cluster, _TOKENS_BEFORE_A_MOVE))
        restore(cluster)
        cluster.run()
        answers = {
            moment: [
                tokenizer.decode(cluster.completions[f"{moment} {i}"].token_ids).strip() for i in range(len(prompts))
            ]
            for moment in MOMENTS
        }
        return Told(answers, cluster.assembly.shape.num_layers, blocks, merged_blocks)
