"""Writes tests/device/quantized_folders: tiny folders whose weights other libraries have quantized, and digests of what
those libraries make of them when they dequantize.

``python tests/device/quantized_goldens.py --write`` needs torch, transformers, compressed-tensors and GPTQModel (whose
command line says what else it wants; without dependencies, on Python's path, is enough). The tests need none of them.

A folder's ``config.json`` is a tiny Llama's with the library's own ``quantization_config``. ``digests.json`` has, for
each folder and each quantized matrix, the digest of its values in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from jettison.device.model.identity import digest_of

FOLDERS = Path(__file__).parent / "quantized_folders"
DIGESTS = FOLDERS / "digests.json"

HIDDEN, INNER, VOCAB, GROUP = 32, 64, 32, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCAB,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = "model.layers.0."
MODULES = {
    **{f"{LAYER}self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    f"{LAYER}mlp.gate_proj": (INNER, HIDDEN), f"{LAYER}mlp.up_proj": (INNER, HIDDEN),
    f"{LAYER}mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip

INTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
COMPRESSED = {
    "ct-int4": ("pack-quantized", INTS, None),
    "ct-int4-zeros": ("pack-quantized", {**INTS, "symmetric": False}, None),
    "ct-int3": ("pack-quantized", {**INTS, "num_bits": 3}, None),
    "ct-int8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "ct-w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"},
                {"num_bits": 8, "strategy": "token", "dynamic": True}),
    "ct-int8-zeros": ("naive-quantized", {**INTS, "num_bits": 8, "symmetric": False}, None),
    "ct-fp8-channel": ("float-quantized", {**FLOATS, "strategy": "channel"}, DYNAMIC),
    "ct-fp8-tensor": ("float-quantized", {**FLOATS, "strategy": "tensor"}, {**FLOATS, "strategy": "tensor"}),
    "ct-fp8-block": ("float-quantized", {**FLOATS, "strategy": "block", "block_structure": [16, 16]}, DYNAMIC),
}  # fmt: skip
"""Format, weights, input activations."""

GPTQ = {
    "gptq-4": {"bits": 4, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq-4-ordered": {"bits": 4, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq-3": {"bits": 3, "sym": True, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq-8": {"bits": 8, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq-2": {"bits": 2, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
}


def plain_weights(seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = MODULES | {"model.embed_tokens": (VOCAB, HIDDEN)}
    weights = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    norms = ("model.norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm")
    return weights | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


class Writer:
    """Writes folders, and gathers digests."""

    def __init__(self) -> None:
        self.digests: dict[str, dict[str, list[str]]] = {}

    def write(self, name: str, quantization: dict, stored: dict, widened: dict[str, tuple]) -> None:
        """``stored``: the quantized matrices' tensors. ``widened``: each in float32 and bfloat16 by the library."""
        folder = FOLDERS / name
        folder.mkdir(parents=True, exist_ok=True)
        config = CONFIG | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
        plain = {name: weight.bfloat16() for name, weight in plain_weights(len(self.digests)).items()}
        plain = {name: weight for name, weight in plain.items() if name.removesuffix(".weight") not in MODULES}
        save_file({key: value.contiguous() for key, value in (plain | stored).items()}, folder / "model.safetensors")
        self.digests[name] = {key: [digest_of(each.contiguous()) for each in both] for key, both in widened.items()}

    def close(self) -> None:
        DIGESTS.write_text(json.dumps(self.digests, indent=1) + "\n")


def both_dtypes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.float(), weight.bfloat16()


def write_compressed(writer: Writer) -> None:
    """By compressed-tensors' own compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    for name, (form, weights, inputs) in COMPRESSED.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored, widened = {}, {}
        for module in MODULES:
            weight = plain_weights(len(writer.digests))[f"{module}.weight"].bfloat16()
            low, high = bounds(weight, scheme.weights)
            scale, zero = calculate_qparams(low, high, scheme.weights)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            small = compressor.compress(state, scheme)
            if inputs is not None and not inputs.get("dynamic"):
                small["input_scale"] = torch.ones(1)
            stored |= {f"{module}.{key}": value for key, value in small.items()}
            in_single = small | {"weight_scale": small["weight_scale"].float()}  # as transformers loads it in float32
            both = (compressor.decompress(each, scheme)["weight"] for each in (in_single, small))
            widened[f"{module}.weight"] = tuple(both)
        config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"])
        writer.write(name, config.model_dump(mode="json"), stored, widened)


def bounds(weight: torch.Tensor, args) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest weight that share a scale, in its shape."""
    columns = weight.shape[1]
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    block = {"channel": (1, columns), "group": (1, GROUP), "block": (16, 16)}[args.strategy]
    blocks = weight.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def quantized_by_group(weight: torch.Tensor, bits: int, is_symmetric: bool, group: torch.Tensor):
    """Scales and zeros [rows, groups] as GPTQ's quantizer makes them."""
    most, num_groups = (1 << bits) - 1, int(group.max()) + 1
    parts = [weight[:, group == i] for i in range(num_groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if is_symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / most).half()
    zeros = torch.full_like(scales, (most + 1) / 2) if is_symmetric else (-low / scales).round()
    return scales, zeros.clamp(0, most).float()


def write_gptq(writer: Writer) -> None:
    """By GPTQModel's linear layer."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for name, config in GPTQ.items():
        stored, widened = {}, {}
        for i, (module, (rows, columns)) in enumerate(MODULES.items()):
            weight = plain_weights(len(writer.digests))[f"{module}.weight"]
            group = torch.arange(columns, dtype=torch.int32) // GROUP
            if config["desc_act"]:
                group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(i))]
            scales, zeros = quantized_by_group(weight, config["bits"], config["sym"], group)
            linear = torch.nn.Linear(columns, rows, bias=False)
            linear.weight.data = weight
            options = {key: config[key] for key in ("bits", "sym", "desc_act")}
            layer = TorchLinear(**options, group_size=GROUP, in_features=columns, out_features=rows)
            layer.pack(linear, scales, zeros, group)
            weight = layer.dequantize_weight().t()
            assert weight.dtype == torch.float16
            widened[f"{module}.weight"] = both_dtypes(weight)
            if config["checkpoint_format"] == "gptq":
                convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=config["bits"]))
            stored |= {f"{module}.{key}": value for key, value in layer.state_dict().items()}
        quantization = {"quant_method": "gptq", "group_size": GROUP, **config, "pack_dtype": "int32", "lm_head": False}
        writer.write(name, quantization, stored, widened)


def write_awq(writer: Writer) -> None:
    """By GPTQModel's layer for AutoAWQ's GEMM."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    for name, is_symmetric in (("awq", False), ("awq-symmetric", True)):
        stored, widened = {}, {}
        for module, (rows, columns) in MODULES.items():
            weight = plain_weights(len(writer.digests))[f"{module}.weight"]
            scales, zeros = quantized_by_group(weight, 4, is_symmetric, torch.arange(columns) // GROUP)
            linear = torch.nn.Linear(columns, rows, bias=False)
            linear.weight.data = weight
            options = {"bits": 4, "group_size": GROUP, "sym": is_symmetric, "desc_act": False}
            layer = AwqTorchLinear(**options, in_features=columns, out_features=rows, register_buffers=True)
            layer.pack(linear, scales, zeros)
            one = torch.ones(1, columns, dtype=torch.float16)
            widened[f"{module}.weight"] = both_dtypes(layer._dequantize_weight_for_inference(one, dtype=one.dtype).t())
            stored |= {f"{module}.{key}": value for key, value in layer.state_dict().items()}
        quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": not is_symmetric,
                        "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
        writer.write(name, quantization, stored, widened)


def write_fp8(writer: Writer) -> None:
    """As DeepSeek stores it; widened by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    dequantize, stored, widened = Fp8Dequantize(None)._dequantize_one, {}, {}
    for module in MODULES:
        weight = plain_weights(len(writer.digests))[f"{module}.weight"]
        blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / 448
        small = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        stored |= {f"{module}.weight": small, f"{module}.weight_scale_inv": scales}
        both = (dequantize(small, scales, dtype) for dtype in (torch.float32, torch.bfloat16))
        widened[f"{module}.weight"] = tuple(both)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    writer.write("fp8-block", quantization, stored, widened)


def write_mxfp4(writer: Writer) -> None:
    """Two experts' matrix, as gpt-oss stores it; widened by transformers, and turned back."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, name = torch.Generator().manual_seed(1), "experts.down_proj"
    blocks = torch.randint(256, (2, 8, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 250, (2, 8, 3), dtype=torch.uint8, generator=generator)
    folder = FOLDERS / "mxfp4"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, folder / "model.safetensors")
    both = (convert_moe_packed_tensors(blocks, scales, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    writer.digests["mxfp4"] = {name: [digest_of(each.transpose(1, 2).contiguous()) for each in both]}


def main() -> None:
    """Write everything anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args()
    writer = Writer()
    for write in (write_compressed, write_gptq, write_awq, write_fp8, write_mxfp4):
        write(writer)
    writer.close()


if __name__ == "__main__":
    main()
