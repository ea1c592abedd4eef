"""Three merged instances become a pair and one left over, over real memory, and compute the same tokens."""

from __future__ import annotations

from pathlib import Path

from jettison.device.model.create import create_model
from jettison.live.engine.local_cluster import Until
from jettison.live.verify.scenarios import Setting, blocks_for_all, make_cluster, make_prompts, observed, submit


def test_requests_of_three_go_home_to_two_and_the_third_serves_by_itself(tmp_path: Path) -> None:
    create_model(tmp_path / "m", arch="qwen3", layers=6, hidden=32, heads=4, kv_heads=2, head_dim=16, seed=3)
    setting = Setting(tmp_path / "m", "float64", 24, seed=1)
    with make_cluster(setting, num_blocks=blocks_for_all(setting, 40) // 3, instances=3) as cluster:
        prompts = make_prompts(setting, cluster, 10, 40)
        for _ in range(2):
            cluster.request_drop()
            cluster.run(Until("a merge", lambda: not cluster.core.in_transition))
        (pipeline,) = cluster.core.groups.values()
        submit(cluster, prompts, setting.num_output_tokens)
        running = pipeline.queues.running
        cluster.run(Until("decodes", lambda: sum(s.num_output > 1 for s in running.values()) == len(prompts)))
        cluster.request_restore()
        (restore,) = cluster.core.restores
        assert restore.left_over == (pipeline.worker_ids[1],)
        cluster.run()
        cluster.run(Until("an instance", lambda: not cluster.core.in_transition))
        assert sorted(len(g.stages) for g in cluster.core.groups.values()) == [1, 2]
        submit(cluster, prompts, setting.num_output_tokens, len(prompts))
        cluster.run()
        rows = observed(cluster, prompts + prompts)
        assert not any(row.problem for row in rows)
        assert cluster.core.state.counters.num_preemptions == 0
        first, second = rows[: len(prompts)], rows[len(prompts) :]
        assert [row.output for row in first] == [row.output for row in second], "on their way, and by two groups"
