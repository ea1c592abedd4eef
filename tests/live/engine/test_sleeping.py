"""A worker put to sleep and woken over real memory: it gives its layers up, and computes the same tokens afterwards."""

from __future__ import annotations

from pathlib import Path

from jettison.core.moving.sleeping import EMPTY
from jettison.device.model.create import create_model
from jettison.live.engine.local_cluster import LocalCluster, Until
from jettison.live.verify.scenarios import Setting, blocks_for_all, make_cluster, make_prompts, observed, submit


def sleeping(cluster: LocalCluster) -> Until:
    sleepers = cluster.core.sleepers
    return Until("an empty layout", lambda: bool(sleepers.asleep) and sleepers.is_idle)


def test_a_worker_that_has_slept_computes_the_same_tokens(tmp_path: Path) -> None:
    create_model(tmp_path / "m", arch="qwen3", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3)
    setting = Setting(tmp_path / "m", "float64", 24, seed=1)
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40), instances=2) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        cluster.request_sleep(1)
        cluster.run(sleeping(cluster))
        assert cluster.core.state.workers[1].layout == EMPTY
        submit(cluster, prompts, setting.num_output_tokens)
        cluster.run()
        cluster.request_wake(1)
        cluster.run(Until("all layers", lambda: not cluster.core.in_transition))
        assert len(cluster.core.groups) == 2
        cluster.request_sleep(0)
        cluster.run(sleeping(cluster))
        submit(cluster, prompts, setting.num_output_tokens, len(prompts))
        cluster.run()
        rows = observed(cluster, prompts + prompts)
        assert not any(row.problem for row in rows)
        first, second = rows[: len(prompts)], rows[len(prompts) :]
        assert [row.output for row in first] == [row.output for row in second], "by worker 0, then by worker 1"
