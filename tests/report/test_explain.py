"""Decisions with their outcomes, and incidents, from stored runs."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from jettison.cli.main import main
from jettison.report.decisions import decisions_of, incidents_of
from jettison.report.explain import explain_document, format_field, print_decisions, print_incident
from jettison.report.results import RequestRecord, build_run, write_results

ASSESSED = {"reason": "memory", "load": 1.2, "memory_wait_s": 3.0, "compute_wait_s": 0.5}

LOG = [
    {"t": 1.0, "kind": "drop_declined", "group": 0, **ASSESSED, "reason": "compute binds"},
    {"t": 5.0, "kind": "drop_decided", "group": 0, "required_bytes": 900, "freed_bytes": 1000, "sufficient": True,
     "overloaded_groups": [0], "pulled_shards": 0, "throughput_cost": None, **ASSESSED},
    {"t": 5.01, "kind": "drop", "workers": [0, 1], "group": 2, "bytes_to_kv": 1 << 20, "remap_ms": 2.0,
     "decision_to_serving_ms": 10.0, "stalled": 3, "waiting": 4, "map_calls": 9, "capacity_blocks": 50, "stages": []},
    {"t": 5.02, "kind": "queue_served", "workers": [0, 1], "queued": 4, "decision_to_first_queued_step_ms": 20.0,
     "step_in_flight_ms": 8.0, "steps_between": 1},
    {"t": 5.5, "kind": "exchange_done", "group": 2, "bytes": 77, "requests": {}, "ms": 500.0, "capacity_blocks": 50},
    {"t": 9.0, "kind": "restore_begin", "group": 2, "workers": [0, 1], "pulled_shards": 1},
    {"t": 9.2, "kind": "restore_turned", "group": 2, "reason": "memory"},
    {"t": 11.0, "kind": "restore_begin", "group": 2, "workers": [0, 1], "pulled_shards": 1},
    {"t": 12.0, "kind": "restore_done", "workers": [0, 1], "pulled_bytes": 5, "returned_bytes": 6, "ms": 1000.0},
]


def run(name="drop", log=LOG, late=()):
    """One request a second, first tokens after 0.1 s; those in ``late`` after 4 s."""
    records = []
    for index in range(20):
        ttft = 4.0 if index in late else 0.1
        records.append(RequestRecord(
            index, float(index), 10, 2, "completed", index, index + ttft, index + ttft + 1, 2, [1.0]
        ))
    found = build_run(name, records)
    found.events["log"] = log
    return found


def of_kind(decisions, kind):
    return [d for d in decisions if d.kind == kind]


def test_a_drop_finds_its_outcome_by_its_beginning() -> None:
    (drop,) = of_kind(decisions_of(run(late={4})), "drop")
    assert drop.at_s == 5.0 and drop.workers == (0, 1) and drop.group == 0
    assert drop.predicted["freed_bytes"] == 1000 and drop.predicted["memory_wait_s"] == 3.0
    assert "throughput_cost" not in drop.predicted, "what nobody knew is not shown"
    assert drop.outcome["bytes_to_kv"] == 1 << 20 and drop.outcome["exchange_ms"] == 500.0
    assert drop.outcome["decision_to_first_queued_step_ms"] == 20.0 and drop.outcome["step_in_flight_ms"] == 8.0
    assert drop.outcome["longest_wait_in_queue_s"] == pytest.approx(3.0), "request 4 waited until 8 s"


def test_a_drop_that_failed_says_so() -> None:
    log = [LOG[1], {"t": 5.1, "kind": "drop_failed", "reason": "no memory", "workers": [0, 1]}]
    (drop,) = decisions_of(run(log=log))
    assert drop.outcome["failed"] == "no memory" and "bytes_to_kv" not in drop.outcome


def test_restores_end_done_or_turned() -> None:
    turned, done = of_kind(decisions_of(run()), "restore")
    assert turned.outcome["ended_as"] == "restore_turned" and done.outcome["ended_as"] == "restore_done"
    assert done.outcome["after_s"] == pytest.approx(1.0)


def test_other_decisions() -> None:
    log = [
        {"t": 1.0, "kind": "worker_lost", "worker": 1, "groups": [0], "requests": 2, "moves": []},
        {"t": 1.4, "kind": "recovered", "worker": 0, "ms": 400.0},
        {"t": 3.0, "kind": "worker_joined", "worker": 1, "life": 2},
        {"t": 4.0, "kind": "migrated", "request": "r", "source": 0, "destination": 1, "ms": 250.0, "stop_ms": 3.0},
        {"t": 5.0, "kind": "scale_out", "group": 0, "missing_bytes": 5, "reason": "x"},
        {"t": 7.0, "kind": "scale_out_over"},
        {"t": 8.0, "kind": "yield", "group": 0, "cap_blocks": 5},
        {"t": 8.5, "kind": "rebalanced", "requests": 2, "to": [1]},
        {"t": 9.0, "kind": "something new"},
    ]
    decisions = decisions_of(run(log=log))
    assert [d.kind for d in decisions] == ["recover", "migrate", "scale out", "yield", "rebalance"]
    assert decisions[0].outcome == pytest.approx({"survivor_ready_after_s": 0.4, "worker_back_after_s": 2.0})
    assert decisions[1].at_s == 3.75 and decisions[2].outcome == {"need_over_after_s": 2.0}


def test_an_incident_lasts_from_the_drop_to_the_last_restore() -> None:
    dropped, other = run(late={4}), run("recompute", [], late={4, 5, 6, 7})
    (incident,) = incidents_of(dropped, 1.0, {"recompute": other})
    assert (incident.begin_s, incident.end_s, incident.is_over) == (5.0, 12.0, True)
    assert incident.bytes_freed == 1 << 20 and incident.workers == (0, 1)
    # Scheduled from 4 s on (the oldest that waited at the trigger) until 12 s.
    assert incident.num_arrivals == 8 and incident.num_over_slo == 1
    assert incident.num_saved("recompute") == 3 and incident.num_saved("swap") is None


def test_an_incident_that_never_ended_says_so() -> None:
    (incident,) = incidents_of(run(log=LOG[:5]), 1.0)
    assert not incident.is_over and incident.end_s == run().duration_s


def test_a_second_drop_belongs_to_the_incident_until_all_layers_are_back() -> None:
    second = [
        {**LOG[1], "t": 7.0}, {**LOG[2], "t": 7.01, "workers": [2, 3]},
        {"t": 12.0, "kind": "restore_done", "workers": [0, 1], "ms": 1.0},
        {"t": 15.0, "kind": "restore_done", "workers": [2, 3], "ms": 1.0},
        {**LOG[1], "t": 17.0}, {**LOG[2], "t": 17.01},
    ]
    first, later = incidents_of(run(log=[*LOG[1:5], *second]), 1.0)
    assert len(first.drops) == 2 and first.end_s == 15.0 and first.bytes_freed == 2 << 20
    assert later.begin_s == 17.0 and not later.is_over


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("memory_wait_s", 3.0, "memory wait 3 s"), ("remap_ms", 2.0, "remap 2 ms"), ("ms", 2.0, "2 ms"),
    ("freed_bytes", 3 << 20, "freed bytes 3 MiB"), ("bytes_to_kv", 1 << 20, "bytes to kv 1 MiB"),
    ("sufficient", True, "sufficient yes"), ("stalled_requests", 1234, "stalled requests 1,234"),
    ("homes", {1: [0, 2]}, "homes 1: 0, 2"), ("load", 1.23456, "load 1.235"),
])
def test_fields_are_read_by_their_units(name, value, shown) -> None:
    assert format_field(name, value) == shown


def test_all_of_it_is_printed_and_written() -> None:
    dropped = run(late={4})
    incidents = incidents_of(dropped, 1.0, {"recompute": run("recompute", [], late={4, 5})})
    console = Console(width=150)
    with console.capture() as printed:
        print_decisions(decisions_of(dropped), console)
        print_incident(incidents[0], 1, 1.0, console)
    text = printed.get()
    for expected in ("no drop", "compute binds", "1 MiB of parameters", "recompute", "so 1 saved", "P99"):
        assert expected in text
    document = json.loads(json.dumps(explain_document(dropped, incidents)))
    assert document["incidents"][0]["saved"] == {"recompute": 1} and len(document["decisions"]) == 4


@pytest.mark.parametrize(("waits", "because"), [
    ((3.0, 2.0), "the memory wait is under 2 times the compute wait"),
    ((3.0, 0.5), "prompts fill over 30% of the steps"),
])
def test_a_drop_that_compute_forbade_says_which_comparison_did(waits, because) -> None:
    declined = {**LOG[0], "memory_wait_s": waits[0], "compute_wait_s": waits[1]}
    (decision,) = decisions_of(run(log=[declined]))
    assert decision.inputs["reason"] == "compute binds" and decision.inputs["because"] == because
    (other,) = decisions_of(run(log=[{**declined, "reason": "a pipeline could not keep up"}]))
    assert "because" not in other.inputs


def test_what_dropping_cost_is_not_called_saved(capsys) -> None:
    dropped, other = run(late={4, 5, 6}), run("recompute", [], late={4})
    (worse,) = incidents_of(dropped, 1.0, {"recompute": other})
    (untold,) = incidents_of(dropped, 1.0, {"recompute": other}, untold={"recompute"})
    print_incident(worse, 1, 1.0, Console(width=150))
    assert "1 over: here 2 more over" in capsys.readouterr().out
    print_incident(untold, 1, 1.0, Console(width=150), "[far] off")
    shown = capsys.readouterr().out
    assert untold.num_saved("recompute") is None and "saved" not in shown and "more over" not in shown
    assert "Warning" in shown and "[far] off" in shown


def test_the_command(tmp_path, capsys) -> None:
    path, out = tmp_path / "runs.json", tmp_path / "deep" / "explained.json"
    write_results(path, [run("recompute", [], late={4, 5}), run(late={4})])
    assert main(["explain", str(path), "--json", str(out), "--kind", "drop"]) == 0
    assert "incident 1" in capsys.readouterr().out
    (explained,) = json.loads(out.read_text())["runs"]
    assert explained["run"] == "drop" and list(explained["incidents"][0]["saved"].values()) == [1]


def test_a_calm_run_is_no_mistake(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    write_results(path, [run("calm", [])])
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "calm" in shown and "nothing was decided" in shown


def test_the_command_names_what_is_missing(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    foreign = run("plain")
    del foreign.events["log"]
    write_results(path, [foreign])
    for arguments, message in (
        ([], "no run with an event log"), (["--run", "plain"], "run 'plain' has no event log"),
        (["--run", "other"], "no run named 'other' (runs: plain)"),
        (["--profile", "p.json"], "--profile goes with --counterfactual"),
    ):
        assert main(["explain", str(path), "--json", str(tmp_path / "out.json"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert not (tmp_path / "out.json").exists()


def test_cards_come_first_and_moves_of_requests_share_a_row(tmp_path, capsys) -> None:
    moves = [{"t": 2.0 + i / 10, "kind": "rebalanced", "requests": 2, "to": [i % 2]} for i in range(9)]
    path = tmp_path / "runs.json"
    write_results(path, [run(log=[LOG[0], *moves, *LOG[1:]])])
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("rebalance") == 1
    assert shown.index("incident 1") < shown.index("rebalance, 9 times") < shown.index("requests 18")
    assert main(["explain", str(path), "--kind", "rebalance"]) == 0
    assert capsys.readouterr().out.count("rebalance") == 9, "who asks for them gets each"


def test_a_migration_without_a_known_home_is_counted() -> None:
    log = [{"t": float(t), "kind": "migrated", "request": f"r{t}", "ms": 5.0} for t in (1, 2)]
    console = Console(width=150)
    with console.capture() as printed:
        print_decisions(decisions_of(run(log=log)), console)
    assert "migrate, 2 times" in printed.get() and "requests 2" in printed.get()
