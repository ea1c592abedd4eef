"""What a core was told and what it answered, in words that outlive its classes.

Structural work renames events, actions and fields, splits one class and joins two; it must not change a decision. So a
schedule is written down in fixed words: each transfer has two ends, a device or a host; ids (of steps, calls,
transfers, groups, epochs) are numbers in order of first appearance; what one worker is sent stays in order, and the
order among workers, which means nothing, is that of their ids. Of records in the event log only the kind, the group and
the workers count: their other fields explain, and grow. A renamed class gets another line in the tables below, and no
digest may change.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable

from fakes import FakeCluster

EVENTS = {
    "Arrived": "arrived", "CancelRequested": "cancel", "FinishRequested": "finish", "StepCompleted": "step done",
    "StepFailed": "step failed", "StepAbandoned": "step abandoned",
    "LayoutOffered": "layout offered", "LayoutApplied": "layout applied",
    "CallFailed": "call failed", "ShardLoaded": "shard loaded", "TransferEnded": "transfer ended", "WorkerLost": "lost",
    "WorkerJoined": "joined", "WorkerGone": "gone", "WorkerFenced": "fenced", "Tick": "tick", "LinkLost": "link lost",
}  # fmt: skip
"""Class -> word. Only the word and who it is about are written: what an event says comes from the pretend workers."""

RECORDS = (
    "chunk_overtaken", "drop", "drop_decided", "drop_declined", "drop_failed", "exchange_done", "migrated",
    "queue_served", "rebalanced", "recovered", "recovery_stuck", "restore_begin", "restore_done", "restore_turned",
    "scale_out", "scale_out_over", "split", "step_failed", "worker_gone", "worker_joined", "worker_lost", "yield",
)
"""Kinds that are written down; what is recorded beside them later is left out."""


class NeutralLog:
    """Listens to one cluster from its beginning."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.lines: list[str] = []
        self._numbers: defaultdict[str, dict[object, int]] = defaultdict(dict)
        core = cluster.core
        handle, drop, restore = core.handle, core.request_drop, core.request_restore

        def on_event(event, now_ns):
            actions = handle(event, now_ns)
            self._write(self._event(event), now_ns, actions)
            return actions

        def on_order(order, word):
            def ordered(now_ns):
                actions = order(now_ns)
                self._write((word,), now_ns, actions)
                return actions

            return ordered

        core.handle = on_event
        core.request_drop, core.request_restore = on_order(drop, "order drop"), on_order(restore, "order restore")

    @property
    def digest(self) -> str:
        """Of everything so far."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    # --- words

    def _number(self, kind: str, name: object) -> str:
        numbers = self._numbers[kind]
        return f"{kind}{numbers.setdefault(name, len(numbers))}"

    def _write(self, event: tuple[object, ...], now_ns: int, actions: Iterable[object]) -> None:
        if event == ("tick",) and not actions:
            return
        told: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        each = (one for a in actions for one in (a.each() if type(a).__name__ == "EmitTokens" else (a,)))
        for action in sorted(filter(_counts, each), key=_target):  # stable: what one target gets stays in order
            told[_target(action)].append(self._action(action))
        text = f"{now_ns} {event} {list(told.values())}"
        self.lines.append(re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda found: f"{float(found[0]):.6g}", text))

    def _event(self, event: object) -> tuple[object, ...]:
        word = EVENTS[type(event).__name__]
        about: list[object] = []
        for name, kind in (("request_id", ""), ("worker_id", "w"), ("step_id", "step"), ("call_id", "call")):
            if hasattr(event, name):
                value = getattr(event, name)
                about.append(value if kind in ("", "w") else self._number(kind, value))
        if word == "arrived":
            about.append(event.request.request_id)
        if word == "transfer ended":
            about += [self._number("transfer", event.transfer_id), event.complete, event.num_bytes]
        return (word, *about)

    def _action(self, action: object) -> tuple[object, ...]:
        kind = type(action).__name__
        match kind:
            case "RunStep":
                rows = [
                    (row.state.request_id, row.context_len, row.num_tokens, row.samples,
                     tuple(row.state.tokens[row.context_len :]), len(row.remote))
                    for row in action.rows
                ]  # fmt: skip
                stages = [(stage.worker_id, tuple(stage.layers)) for stage in action.stages]
                group, epoch = self._number("group", action.group_id), self._number("epoch", action.epoch)
                return ("step", self._number("step", action.step_id), group, epoch, stages, rows)
            case "AbandonStep":
                return ("abandon", self._number("step", action.step_id))
            case "OfferLayout" | "ApplyLayout":
                spec = action.spec
                kept = [(tuple(kv.layers), tuple(kv.block_ids)) for kv in spec.retained]
                layout = (sorted(spec.shards), tuple(spec.kv_layers), kept, action.live_blocks)
                copies = tuple(getattr(action, "copies", ()))
                word = "offer" if kind == "OfferLayout" else "apply"
                return (word, action.worker_id, self._number("call", action.call_id), layout, copies)
            case "LoadShard":
                return ("load", action.worker_id, self._number("call", action.call_id), action.shard)
            case "FenceWorker":
                return ("fence", action.worker_id, self._number("call", action.call_id), action.lost, action.lost_life)
            case "CancelTransfer":
                return ("cancel", action.src, self._number("transfer", action.transfer_id))
            case "Emit":
                tokens = tuple(token.token_id for token in action.tokens)
                return ("emit", action.request_id, tokens, str(action.finish_reason), action.stop_token_id,
                        action.error is not None)  # fmt: skip
            case "Record":
                return self._record(action)
        return self._transfer(kind, action)

    def _transfer(self, kind: str, action: object) -> tuple[object, ...]:
        head = ("transfer", self._number("transfer", action.transfer_id))
        match kind:
            case "SendShard":
                return (*head, ("device", action.src), ("device", action.dst), action.shard)
            case "SendKV":
                place = {False: "device", True: "host"}
                ends = (place[action.from_host], action.src), (place[action.to_host], action.dst)
                blocks = tuple(action.src_blocks), tuple(action.dst_blocks)
                return (*head, *ends, tuple(action.layers), *blocks, action.urgent)
        raise AssertionError(f"{kind} has no word yet")

    def _record(self, record: object) -> tuple[object, ...]:
        fields = record.fields
        group = self._number("group", fields["group"]) if "group" in fields else None
        return ("record", record.kind, group, fields.get("worker"), tuple(fields.get("workers", ())))


def _counts(action: object) -> bool:
    return type(action).__name__ != "Record" or action.kind in RECORDS


def _target(action: object) -> str:
    """Who carries an action out: the source of a transfer, a step's first worker; clients and the log come last."""
    kind = type(action).__name__
    if kind == "Emit":
        return f"z {action.request_id}"
    if kind == "Record":
        return "zz"
    worker = action.stages[0].worker_id if kind == "RunStep" else getattr(action, "worker_id", None)
    return f"w{action.src if worker is None else worker:06d}"
