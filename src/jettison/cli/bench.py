"""``jettison bench``: replay a trace or a synthetic workload against any OpenAI-compatible server."""

from __future__ import annotations

from jettison.cli import bench_options as o
from jettison.errors import ConfigError


def bench(
    url: o.Url = "http://127.0.0.1:8000",
    model: o.Model = None,
    api_key: o.ApiKey = None,
    trace: o.Trace = None,
    trace_format: o.TraceFormat = None,
    unit: o.Unit = None,
    workload: o.Workload = None,
    seed: o.Seed = 0,
    jitter: o.Jitter = None,
    skip_bad_rows: o.SkipBadRows = False,
    slice_s: o.SliceS = None,
    slice_index: o.SliceIndex = None,
    thin: o.Thin = None,
    thin_every: o.ThinEvery = None,
    rate_scale: o.RateScale = None,
    lengths_from: o.LengthsFrom = None,
    length_scale: o.LengthScale = None,
    max_model_len: o.MaxModelLen = None,
    num_requests: o.NumRequests = None,
    duration_s: o.DurationS = None,
    endpoint: o.Endpoint = "completions",
    vocab_size: o.VocabSize = 256,
    ignore_eos: o.IgnoreEos = True,
    max_concurrency: o.MaxConcurrency = None,
    cancel_fraction: o.CancelFraction = 0.0,
    request_timeout_s: o.RequestTimeoutS = 600.0,
    total_timeout_s: o.TotalTimeoutS = None,
    offline_lengths: o.OfflineLengths = None,
    offline_unfinished: o.OfflineUnfinished = None,
    offline_requests: o.OfflineRequests = None,
    offline_max_input: o.OfflineMaxInput = None,
    offline_max_output: o.OfflineMaxOutput = None,
    offline_api_key: o.OfflineApiKey = None,
    allow_failures: o.AllowFailures = 0.0,
    name: o.Name = "run",
    slo_ttft_s: o.SloTtftS = None,
    slo_tpot_s: o.SloTpotS = None,
    json_out: o.JsonOut = None,
    html_out: o.HtmlOut = None,
    parameter_share: o.ParameterShare = None,
    kv_capacity_tokens: o.KvCapacityTokens = None,
    num_instances: o.NumInstances = None,
) -> None:
    """Replay a load as it was (open loop: no client waits for an answer before it asks) and report TTFT and TPOT.

    The exit code is 1 where requests failed or were rejected, after all is printed and
    written; --allow-failures says which part may be.
    """
    if (trace is None) == (workload is None):
        raise ConfigError("give one load: --trace FILE or --workload NAME")
    options = dict(locals())  # each is a field of BenchOptions, of the same name; a test compares the two
    del options["url"], options["allow_failures"]
    from jettison.report.failures import check_answered
    from jettison.workload.bench import BenchOptions, run_bench

    check_answered([run_bench(url, BenchOptions(**options))], allow_failures)
