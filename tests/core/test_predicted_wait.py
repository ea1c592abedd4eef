"""The wait that a refused client is told: about what those wait who are let in."""

from __future__ import annotations

from fakes import FakeCluster

from jettison.core import ports


def test_the_predicted_wait_is_about_what_requests_then_wait() -> None:
    """Of a queue that moves steadily: a request every so often, for long enough to be seen."""
    cluster = FakeCluster(num_workers=2, full_blocks=8, max_seqs=2, policy="recompute")
    core, predicted, began = cluster.core, dict[str, float](), dict[str, int]()
    for i in range(900):
        cluster.submit(f"r{i}", [1, 2, 3], 12, 0.0)
    handle = core.handle

    def handled(event: ports.Event, now_ns: int) -> list[ports.Action]:
        actions = handle(event, now_ns)
        if isinstance(event, ports.Arrived) and event.request.request_id.startswith("p"):
            predicted[event.request.request_id] = core.loads.predicted_wait_s(now_ns)
        for action in actions:
            for row in action.rows if isinstance(action, ports.RunStep) else ():
                began.setdefault(row.state.request_id, now_ns)
        return actions

    core.handle = handled  # type: ignore[method-assign]
    assert core.loads.predicted_wait_s(0) == 0.0
    for at_ms in (1000.0, 2000.0, 3000.0):
        cluster.submit(f"p{at_ms:g}", [1, 2, 3], 12, at_ms)
    cluster.run()
    assert len(predicted) == 3
    for name, wait_s in predicted.items():
        waited_s = (began[name] - cluster.requests[name].arrival_ns) / 1e9
        assert waited_s / 1.25 < wait_s < waited_s * 1.25, f"{name}: {wait_s:g} s predicted, {waited_s:g} s waited"
    assert core.loads.predicted_wait_s(cluster.now) == 0.0
