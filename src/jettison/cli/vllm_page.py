"""The text of docs/from-vllm.md, made of the data: ``python -m jettison.cli.from_vllm page`` writes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from jettison.cli.vllm_lines import LINES, own_options, pasted
from jettison.config.vllm.facts import known_flags, version
from jettison.config.vllm.rules import Rule
from jettison.config.vllm.table import RULES

_HEAD = """# From vLLM

With this page you swap `vllm serve` for `jettison serve` in a line that you have, and see what becomes of each flag.

Paste the line and change the word: `jettison serve MODEL ...`. For Docker's image, or the old module
`vllm.entrypoints.openai.api_server`, what stands behind it goes behind `jettison serve` (`--model X` included). Every
flag of vLLM {version} and of older releases is one of four:

| verdict | what happens |
|---|---|
| done | the same name, the same meaning |
| mapped | said in another way here, or taken for some values |
| without effect | answers, API, capacity and protection are the same without it; one line of the log says so |
| refused | they would not be: one line names *all* flags that do not fit, and the nearest of ours; exit code 2 |

A value that is vLLM's own default (`--tensor-parallel-size 1`, `--kv-cache-dtype auto`) is never refused. Names may
have underscores, values may follow `=`, a unique beginning of a name will do, several values may stand behind one flag
that takes them, behind the model (`--served-model-name a b`: requests may use all names, answers carry the first), and
parts of a JSON value may be flags (`--default-chat-template-kwargs.enable_thinking false`). A `--config` file may mix
keys of both. `jettison config show`, `batch run` and `profile` take the same flags.

What differs without a flag: `--host` is 127.0.0.1 (vLLM: all addresses), a token budget is 512 (`--max-num-seqs` where
that is more), `--shutdown-timeout` 30 s, `--gpu-memory-utilization` 0.9. Schemas stay open
(`--structured-outputs-config.disable_additional_properties true` closes them); 64 stop strings, temperatures to 2,
bodies of 4 MiB.

Of the environment `VLLM_API_KEY` is taken as `JETTISON_API_KEY` is, where that is not set: a server that was closed
stays closed. No other variable of vLLM's is read.

`ORG/NAME` is looked for in the hub's cache: `--download-dir`, `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `HF_HOME`,
then `~/.cache/huggingface`; `--revision` is a branch, a tag or a commit. Nothing is downloaded: where a model is
missing, the one line says `hf download ORG/NAME`.

## In Python

```python
from jettison import LLM, SamplingParams

with LLM("Qwen/Qwen3-0.6B", dtype="half", instances=2, memory="4GiB") as llm:  # flags of both, as keywords
    for output in llm.generate(["Hello", "Once"], SamplingParams(max_tokens=32, temperature=0.7)):
        print(output.prompt, output.outputs[0].text, output.outputs[0].finish_reason)
    print(llm.chat([{{"role": "user", "content": "Hi!"}}])[0].outputs[0].text)
```

Prompts are texts, token ids, or mappings with `prompt` or `prompt_token_ids`; answers come in their order, with
`text`, `token_ids`, `finish_reason`, `stop_reason`, `logprobs`. Without parameters the maker's sampling holds, and 16
tokens. The engine is that of the server, on a thread of its own: a script needs no guard, and a notebook's loop is not
in the way. Mistakes are one line (`jettison.errors.UserError`). `get_tokenizer()` gives a small object of our own, with
`encode`, `decode`, `apply_chat_template` and the special tokens. `structured_outputs={{"choice": [...]}}` binds.
Texts are what the model writes; with `reasoning_parser=NAME` a grammar binds what stands behind the thoughts.

"""

_FOOT = """## The data

Facts are in `src/jettison/config/vllm/facts.json`, verdicts beside it. This page is made of both:

```console
$ python -m jettison.cli.from_vllm page       # this page anew; a test asks for it
$ python -m jettison.cli.from_vllm compare    # the installed vLLM's own parser beside the data
$ python -m jettison.cli.from_vllm facts      # the data anew, from that parser
```
"""


def page() -> str:
    """All of it."""
    parts = [_HEAD.replace("    {count}\n\n", "").format(version=version()), *_commands(), *_done(), *_mapped(),
             *_grouped("harmless", "Without effect", "because"), *_grouped("refused", "Refused", "because, or instead"),
             _FOOT]  # fmt: skip
    return "".join(parts)


def _commands() -> Iterator[str]:
    yield f"## {len(LINES)} commands, pasted\n\n"
    for title, line in LINES:
        found = pasted(line)
        yield f"**{title}.** `{line}`\n"
        if found.refusals:
            yield f"- refused: {_code_flags(found.refusals.flags)}\n"
        else:
            yield f"- runs `{shlex.join(['jettison', 'serve', *_model_first(found.line)])}`\n"
        if found.notes:
            yield f"- the log says: {_code_flags(found.notes.flags)}\n"
        yield "\n"


def _model_first(line: Sequence[str]) -> list[str]:
    return sorted(line, key=lambda word: word.startswith("-"))


def _code_flags(reasons: dict[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(f'`{flag}`' for flag in flags)}: {why}" for why, flags in reasons.items())


def _is_done(rule: Rule) -> bool:
    return rule.verdict == "done" or (rule.verdict != "mapped" and rule.name in own_options())


def _named(rule: Rule) -> str:
    fact = known_flags()[rule.name]
    return ", ".join(f"`{name}`" for name in (rule.name, *fact.aliases)) + (" (older)" if fact.is_older else "")


def _done() -> Iterator[str]:
    yield "## Done\n\n| flag | meaning |\n|---|---|\n"
    for rule in RULES.values():
        if _is_done(rule):
            yield f"| {_named(rule)} | {rule.meaning} |\n"
    yield "\n"


def _mapped() -> Iterator[str]:
    yield "## Mapped\n\n| flag | meaning | here |\n|---|---|---|\n"
    for rule in RULES.values():
        if rule.verdict == "mapped":
            yield f"| {_named(rule)} | {rule.meaning} | {rule.answer} |\n"
    yield "\n"


def _grouped(verdict: str, title: str, heading: str) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for rule in RULES.values():
        if rule.verdict == verdict and not _is_done(rule):
            groups.setdefault(rule.answer, []).append(_named(rule))
    yield f"## {title}\n\n| flags | {heading} |\n|---|---|\n"
    for why, flags in groups.items():
        yield f"| {', '.join(flags)} | {why} |\n"
    yield "\n"
