"""Verdicts on vLLM's flags of the server, its logs, the model and its files (``rules`` has the words)."""

from __future__ import annotations

from jettison.config.vllm.rules import (
    Drop,
    Keep,
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

NO_LORA = "adapters (LoRA) are not served; merge one into its model, and serve the merged folder"
NO_POOLING = "embeddings and scores are not served, only models that generate text"
ONLY_GENERATES = "all models are served to generate text, and for nothing else"
NO_IMAGES = "images, sound and video are not served; of a model with images its text part is"
NO_CODE = "nothing that this flag names is executed"
_EDIT_CONFIG = "edit config.json in a copy of the folder: what is served is what the folder says"
_NEEDS_TOKENIZER = "prompts and answers are texts: a tokenizer is needed, the model folder's or --tokenizer"
_NO_HALF = "computed as bfloat16, as small but less precise (8 bits, not 11); --dtype float32 loses nothing of float16"
_NO_LOG = "requests and answers are never logged, and the web server has no log of accesses"
_SEEN_ELSEWHERE = "/metrics, --timeline and `jettison explain` show what the engine does"
_ALWAYS = "it is always so here"

_ONE_BACKEND = "there is one implementation of structured output (docs/using.md)"
_STRUCTURED = ("disable_any_whitespace", "disable_additional_properties")
"""Parts of the structured outputs' configuration that are done."""


def _dtype(value: object) -> Outcome:
    word = str(value).lower()
    if word in ("half", "float16"):
        return Set("dtype", "bfloat16", _NO_HALF)
    return Set("dtype", "float32") if word == "float" else Keep()


def _load_format(value: object) -> Outcome:
    word = str(value).lower()
    if word in ("auto", "random"):
        return Keep()
    if word == "dummy":
        return Set("load_format", "random")
    if word in ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer"):
        return Set("load_format", "auto")
    if word == "mistral":
        return Set("load_format", "auto", "the folder's Hugging Face files are read, not Mistral's own")
    if word == "gguf":
        return Refuse("`jettison model import FILE.gguf DIR` makes a folder of a GGUF file first")
    return Refuse("weights are read from safetensors; without weights --load-format random serves a shape")


def _quantization(value: object) -> Outcome:
    word = str(value).lower().replace("-", "_")
    if word in ("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed_tensors", "mxfp4",
                "gpt_oss_mxfp4", "fp8", "gguf", "moe_wna16", "deepseek_fp8"):  # fmt: skip
        return Drop("the folder's quantization_config says what is quantized; nothing is quantized while it is read")
    return Refuse("FP8, AWQ, GPTQ, compressed-tensors and MXFP4 folders are served, by their config.json "
                  "(docs/using.md, Quantized weights)")  # fmt: skip


def _log_level(value: object) -> Outcome:
    word = str(value).lower()
    return Set("log_level", {"critical": "error", "notset": "debug", "trace": "debug"}.get(word, word))


def _config_of_mistral(value: object) -> Outcome:
    if str(value).lower() in ("auto", "hf", "slow", "fast", "mistral"):
        return Drop("the folder's Hugging Face files are read")
    return Refuse("the folder's config.json and tokenizer.json are what is read")


def _structured(value: object) -> Outcome:
    """vLLM's settings of structured output: two are ours, the library is of no matter."""
    if not isinstance(value, dict):
        return Refuse("needs a JSON object")
    said = {str(name).replace("-", "_"): part for name, part in value.items()}
    has_backend = bool(said.keys() & {"backend", "disable_fallback"})
    others = sorted(name for name, part in said.items()
                    if name not in (*_STRUCTURED, "backend", "disable_fallback") and part not in (None, False, ""))
    if others:
        return Refuse(f"of its parts {' and '.join(_STRUCTURED)} are done, and requests may say them, too "
                      f"(structured_outputs); not {', '.join(others)}"
                      f"{': say --reasoning-parser' if 'reasoning_parser' in others else ''}")  # fmt: skip
    taken = {name: said[name] for name in _STRUCTURED if said.get(name) is not None}
    note = f"backend: {_ONE_BACKEND}" if has_backend else ""
    return Set("structured_outputs_config", taken, note) if taken else Drop(note)


def _no_white_space(value: object) -> Outcome:
    return Set("structured_outputs_config", {"disable_any_whitespace": True}) if value else Drop()


def _parser(value: object) -> Outcome:
    """An empty name is vLLM's word for none named."""
    return Drop() if value == "" else Keep()


_RUNS = {word: Drop() for word in ("auto", "generate")}

SERVING: tuple[Rule, ...] = (
    *done({
        "--host": "Address to listen on.", "--port": "Port to listen on.",
        "--root-path": "Path under which a proxy shows the server.",
        "--api-key": "Keys that open the API.",
        "--allowed-origins": "Origins of web pages that may ask.", "--allowed-methods": "Methods that they may use.",
        "--allowed-headers": "Headers that they may send.", "--allow-credentials": "Whether they may send cookies.",
        "--ssl-keyfile": "Key of the certificate.", "--ssl-certfile": "Certificate: HTTPS.",
        "--ssl-ca-certs": "Authorities for clients' certificates.",
        "--ssl-cert-reqs": "Whether clients need a certificate.", "--ssl-ciphers": "Ciphers of TLS 1.2.",
        "--otlp-traces-endpoint": "Where traces are sent (here over HTTP).",
        "--shutdown-timeout": "Seconds that running requests get at the end.",
        "--chat-template": "Chat template instead of the model's.",
        "--chat-template-content-format": "Content of messages as texts or parts.",
        "--trust-request-chat-template": "Take templates of requests.",
        "--default-chat-template-kwargs": "Variables for the chat template.",
        "--exclude-tools-when-tool-choice-none": "Leave unused tools out of prompts.",
        "--enable-auto-tool-choice": "Let the model choose tools.",
        "--served-model-name": "Names for clients; answers carry the first.",
        "--seed": "Seed for requests that send none.", "--max-model-len": "Longest request in tokens (4k, 32K, auto).",
        "--max-logprobs": "Most logprobs that a request may ask for.",
        "--generation-config": "Where sampling that requests leave open comes from.",
        "--override-generation-config": "Sampling put over that.",
        "--tokenizer": "Folder or hub id of another tokenizer.",
        "--tokenizer-revision": "Revision of the tokenizer.",
        "--revision": "Revision of the hub's cache to serve.", "--download-dir": "The hub's cache to look in.",
        "--config": "YAML file of flags: ours and vLLM's, in one file.",
        "--device": "What to compute on.",
    }),
    Rule("--tool-call-parser", "done", "How tool calls are read out of the model's text.", "", _parser),
    Rule("--reasoning-parser", "done", "How thinking is told from the answer.", "", _parser),
    mapped("--model", "The model, as a flag.", "the model's place on the line", lambda value: Set("model", value)),
    mapped("--dtype", "Precision of weights, activations and KV.",
           "`auto`, `bfloat16`, `float32` (`float`); `half` and `float16` become `bfloat16`", _dtype),
    mapped("--load-format", "How weights are read.",
           "`auto`, `safetensors` and readers of it: `auto`; `dummy`: `random`; others refused", _load_format),
    mapped("--quantization", "Method of quantized weights.",
           "the folder says it: known methods have no effect; others refused", _quantization),
    mapped("--log-level", "Least severe message logged.", "`--log-level`, in lower case", _log_level),
    mapped("--structured-outputs-config", "Settings of structured output.",
           "`disable_any_whitespace`, `disable_additional_properties`: defaults for requests; `backend`: without "
           "effect; others refused", _structured),
    mapped("--guided-decoding-disable-any-whitespace", "No free spaces in JSON.",
           "`--structured-outputs-config '{\"disable_any_whitespace\": true}'`", _no_white_space),
    mapped("--tokenizer-mode", "Which tokenizer code to use.",
           "`auto`, `hf`, `slow`, `mistral`: the folder's tokenizer.json; others refused", _config_of_mistral),
    mapped("--config-format", "Which configuration file to read.",
           "`auto`, `hf`, `mistral`: config.json; others refused", _config_of_mistral),
    mapped("--runner", "What the model is run for.", "`auto`, `generate`; others refused",
           by_word(_RUNS, NO_POOLING)),
    mapped("--task", "What the model is run for.", "`auto`, `generate`; others refused",
           by_word(_RUNS, ONLY_GENERATES)),
    mapped("--model-impl", "Whose model code to run.", "one implementation: `auto`, `vllm`, `transformers`",
           by_word({word: Drop("there is one implementation") for word in ("auto", "vllm", "transformers")},
                   ONLY_GENERATES)),
    *harmless(_NO_LOG, {
        "--disable-log-requests": "Do not log requests.", "--enable-log-requests": "Log requests.",
        "--enable-log-outputs": "Log answers.", "--enable-log-deltas": "Log streamed pieces.",
        "--max-log-len": "How much of a prompt is logged.", "--uvicorn-log-level": "Log level of the web server.",
        "--disable-uvicorn-access-log": "No log of accesses.",
        "--disable-access-log-for-endpoints": "Paths left out of the log of accesses.",
        "--log-error-stack": "Log tracebacks of error answers.",
    }),
    *harmless(_SEEN_ELSEWHERE, {
        "--disable-log-stats": "No statistics in the log.",
        "--aggregate-engine-logging": "One line of statistics for all engines.",
        "--show-hidden-metrics-for-version": "Show metrics that are about to go.",
        "--collect-detailed-traces": "Modules that are traced.",
        "--kv-cache-metrics": "How long KV blocks live.", "--kv-cache-metrics-sample": "Part of blocks looked at.",
        "--custom-histogram-buckets": "Bounds of histograms.", "--cudagraph-metrics": "Metrics of CUDA graphs.",
        "--enable-layerwise-nvtx-tracing": "Marks for NVIDIA's profiler.",
        "--enable-mfu-metrics": "How well the card is used.",
        "--enable-logging-iteration-details": "A line for each step.",
        "--per-request-spec-decode-metrics": "Counts of guessed tokens in answers.",
        "--profiler-config": "Torch's or NVIDIA's profiler.", "--logging-config": "How logs are written.",
        "--log-config-file": "A file of Python's logging.", "--jit-monitor-mode": "Tell of late compilations.",
        "--jit-monitor-verbose": "Tell more of them.", "--ray-workers-use-nsight": "NVIDIA's profiler under Ray.",
    }),
    *harmless(_ALWAYS, {
        "--enable-prompt-tokens-details": "Cached tokens in usage.",
        "--enable-server-load-tracking": "The path /load.",
        "--enable-tokenizer-info-endpoint": "The path /tokenizer_info.",
        "--enable-request-id-headers": "Answers carry X-Request-Id.",
        "--enable-sleep-mode": "Instances may sleep.", "--sse-keep-alive-interval": "Comments on silent streams.",
        "--disable-fastapi-docs": "No pages of API documentation.",
        "--language-model-only": "Serve the text part only.",
    }),
    mapped("--api-server-count", "Processes of the web server.", "`--api-servers`", renamed("api_servers")),
    *harmless("front ends have no such part", {
        "--disable-frontend-multiprocessing": "The web server in the engine's process.",
        "--enable-offline-docs": "API documentation without a network.",
        "--h11-max-incomplete-event-size": "Limit of one HTTP parser.",
        "--h11-max-header-count": "Limit of one HTTP parser.",
        "--renderer-num-workers": "Threads for templates.", "--tokenizer-pool-size": "Processes for tokenizing.",
        "--tokenizer-pool-type": "Their kind.", "--enable-flash-late-interaction": "Scores of late interaction.",
        "--cohere-is-reasoning-model": "For Cohere's API.", "--cohere-format": "For Cohere's API.",
        "--anthropic-disabled-thinking-effort": "For Anthropic's API.",
        "--fingerprint-mode": "What system_fingerprint says.",
    }),
    *harmless("nothing is downloaded: models are found in the hub's cache or in a folder", {
        "--hf-token": "Key of the hub.", "--code-revision": "Revision of a model's code.",
        "--ignore-patterns": "Files that are not downloaded.",
        "--use-tqdm-on-load": "Progress while loading.",
    }),
    *harmless("safetensors are read in pieces, by one reader", {
        "--safetensors-load-strategy": "How files are read.", "--safetensors-prefetch-num-threads": "Threads for that.",
        "--safetensors-prefetch-block-size": "Bytes of one read.",
        "--model-loader-extra-config": "Settings of a loader.", "--pt-load-map-location": "Device of .pt files.",
        "--max-parallel-loading-workers": "Workers that load at a time.",
    }),
    *harmless(_ONE_BACKEND, {
        "--guided-decoding-backend": "Library for structured output.",
        "--guided-decoding-disable-fallback": "No other library where it fails.",
    }),
    *harmless("--reasoning-parser alone says it", {"--enable-reasoning": "Thinking apart from the answer."}),
    *refused("nothing from a model folder is executed: leave the flag out. What Jettison serves needs no code of the "
             "folder's; other models are refused by name", {
        "--trust-remote-code": "Run Python code from the model folder.",
    }),
    *refused("vLLM's plugins are not run: --tool-call-parser takes a file with a parser of your own (docs/using.md)", {
        "--tool-parser-plugin": "Python code that reads tool calls.",
    }),
    *refused(NO_CODE, {
        "--middleware": "Python code around requests.",
        "--reasoning-parser-plugin": "Python code that reads thinking.",
        "--logits-processors": "Python code on logits.", "--logits-processor-pattern": "Which of it requests may name.",
        "--io-processor-plugin": "Python code on inputs.", "--worker-cls": "Another worker class.",
        "--worker-extension-cls": "More methods for workers.", "--scheduler-cls": "Another scheduler class.",
        "--model-class-overrides": "Another model class.",
    }),
    *refused(f"{_EDIT_CONFIG} (rope scaling: rope_scaling there)", {
        "--hf-overrides": "Other values of config.json.", "--rope-scaling": "Another scaling of positions.",
        "--rope-theta": "Another base of positions.", "--hf-config-path": "Another config.json.",
        "--quantization-config": "Other settings of quantization.", "--disable-sliding-window": "No windows.",
        "--allow-deprecated-quantization": "Take methods that are about to go.",
    }),
    *refused(_NEEDS_TOKENIZER, {"--skip-tokenizer-init": "No tokenizer."}),
    *refused("requests say it: return_tokens_as_token_ids, stream_options.include_usage, prompt_logprobs", {
        "--return-tokens-as-token-ids": "Names of tokens as numbers, for all.",
        "--enable-force-include-usage": "Usage in every stream.",
    }),
    *refused("answers have OpenAI's form: their role is assistant, and they carry no text of yours and no times "
             "(/metrics and --timeline tell these)", {
        "--response-role": "Role of answers.", "--fingerprint-value": "Text of system_fingerprint.",
        "--enable-per-request-metrics": "Times in answers.",
    }),
    *refused("log-probabilities are of the model's own distribution, before temperature", {
        "--logprobs-mode": "Which numbers logprobs are.",
    }),
    *refused("only HTTP on one address is served: --host, --port, and a proxy before it", {
        "--uds": "A socket in the file system.", "--grpc": "gRPC instead of HTTP.", "--grpc-port": "gRPC beside HTTP.",
        "--headless": "No web server.", "--tokens-only": "Only tokens in and out.",
        "--enable-scale-out": "Paths for apart front ends.", "--tool-server": "Servers that run tools.",
    }),
    *refused("a certificate is read at the start: restart the server after it was renewed", {
        "--enable-ssl-refresh": "Read renewed certificates.",
    }),
    *refused("only tool_choice (required, or a name) binds a call to its tool's schema; strict does not", {
        "--tool-strict-level": "Least strictness of tool calls.",
    }),
    *refused(NO_LORA, {
        "--enable-lora": "Serve adapters.", "--lora-modules": "Adapters to load.", "--max-loras": "Adapters in a step.",
        "--max-lora-rank": "Their highest rank.", "--lora-dtype": "Their precision.",
        "--max-cpu-loras": "Adapters in host memory.", "--fully-sharded-loras": "Divide them over cards.",
        "--lora-target-modules": "Modules that they change.", "--default-mm-loras": "Adapters for images.",
        "--enable-tower-connector-lora": "Adapters of image encoders.",
        "--specialize-active-lora": "Kernels by their number.",
        "--enable-mixed-moe-lora-format": "Their form for experts.",
        "--enable-moe-shared-loras": "One for all experts.",
        "--max-lora-cls-labels": "Labels of classifiers.", "--enable-lora-bias": "Adapters with biases.",
        "--long-lora-scaling-factors": "Adapters for long contexts.",
        "--lora-extra-vocab-size": "Tokens that adapters add.",
        "--enable-prompt-adapter": "Tuned prompts.", "--max-prompt-adapters": "How many of them.",
        "--max-prompt-adapter-token": "Their length.",
    }),
    *refused(NO_POOLING, {
        "--convert": "Make another kind of model.", "--pooler-config": "How embeddings are made.",
        "--override-pooler-config": "How embeddings are made.",
    }),
)  # fmt: skip
