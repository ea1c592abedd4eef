"""Commands of the kinds that model cards and guides print, pasted: what becomes of each."""

from __future__ import annotations

import shlex

from jettison.config import KEYS
from jettison.config.vllm.translate import Translation, translate_line

LINES = (
    ("A reasoning model, distilled",
     "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --max-model-len 32768 --enforce-eager"),
    ("The same on two cards", "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-32B --tensor-parallel-size 2 "
     "--max-model-len 32768 --enforce-eager"),
    ("Qwen3 with thinking apart", "vllm serve Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1"),
    ("Qwen3 with tools", "vllm serve Qwen/Qwen3-4B --enable-auto-tool-choice --tool-call-parser hermes "
     "--max-model-len 16K --served-model-name qwen3 gpt-4o"),
    ("A longer context by YaRN", "vllm serve Qwen/Qwen3-8B --rope-scaling "
     "'{\"rope_type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}' --max-model-len 131072"),
    ("Llama 3.1 with tools", "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice "
     "--tool-call-parser llama3_json --chat-template examples/tool_chat_template_llama3.1_json.jinja"),
    ("Mistral's own format", "vllm serve mistralai/Mistral-Small-24B-Instruct-2501 --tokenizer_mode mistral "
     "--config_format mistral --load_format mistral --tool-call-parser mistral --enable-auto-tool-choice"),
    ("gpt-oss", "vllm serve openai/gpt-oss-20b --async-scheduling --max-num-batched-tokens 8k -O3"),
    ("Gemma with images",
     "vllm serve google/gemma-3-4b-it --limit-mm-per-prompt '{\"image\": 4}' --max-model-len 8192"),
    ("Gemma without", "vllm serve google/gemma-3-4b-it --limit-mm-per-prompt.image 0 --dtype bfloat16"),
    ("AWQ", "vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ --quantization awq_marlin --dtype half "
     "--gpu-memory-utilization 0.85 --max-num-seqs 64"),
    ("bitsandbytes", "vllm serve unsloth/Llama-3.2-3B-Instruct-bnb-4bit --quantization bitsandbytes "
     "--load-format bitsandbytes"),
    ("Adapters", "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora "
     "--lora-modules sql=yard1/llama-2-7b-sql-lora-test --max-lora-rank 64"),
    ("KV in LMCache", "vllm serve Qwen/Qwen3-8B --max-model-len 16384 --kv-transfer-config "
     "'{\"kv_connector\":\"LMCacheConnectorV1\",\"kv_role\":\"kv_both\"}'"),
    ("Guessing ahead", "vllm serve meta-llama/Llama-3.1-8B-Instruct --seed 42 -tp 1 --speculative-config "
     "'{\"model\":\"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\",\"num_speculative_tokens\":3,\"method\":\"eagle3\"}'"),
    ("Copies", "vllm serve Qwen/Qwen3-30B-A3B-FP8 --data-parallel-size 4 --enable-expert-parallel "
     "--enable-eplb --disable-log-requests"),
    ("Docker", "docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:latest --model Qwen/Qwen3-0.6B "
     "--host 0.0.0.0 --swap-space 4"),
    ("The old module", "python -m vllm.entrypoints.openai.api_server --model mistralai/Mistral-7B-Instruct-v0.3 "
     "--dtype auto --api-key token-abc123 --tensor-parallel-size=1 --max-model-len 4k"),
    ("Code of the folder's", "vllm serve microsoft/Phi-4-mini-instruct --trust-remote-code --kv-cache-dtype fp8 "
     "--tensor-parallel-size 2"),
    ("An embedding model", "vllm serve Qwen/Qwen3-Embedding-0.6B --task embed --pooler-config "
     "'{\"pooling_type\":\"LAST\"}'"),
    ("For production", "vllm serve Qwen/Qwen3-8B --port 8080 --no-enable-log-requests --uvicorn-log-level warning "
     "--enable-prefix-caching --enable-chunked-prefill --shutdown-timeout 60 --generation-config vllm "
     "--root-path /llm"),
)  # fmt: skip
"""(what it shows, the command), written by hand in the forms that cards and guides use."""


def words_of(line: str) -> list[str]:
    """What goes behind ``jettison serve``: what stands behind ``vllm serve``, the module or the image."""
    words = shlex.split(line)
    starts = ("serve", "vllm.entrypoints.openai.api_server")
    at = next(i for i, word in enumerate(words) if word in starts or word.startswith("vllm/vllm-openai"))
    return words[at + 1 :]


def own_options() -> dict[str, bool]:
    """Options of ``jettison serve``, each with whether it takes a value."""
    options = {"--config": True, "--help": False, "-h": False}
    for key in KEYS.values():
        if key.name != "model":
            options[key.flag] = not key.is_bool
            if key.is_bool:
                options[f"--no-{key.flag.removeprefix('--')}"] = False
    return options


def pasted(line: str) -> Translation:
    """What becomes of a command."""
    return translate_line(words_of(line), own_options())
