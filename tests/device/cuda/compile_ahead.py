"""Compile the kernels for GPUs that are not here, and print what the assembler says of each, as JSON lines.

A program of its own (``test_compile_ahead`` runs it): in a process with Triton's interpreter nothing is compiled.
Arguments: compute capabilities (``80,90``), then ``all`` for every signature. Without it: one of each kernel, the small
ones for capability 90 only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jettison.device.cuda import attention, drawkernels, elementwise, experts, logprobkernels, products
from jettison.device.cuda.tiles import POSITIONS, SPLIT, tiles_for
from jettison.device.model.arithmetic import Activation

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
STAGED = {
    "tables", "work", "positions", "slots", "ids", "lines", "temperature", "min_p", "top_k", "top_p", "uniform",
    "tokens",
}  # fmt: skip
"""Copied once a step: nothing is known of their addresses."""

FORMS = [(True, False), (True, True), (False, False), (False, True)]
"""Of attention: whether tokens see their own chunk, and whether they have a window and a cap."""

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def pointers(dtype: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{dtype}")


def scalars(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def attention_cases(all_of_them: bool) -> list[dict[str, Any]]:
    few = [("bf16", 128, 7, 16)]
    many = [
        (dtype, head_dim, group, 8 * (2 + 6 * (group == 16)))
        for dtype in SIZES for head_dim in (64, 80, 96, 128, 256) for group in (1, 16)
    ]  # fmt: skip
    cases = []
    for dtype, head_dim, group, block_size in many if all_of_them else few:
        for rows, tile in tiles_for(head_dim, SIZES[dtype]).items():
            for causal, is_local in FORMS if all_of_them and group == 1 else FORMS[:2]:
                cases.append({
                    "kernel": attention.attend_kernel,
                    "name": f"attend {dtype} {head_dim} {group} {block_size} {'local ' * is_local}{rows}",
                    "signature": {
                        **pointers(dtype, "q arena"), **pointers("i32", "tables work"), **pointers(dtype, "out"),
                        **pointers("fp32", "lse part_sums part_scales"), **pointers("i32", "arrived"),
                        **scalars("i32", "table_stride q_stride o_stride"), **scalars("fp32", "scale inner"),
                        **scalars("i32", "window"),
                    },
                    "aligned": ["q_stride", "o_stride"],
                    "constants": {
                        "KVH": 4, "G": group, "D": head_dim, "DP": triton.next_power_of_2(head_dim), "BS": block_size,
                        "BM": rows, "BN": POSITIONS, "SPLIT": SPLIT, "CAUSAL": causal, "HAS_LSE": not causal,
                        "WINDOWED": is_local, "CAPPED": is_local, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
                    },
                    "warps": tile.warps, "stages": tile.stages, "multiplies": dtype != "fp32",
                })  # fmt: skip
    return cases


def small_cases(all_of_them: bool) -> list[dict[str, Any]]:
    cases = []
    for dtype in SIZES if all_of_them else ("bf16",):
        for width, kind in ((3584, "rms_plus_one"), (4096, "rms_once"), (5120, "rms"), (8192, "rms")):
            cases.append({
                "kernel": elementwise.norm_kernel, "name": f"norm {kind} {dtype} {width}",
                "signature": {
                    **pointers(dtype, "x residual gains out"),
                    **scalars("i32", "x_stride residual_stride out_stride width"), **scalars("fp32", "eps"),
                },
                "aligned": ["x_stride", "residual_stride", "out_stride", "width"],
                "constants": {"ADD": kind == "rms", "KIND": kind, "BLOCK": triton.next_power_of_2(width)}, "warps": 8,
            })  # fmt: skip
        for width, has_bias in ((4096, False), (12288, True)):
            cases.append({
                "kernel": elementwise.layer_norm_kernel, "name": f"layer norm {dtype} {width}",
                "signature": {
                    **pointers(dtype, "x gains biases out"), **scalars("i32", "x_stride out_stride width"),
                    **scalars("fp32", "eps"),
                },
                "aligned": ["x_stride", "out_stride", "width"],
                "constants": {"HAS_BIAS": has_bias, "BLOCK": triton.next_power_of_2(width)}, "warps": 8,
            })  # fmt: skip
        for kind in (None, "rms", "rms_plus_one"):
            cases.append({
                "kernel": elementwise.heads_kernel, "name": f"heads {dtype} {kind or 'bias'}",
                "signature": {
                    **pointers(dtype, "qkv bias arena q_gains k_gains"), **pointers("fp32", "cos sin"),
                    **pointers("i32", "positions slots"), **scalars("i32", "stride num_positions"),
                    **scalars("fp32", "eps"),
                },
                "aligned": ["stride"],
                "constants": {
                    "HQ": 28, "KVH": 4, "D": 128, "DP": 128, "R": 128, "BS": 16, "HB": 4, "HAS_BIAS": kind is None,
                    "HAS_NORM": kind is not None, "KIND": kind or "rms", "ROTATES": True, "WRITES": True,
                },
                "warps": 2,
            })  # fmt: skip
        cases += [
            {
                "kernel": elementwise.write_kv_kernel, "name": f"write_kv {dtype}", "warps": 1,
                "signature": {
                    **pointers(dtype, "k v arena"), **pointers("i32", "slots"), **scalars("i32", "k_stride v_stride"),
                },
                "constants": {"KVH": 4, "D": 128, "DP": 128, "BS": 16},
            },
            *({
                "kernel": elementwise.activation_kernel, "name": f"{kind} {dtype}", "warps": 4,
                "signature": {**pointers(dtype, "up out"), **scalars("i32", "in_stride out_stride width")},
                "aligned": ["in_stride", "out_stride", "width"],
                "constants": {"KIND": kind, "IS_GATED": kind != "gelu", "BLOCK": 1024},
            } for kind in get_args(Activation)),
            {
                "kernel": elementwise.gather_kernel, "name": f"gather {dtype}", "warps": 4,
                "signature": {
                    **pointers(dtype, "table"), **pointers("i64", "ids"), **pointers(dtype, "out"),
                    **scalars("i32", "num_rows width out_stride"),
                },
                "aligned": ["width", "out_stride"], "constants": {"BLOCK": 2048},
            },
            {
                "kernel": elementwise.argmax_parts_kernel, "name": f"argmax parts {dtype}", "warps": 4,
                "signature": {
                    **pointers(dtype, "logits"), **pointers("fp32", "best"), **pointers("i32", "at_best"),
                    **scalars("i32", "stride vocab num_parts"),
                },
                "constants": {"BLOCK": elementwise.ARGMAX_CHUNK},
            },
        ]
    return [
        *cases,
        {
            "kernel": elementwise.argmax_kernel, "name": "argmax", "warps": 1, "constants": {"BLOCK": 64},
            "signature": {
                **pointers("fp32", "best"), **pointers("i32", "at_best"), **pointers("i64", "out"),
                **scalars("i32", "num_parts"),
            },
        },
        {
            "kernel": elementwise.move_rows_kernel, "name": "move_rows", "warps": 8, "never_early": True,
            "signature": {**pointers("i64", "sources targets"), **scalars("i32", "num_rows num_words")},
            "aligned": ["num_words"], "constants": {"BLOCK": elementwise.MOVE_WORDS},
        },
    ]


def sampling_cases(all_of_them: bool) -> list[dict[str, Any]]:
    """At the size of a vocabulary of 152,064."""
    by_dtype = [
        {
            "kernel": drawkernels.weigh_kernel, "name": f"weigh {dtype}", "warps": 8, "never_early": True,
            "signature": {
                **pointers(dtype, "logits"), **pointers("i64", "lines at_best"),
                **pointers("fp64", "temperature min_p"), **pointers("i32", "bits"),
                **scalars("i32", "stride vocab size"),
            },
            "aligned": ["stride", "vocab", "size"], "constants": {"CHUNK": drawkernels.CHUNK},
        }
        for dtype in SIZES
    ] + [
        {
            "kernel": logprobkernels.part_kernel, "name": f"log-probabilities' parts {dtype}", "warps": 8,
            "never_early": True,
            "signature": {
                **pointers(dtype, "logits"), **pointers("i64", "lines tokens"), **pointers("fp64", "largest sums"),
                **pointers("i32", "above"), **pointers("i64", "keys"), **pointers("fp64", "own"),
                **scalars("i32", "stride vocab num_parts num_top"),
            },
            "aligned": ["stride", "vocab"],
            "constants": {"CHUNK": logprobkernels.CHUNK, "MOST": logprobkernels.MOST_TOP},
        }
        for dtype in (SIZES if all_of_them else ("fp32",))
    ]  # fmt: skip
    return [
        *by_dtype,
        {
            "kernel": drawkernels.draw_kernel, "name": "draw", "warps": drawkernels.DRAW_WARPS, "never_early": True,
            "signature": {
                **pointers("i32", "bits"), **pointers("i64", "top_k"), **pointers("fp64", "top_p uniform"),
                **pointers("i64", "slots tokens"), **scalars("i32", "size"),
            },
            "aligned": ["size"], "constants": {"BLOCK": drawkernels.BLOCK},
        },
        {
            "kernel": logprobkernels.describe_kernel, "name": "log-probabilities", "warps": 4, "never_early": True,
            "signature": {
                **pointers("fp64", "largest sums"), **pointers("i32", "above"), **pointers("i64", "keys"),
                **pointers("fp64", "own"), **pointers("i64", "rank"), **pointers("fp64", "base"),
                **pointers("i64", "top_ids"), **pointers("fp64", "top"), **scalars("i32", "num_parts num_top"),
            },
            "constants": {"MOST": logprobkernels.MOST_TOP, "PARTS": 64, "KEYS": 1024},
        },
    ]  # fmt: skip


def expert_cases(all_of_them: bool) -> list[dict[str, Any]]:
    """Products of experts: 128 of them, and gpt-oss's 32 with biases."""
    cases = []
    for dtype in SIZES if all_of_them else ("bf16",):
        for rows in (experts.FEW_ROWS, experts.MANY_ROWS):
            for number in (128, 32) if all_of_them else (128,):
                cases.append({
                    "kernel": experts.product_kernel, "name": f"experts {dtype} {number} {rows}", "warps": 4,
                    "stages": 2 if dtype == "fp32" else 3, "never_early": True, "multiplies": dtype != "fp32",
                    "signature": {
                        **pointers(dtype, "x"), **pointers("i64", "row_of"), **pointers(dtype, "weight bias out"),
                        **pointers("i32", "starts"), **scalars("i32", "num_rows n k per_row"),
                    },
                    "aligned": ["n", "k"],
                    "constants": {
                        "NUMBER": number, "EP": number, "HAS_BIAS": number == 32, "BM": rows, "BN": experts.COLUMNS,
                        "BK": experts.DEPTH, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
                    },
                })  # fmt: skip
        cases.append({
            "kernel": experts.sum_kernel, "name": f"sum of experts {dtype}", "warps": 4, "never_early": True,
            "signature": {
                **pointers(dtype, "each"), **pointers("i64", "places"), **pointers("fp32", "shares"),
                **pointers(dtype, "out"), **scalars("i32", "width"),
            },
            "aligned": ["width"], "constants": {"CHOSEN": 8, "BLOCK": experts.SUM_BLOCK},
        })  # fmt: skip
    return cases


def product_cases(all_of_them: bool) -> list[dict[str, Any]]:
    """Products in one order: of each number of columns, and into wider sums."""
    return [
        {
            "kernel": products.product_kernel, "name": f"product {dtype} {columns} {products.ROWS}", "warps": 4,
            "stages": 2 if dtype == "fp32" else 4, "multiplies": dtype != "fp32",
            "signature": {
                **pointers(dtype, "x weight"), **pointers("fp32" if columns == 32 else dtype, "out"),
                **scalars("i32", "num_rows n k x_stride out_stride"),
            },
            "aligned": ["n", "k", "x_stride", "out_stride"],
            "constants": {
                "BM": products.ROWS, "BN": columns, "BK": 32 if dtype == "fp32" else 64,
                "PRECISION": "ieee" if dtype == "fp32" else "tf32",
            },
        }
        for dtype in (SIZES if all_of_them else ("bf16",))
        for columns in sorted({products.columns_of(n) for n in (1, 4096, 16384)})
    ]  # fmt: skip


def compiled(case: dict[str, Any], capability: int) -> dict[str, Any]:
    constants = dict(case["constants"])
    options = {"num_warps": case["warps"], "num_stages": case.get("stages", 3)}
    if "never_early" not in case:
        constants["PDL"] = capability >= 90
        options["launch_pdl"] = capability >= 90
    aligned = case.get("aligned", ())
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(case["signature"].items())
        if (kind.startswith("*") and name not in STAGED) or name in aligned
    }
    signature = {**case["signature"], **dict.fromkeys(constants, "constexpr")}
    kernel = triton.compile(
        ASTSource(case["kernel"], signature, constants, attributes), GPUTarget("cuda", capability, 32), options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [BINARIES / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    multiplies = [name for name in ("mma.sync", "wgmma.mma", "tcgen05.mma") if name in kernel.asm["ptx"]]
    return {
        "name": case["name"], "capability": capability, "registers": int(found[1]), "stack_bytes": int(found[2]),
        "shared_bytes": kernel.metadata.shared, "warps": case["warps"], "multiplies_by": multiplies,
        "waits": "griddepcontrol.wait" in kernel.asm["ptx"], "may_wait": constants.get("PDL", False),
        "should_multiply": case.get("multiplies", False), "is_float32": "fp32" in case["name"],
        "num_wide": kernel.asm["ptx"].count(".v4.b32"),
    }  # fmt: skip


def main() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    capabilities = [int(word) for word in sys.argv[1].split(",")]
    all_of_them = "all" in sys.argv[2:]
    for_each = attention_cases(all_of_them) + sampling_cases(all_of_them) + expert_cases(all_of_them)
    for_each += product_cases(all_of_them)
    for case in [*for_each, *small_cases(all_of_them)]:
        for capability in capabilities if all_of_them or case in for_each else [90]:
            print(json.dumps(compiled(case, capability)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
