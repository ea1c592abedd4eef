"""Verdicts on vLLM's flags of the engine: memory, steps, parallelism, kernels, images (``rules`` has the words)."""

from __future__ import annotations

from jettison.config.vllm.rules import (
    Drop,
    Outcome,
    Refuse,
    Rule,
    Set,
    by_word,
    done,
    harmless,
    mapped,
    refused,
    renamed,
)
from jettison.config.vllm.serving_rules import NO_IMAGES

_ONE_CARD = ("an instance is one worker on one card: --instances N serves N copies, and with --overload drop they "
             "merge into one pipeline where memory runs out")  # fmt: skip
_HOSTS = "one server has all instances: --instances N (--data-parallel-size); --launcher ray finds other hosts for them"
_KERNELS = "--kernels says what computes, and there is nothing else to choose"
_GRAPHS = "what is captured or compiled is settled at the start, and changes no answer"
_EXPERTS = "a layer's experts lie in the layer's memory, on one card"
_GUESSES = "no tokens are guessed ahead: answers are the same, a token a step"
_NO_KV_SHARING = "KV leaves an engine only between its own instances; --host-memory keeps more of it"


def _gigabytes(text: str) -> str | None:
    """A size in GiB, as vLLM has it; None for none."""
    number = float(text)
    if number <= 0:
        return None
    return f"{number:.0f}GiB" if number == int(number) else f"{round(number * 1024)}MiB"


def _host_memory(value: object) -> Outcome:
    """vLLM's sizes of host memory are in GiB."""
    try:
        size = _gigabytes(str(value))
    except ValueError:
        return Refuse("needs a number of GiB")
    return Drop() if size is None else Set("host_memory", size)


def _cards(value: object) -> Outcome:
    """Cards by their numbers; names (UUIDs) only CUDA_VISIBLE_DEVICES takes."""
    told = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if all(part.strip().isdecimal() for part in told.split(",")):
        return Set("cards", told)
    return Refuse("--cards takes numbers; CUDA_VISIBLE_DEVICES takes names of cards")


def _step_ahead(value: object) -> Outcome:
    return Set("step_ahead", "on" if value is True else "off")


def _media_limit(value: object) -> Outcome:
    """Only a limit of none is kept."""
    if isinstance(value, dict) and not any(value.values()):
        return Drop()
    return Refuse(NO_IMAGES)


_BACKENDS: dict[str, Outcome] = {
    "mp": Drop("workers are processes of this machine"), "uni": Drop("workers are processes of this machine"),
    "ray": Set("launcher", "ray"),
}  # fmt: skip

ENGINE: tuple[Rule, ...] = (
    *done({
        "--block-size": "Tokens of one KV block.", "--enable-prefix-caching": "Reuse KV of equal prefixes.",
        "--max-num-seqs": "Most requests that run at a time.",
        "--max-num-batched-tokens": "Tokens of one step (8k, 16K).",
        "--max-num-queued-reqs": "Waiting requests beyond which clients get 429.",
        "--scheduling-policy": "Whose requests come first.",
    }),
    mapped("--gpu-memory-utilization", "Part of a card's memory to use.",
           "the same on cards; on a CPU without effect: `--memory` says it", renamed("gpu_memory_utilization")),
    mapped("--data-parallel-size", "Full copies of the model.", "`--instances`", renamed("instances")),
    mapped("--device-ids", "Cards to use.", "`--cards`, by numbers", _cards),
    mapped("--swap-space", "GiB of host memory for KV.", "`--host-memory`", _host_memory),
    mapped("--kv-offloading-size", "GiB of host memory for KV.", "`--host-memory`", _host_memory),
    mapped("--kv-offloading-backend", "What keeps KV in host memory.", "`native`; others refused",
           by_word({"native": Drop()}, _NO_KV_SHARING)),
    mapped("--watermark", "Part of KV kept free.", "`--admission-watermark`", renamed("admission_watermark")),
    mapped("--async-scheduling", "Plan a step while one is computed.", "`--step-ahead on` or `off`", _step_ahead),
    mapped("--distributed-executor-backend", "What runs workers.",
           "`ray`: `--launcher ray`; `mp`, `uni`; others refused", by_word(_BACKENDS, _HOSTS)),
    mapped("--data-parallel-backend", "What runs copies.", "`ray`: `--launcher ray`; `mp`; others refused",
           by_word(_BACKENDS, _HOSTS)),
    mapped("--limit-mm-per-prompt", "Most images of a prompt.", "zeros only; others refused", _media_limit),
    *harmless(_GRAPHS, {
        "--enforce-eager": "No CUDA graphs.", "--optimization-level": "How much is compiled (-O).",
        "--compilation-config": "What is compiled and captured.", "--cudagraph-capture-sizes": "Sizes of graphs.",
        "--max-cudagraph-capture-size": "The largest graph.", "--cuda-graph-sizes": "Sizes of graphs.",
        "--max-seq-len-to-capture": "Longest request in graphs.",
        "--max-context-len-to-capture": "Longest request in graphs.",
        "--performance-mode": "What settings favour.", "--enable-flashinfer-autotune": "Tune a library's kernels.",
        "--enable-cumem-allocator": "Memory by CUDA's mappings.",
        "--enable-nccl-comm-suspend": "Collectives during sleep.",
        "--sleep-mode-offload-cudagraph": "Graphs during sleep.",
        "--sleep-preserve-parameter-names": "Parameters that stay during sleep.",
        "--fail-on-environ-validation": "Check environment variables.",
        "--additional-config": "Settings of hardware plugins.", "--override-neuron-config": "Settings of Neuron.",
    }),
    *harmless(_KERNELS, {
        "--attention-backend": "Kernels of attention.", "--attention-config": "Their settings.",
        "--moe-backend": "Kernels of experts.", "--linear-backend": "Kernels of products.",
        "--kernel-config": "Kernels of all kinds.", "--ir-op-priority": "Their order.",
        "--sparse-indexer-topk-backend": "Kernels of sparse attention.",
        "--gdn-prefill-backend": "Kernels of gated delta nets.",
        "--kda-prefill-backend": "Kernels of Kimi's attention.",
        "--kda-decode-backend": "Kernels of Kimi's attention.", "--mamba-backend": "Kernels of Mamba.",
        "--mamba-ssu-algorithm": "How its state is updated.", "--use-fp64-gumbel": "Draw in double precision.",
        "--disable-cascade-attn": "No attention over shared prefixes.",
        "--disable-custom-all-reduce": "No sums between cards of vLLM's own.", "--dcp-comm-backend": "Transport.",
        "--dcp-q-replicate": "Queries at every card.", "--numa-bind": "Workers by memory nodes.",
        "--numa-bind-nodes": "Which nodes.", "--numa-bind-cpus": "Which processors.",
        "--use-v2-block-manager": "Another manager of KV.",
    }),
    *harmless(_EXPERTS, {
        "--enable-expert-parallel": "Divide experts over cards.", "--enable-eplb": "Balance them.",
        "--eplb-config": "How.", "--expert-placement-strategy": "Where they lie.",
        "--all2all-backend": "Their transport.", "--enable-dbo": "Overlap it with computing.",
        "--ubatch-size": "Parts of a step for that.", "--dbo-decode-token-threshold": "From how many tokens on.",
        "--dbo-prefill-token-threshold": "From how many tokens on.", "--enable-microbatching": "Overlap it.",
        "--enable-ep-weight-filter": "Read a card's own experts.", "--dp-sync-interval": "How often copies agree.",
        "--disable-nccl-for-dp-synchronization": "By which transport.",
        "--enable-batch-sharded-sampling": "Divide sampling over cards.", "--enable-hc-sp": "Divide hyper-connections.",
        "--enable-shm-tensor-arena": "Tensors in shared memory.",
    }),
    *harmless(_GUESSES, {
        "--speculative-config": "Guess tokens ahead.", "--spec-method": "How.", "--spec-model": "By which model.",
        "--spec-tokens": "How many.", "--speculative-model": "By which model.", "--num-speculative-tokens": "How many.",
        "--speculative-draft-tensor-parallel-size": "Cards of that model.",
        "--speculative-max-model-len": "Its longest request.", "--ngram-prompt-lookup-max": "Longest match.",
        "--ngram-prompt-lookup-min": "Shortest match.", "--num-lookahead-slots": "Places for guesses.",
        "--disable-logprobs-during-spec-decoding": "No logprobs of guesses.",
    }),
    *harmless("prompts are computed in chunks of what a step has room for", {
        "--enable-chunked-prefill": "Prompts in chunks.", "--long-prefill-token-threshold": "What a long prompt is.",
        "--long-prefill-token-threshold-adaptive": "That by itself.",
        "--max-num-partial-prefills": "Prompts in one step.", "--max-long-partial-prefills": "Long ones in one step.",
        "--disable-chunked-mm-input": "Images in one piece.", "--scheduler-reserve-full-isl": "Room for whole prompts.",
        "--prefill-schedule-interval": "Steps between prompts.", "--max-num-scheduled-tokens": "Tokens of one step.",
        "--scheduler-delay-factor": "Wait for more prompts.", "--num-scheduler-steps": "Steps planned at a time.",
        "--multi-step-stream-outputs": "Tokens one by one.", "--stream-interval": "Tokens of one streamed piece.",
        "--disable-async-output-proc": "Answers between steps.", "--max-paddings": "Padding of a step.",
        "--preemption-mode": "What a preempted request loses.", "--max-num-active-seqs": "Most requests with state.",
    }),
    *harmless("the prefix cache and windows are as they are, and change no answer", {
        "--prefix-caching-hash-algo": "Hash of prefixes.", "--prefix-cache-retention-interval": "How long they stay.",
        "--prefix-match-unit": "Their granularity.", "--disable-hybrid-kv-cache-manager": "Windows like full layers.",
        "--kv-sharing-fast-prefill": "Skip layers with shared KV.", "--swa-bounded-replay": "Recompute windows.",
        "--calculate-kv-scales": "Scales of quantized KV.", "--quantization-param-path": "File of such scales.",
        "--kv-cache-dtype-skip-layers": "Layers without them.",
    }),
    *harmless("models with such a state are refused by name", {
        "--mamba-cache-dtype": "Precision of recurrent state.", "--mamba-ssm-cache-dtype": "Precision of it.",
        "--mamba-block-size": "Its blocks.", "--mamba-cache-mode": "What is cached of it.",
        "--enable-mamba-shared-prefix-checkpoint": "Its prefixes.",
        "--enable-mamba-cache-stochastic-rounding": "Its rounding.", "--mamba-cache-philox-rounds": "Its draws.",
        "--replayssm-buffer-len": "Its replay.", "--use-replayssm": "Its replay.", "--engram-config": "Memory modules.",
    }),
    *harmless("images are not served, and nothing of them is kept", {
        "--mm-processor-cache-gb": "Cache of images.", "--mm-processor-cache-type": "Its kind.",
        "--mm-hasher-algorithm": "Its hash.", "--mm-shm-cache-max-object-size-mb": "Its largest entry.",
        "--mm-encoder-tp-mode": "Encoders over cards.", "--mm-encoder-attn-backend": "Kernels of encoders.",
        "--mm-encoder-attn-dtype": "Their precision.", "--mm-encoder-fp8-scale-path": "Their scales.",
        "--mm-encoder-fp8-scale-save-path": "Their scales.", "--mm-encoder-fp8-scale-save-margin": "Their scales.",
        "--skip-mm-profiling": "No trial with images.", "--video-pruning-rate": "Frames left out.",
        "--video-pruning-method": "Which.", "--mm-tensor-ipc": "Transport of images.",
        "--mm-processor-device": "Where images are prepared.", "--mm-ipc-gpu-memory-gb": "Memory for that.",
        "--mm-device-do-normalize": "Where colours are scaled.", "--interleave-mm-strings": "Images amid the text.",
        "--disable-mm-preprocessor-cache": "No cache of images.",
        "--enable-multimodal-encoder-data-parallel": "Encoders over cards.",
        "--trust-request-mm-kwargs": "Take settings of requests.", "--ec-manager-config": "Cache of encoders.",
    }),
    *harmless("no collectives between hosts are used", {
        "--master-addr": "Address of the first host.", "--master-port": "Its port.",
        "--distributed-timeout-seconds": "Patience with cards.", "--cpu-distributed-timeout-seconds": "With hosts.",
        "--dcp-kv-cache-interleave-size": "Tokens a card.", "--cp-kv-cache-interleave-size": "Tokens a card.",
        "--enable-fault-tolerance": "Survive lost workers.", "--fault-tolerance-config": "How.",
        "--dp-supervisor-probe-interval-s": "Probes of copies.", "--dp-supervisor-probe-timeout-s": "Their patience.",
        "--dp-supervisor-probe-failure-threshold": "Their patience.",
        "--data-parallel-supervisor-port": "Port of the supervisor.", "--elastic-ep-max-dp-size": "Most copies.",
        "--worker-use-ray": "Workers under Ray.", "--engine-use-ray": "The engine under Ray.",
        "--data-parallel-size-local": "Copies on this host.", "--data-parallel-start-rank": "The first one's number.",
    }),
    *refused(_ONE_CARD, {
        "--tensor-parallel-size": "Cards that share each layer.",
        "--pipeline-parallel-size": "Cards that share the layers.",
        "--decode-context-parallel-size": "Cards that share KV.",
        "--prefill-context-parallel-size": "Cards that share a prompt.",
    }),
    *refused(_HOSTS, {
        "--nnodes": "Hosts.", "--node-rank": "Number of this host.", "--data-parallel-rank": "Number of this copy.",
        "--data-parallel-address": "Address of the first copy.", "--data-parallel-rpc-port": "Its port.",
        "--data-parallel-hybrid-lb": "A balancer for each host.",
        "--data-parallel-external-lb": "A balancer before all copies.",
        "--data-parallel-multi-port-external-lb": "A port for each copy.",
        "--enable-elastic-ep": "Copies that come and go.",
    }),
    *refused("KV has the precision of --dtype; --memory or a shorter --max-model-len makes room", {
        "--kv-cache-dtype": "Precision of KV.",
    }),
    *refused("--memory SIZE bounds an instance: parameters, KV and workspace together", {
        "--kv-cache-memory-bytes": "Bytes of KV on each card.", "--num-gpu-blocks-override": "Blocks of KV.",
    }),
    *refused("parameters are in the instance's memory, or dropped where another instance has them: a larger --memory, "
             "or quantized weights", {
        "--cpu-offload-gb": "GiB of parameters in host memory.", "--cpu-offload-params": "Which.",
        "--offload-backend": "How.", "--offload-group-size": "Layers at a time.",
        "--offload-num-in-group": "How many of them.", "--offload-prefetch-step": "How far ahead.",
        "--offload-params": "Which.",
    }),
    *refused(_NO_KV_SHARING, {
        "--kv-transfer-config": "KV between engines (LMCache, prefill apart).",
        "--ec-transfer-config": "Images between engines.", "--kv-events-config": "Tell routers what is cached.",
    }),
    *refused("--max-num-queued-reqs and --max-active-reqs-per-key bound the queue", {
        "--max-num-queued-tokens": "Waiting tokens beyond which clients get 429.",
    }),
    *refused(NO_IMAGES, {
        "--allowed-local-media-path": "Folder of images.", "--allowed-media-domains": "Hosts of images.",
        "--media-io-kwargs": "How images are read.", "--mm-processor-kwargs": "How images are prepared.",
        "--enable-mm-embeds": "Images as embeddings.", "--mm-encoder-only": "Serve the encoder only.",
    }),
    *refused("there is no such kind of request or model here", {
        "--enable-prompt-embeds": "Prompts as embeddings.", "--enable-return-routed-experts": "Experts in answers.",
        "--return-sampling-mask": "Masks in answers.", "--enable-trace-replay": "Replay sampled tokens.",
        "--aux-output-config": "More outputs of a step.", "--diffusion-config": "Diffusion models.",
        "--watermark-config": "Marks in generated text.", "--reasoning-config": "Bounds of thinking.",
        "--weight-transfer-config": "Weights from a trainer.",
    }),
)  # fmt: skip
