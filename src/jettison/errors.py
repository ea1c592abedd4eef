"""One drawn tree of errors; the API and the CLI turn these into messages.

    JettisonError
    |-- UserError                 the caller can mend it: one line, exit 2 / HTTP 4xx
    |   |-- ConfigError           a flag or key is wrong
    |   |-- ModelError            the model folder cannot be served
    |   |-- BudgetError           the memory budget is too small
    |   |-- TraceError            a workload file has bad rows
    |   `-- RequestError          one request is wrong (names the field)
    |       `-- TooLongError      prompt + max_tokens can never fit
    |-- OverCapacityError         queue full: retry later (HTTP 429)
    |   `-- KeyLimitError         not the queue: this key has its share under way
    |-- NotReadyError             loading or draining (HTTP 503)
    |-- StalePlanError            a plan was made from an older version
    |-- OutOfBlocksError          a ledger has no block left: a scheduling miss, never fatal
    |-- OutOfPagesError           the page pool is exhausted
    |-- MappingError              the operating system refused a mapping; state was rolled back
    |-- StalledError              what was waited for does not come, and no worker is working on it
    |-- GrammarLostError          a step goes on with the state of a grammar that is not kept
    |-- RowsLostError             a step goes on with rows that an earlier one has shed, and they are not kept any more
    |-- TokensLostError           a step ahead begins with tokens that the step before it has not sampled
    `-- WorkerLostError           a worker process is gone
"""

from __future__ import annotations

import errno

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
"""Numbers of an OSError where no file descriptor is left, to this process or to the machine."""


class JettisonError(Exception):
    """Root of everything this package raises on purpose."""


class UserError(JettisonError):
    """The caller can mend it; the message is one line that says how."""


class ConfigError(UserError):
    """A flag, key or value is wrong."""


class ModelError(UserError):
    """A model folder cannot be served; the message names the file."""


class BudgetError(UserError):
    """The memory budget cannot hold the parameters; the message says how many bytes are needed."""


class TraceError(UserError):
    """A workload file has bad rows; the message has line numbers."""


class RequestError(UserError):
    """One request is wrong. ``param`` names the offending field for OpenAI's error body."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TooLongError(RequestError):
    """Prompt plus ``max_tokens`` exceeds the context or what all memory could ever hold."""


class SleepRefusedError(RequestError):
    """An instance cannot be put to sleep or woken now; the message says why."""


class OverCapacityError(JettisonError):
    """The queue is full; ``retry_after_ms`` is a hint for the client."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class KeyLimitError(OverCapacityError):
    """One API key has as many requests under way as it may have; others are still taken."""


class NotReadyError(JettisonError):
    """Loading or draining; ``retry_after_ms`` is a hint for the client."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class StalePlanError(JettisonError):
    """A plan was made from a state that has changed since."""


class OutOfBlocksError(JettisonError):
    """A block ledger cannot give the blocks asked for."""


class OutOfPagesError(JettisonError):
    """The page pool cannot give the pages asked for."""


class MappingError(JettisonError):
    """The operating system refused a mapping or an allocation; what was done so far is rolled back."""


class StalledError(JettisonError):
    """What was waited for does not come; the message names it, and how things stood."""


class TokensLostError(JettisonError):
    """A step was planned ahead with tokens of the step before it, and that has sampled none: its rows are to be
    computed again."""


class GrammarLostError(JettisonError):
    """A step counts on the state of a grammar that the device keeps no more: its rows are to be computed again, and the
    grammar is to be sent again."""


class RowsLostError(JettisonError):
    """A step goes on with rows that an earlier one has shed, and the device keeps them no more."""


class WorkerLostError(JettisonError):
    """A worker process died or hung."""


class RemoteAttentionError(JettisonError):
    """A peer did not compute attention that a step needs: the step's rows are to be computed again.

    ``lost_worker``: the peer, if the link to it is gone (and so, presumably, is it).
    """

    def __init__(self, message: str, lost_worker: int | None = None) -> None:
        super().__init__(message)
        self.lost_worker = lost_worker


class LinkDownError(WorkerLostError):
    """A link to a peer worker is closed, was cut, or carried something that is not a frame."""
