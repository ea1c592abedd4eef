"""``python -m jettison.server.compile_process``: compiles clients' grammars, at no cost to the server.

It reads one line with the special tokens, then jobs, and answers each; all are lines of JSON. Its memory and its stack
are bounded, and of each job its time of the processor: it ends where it needs more. It ends with its reader, too.
"""

from __future__ import annotations

import resource
import signal
import sys

import llguidance
import msgspec
from llguidance import LLMatcher, LLTokenizer

from jettison.server.compile_jobs import Compiled, Job, Setting
from jettison.server.grammar_texts import ConstraintError, grammar_text, one_line

STACK_BYTES = 4 << 20
"""A fourth of what threads that compile the same in workers have: what does not overflow here does not there."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 25_000,
    "max_grammar_size": 250_000, "verbose_errors": False,
}  # fmt: skip
"""At most half of what workers allow (``device.grammars``)."""


class _Bytes:
    """A vocabulary of all bytes and the special tokens, as ``LLTokenizer`` reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special_tokens: dict[str, int]) -> None:
        size = 257 + max(special_tokens.values(), default=0)
        self.tokens = [b""] * (size + len(special_tokens))
        for text, token in special_tokens.items():
            self.tokens[token] = text.encode()
        free = [token for token in range(len(self.tokens)) if not self.tokens[token]]
        self._ids = dict(enumerate(free[:256]))
        for byte, token in self._ids.items():
            self.tokens[token] = bytes([byte])
        self.eos_token_id = free[256]
        self.special_token_ids = sorted({*special_tokens.values(), self.eos_token_id})

    def __call__(self, text: str | bytes) -> list[int]:
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


class Compiler:
    """Compiles for a model with these special tokens."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        self._special_tokens = special_tokens
        words = _Bytes(special_tokens)
        self._tokenizer = LLTokenizer(
            words,  # type: ignore[arg-type]  # it is told by its attributes
            n_vocab=len(words.tokens), eos_token=[words.eos_token_id], slices=LLTokenizer.json_slices())

    def compiled(self, job: Job) -> Compiled:
        """The grammar, compiled, and its first mask made: both are bounded."""
        try:
            grammar = grammar_text(job.kind, job.text, job.white_space, self._special_tokens)
        except ConstraintError as error:
            return Compiled(error=str(error))
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))  # type: ignore[arg-type]
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return Compiled(error=one_line(matcher.get_error()))
        if matcher.is_stopped() and not matcher.is_accepting():
            return Compiled(error="no text satisfies it")
        return Compiled(grammar=grammar)


def _bound(memory_bytes: int) -> None:
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    for limit, most in (resource.RLIMIT_DATA, data + memory_bytes), (resource.RLIMIT_STACK, STACK_BYTES):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Run until the end of the reader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's whole group
    lines, out = sys.stdin.buffer, sys.stdout.buffer
    setting = msgspec.json.decode(lines.readline(), type=Setting)
    compiler = Compiler(setting.special_tokens)
    compiler.compiled(Job(kind="json", text="{}"))
    _bound(setting.memory_bytes)
    out.write(b"\n")
    out.flush()
    while line := lines.readline():
        signal.setitimer(signal.ITIMER_PROF, setting.cpu_s)  # SIGPROF ends a process
        answer = compiler.compiled(msgspec.json.decode(line, type=Job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(msgspec.json.encode(answer) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
