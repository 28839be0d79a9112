# SPDX-License-Identifier: Apache-2.0
"""What it costs that the attention of sm_90a rounds queries to E4M3 where they meet an FP8 cache's keys.

    dflash-trt capture DRAFT --target TARGET --prompts prompts.jsonl --max-tokens 128 -o features.safetensors
    dflash-trt build DRAFT --target TARGET --recipe bf16+fp8-kv -o engine
    python benchmarks/bench_rounded_queries.py engine features.safetensors

Walks the captured answers twice, as `verify --features` does: with the engine as it is, and with the node's function
for ONNX Runtime changed in that one thing. A kv head's queries of a request are multiplied by the power of two that
makes their largest element 128 to 256, and rounded. Prints tau of both and its loss; then, without an engine, how far
the outputs of random rows are moved, beside what the cache's own rounding does. Asserts nothing, needs no GPU.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.drafter.onnxruntime import lowering as cpu_attention
from dflash_trt.runtime.drafter.onnxruntime import ort_session
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.measure.features import FeatureFile, open_features
from dflash_trt.runtime.measure.replay import BATCH_SIZE, Replayed, replay
from dflash_trt.runtime.measure.statistics import mean_tau, tau_loss
from tests.plugins.cases import BF16, FP8, GPT_OSS, QWEN3_8B, Case
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw

# Heads of twice the size: the first half of a query meets the context's keys, the second the block's.
ROUNDED = """
    group = Div (N, G)
    group_1 = Unsqueeze (group, zero)
    groups_shape = Concat <axis: int = 0> (B_1, S_1, G_1, group_1, D_1)
    q_groups = Reshape (q_rotated, groups_shape)
    q_sizes = Abs (q_groups)
    size_axes = Constant <value_ints: ints = [1, 3, 4]> ()
    largest = ReduceMax <keepdims: int = 1> (q_sizes, size_axes)
    smallest = Constant <value_float: float = 1.0e-30> ()
    positive = Max (largest, smallest)
    logarithm = Log (positive)
    log_2 = Constant <value_float: float = 0.69314718> ()
    exponent = Div (logarithm, log_2)
    whole_exponent = Floor (exponent)
    seven = Constant <value_float: float = 7.0> ()
    shift = Sub (seven, whole_exponent)
    two_float = Constant <value_float: float = 2.0> ()
    factor = Pow (two_float, shift)
    q_scaled = Mul (q_groups, factor)
    q_e4m3 = Cast <to: int = 17, saturate: int = 1> (q_scaled)
    q_widened = Cast <to: int = 1> (q_e4m3)
    q_rounded = Div (q_widened, factor)
    q_twice = Concat <axis: int = -1> (q_rounded, q_groups)
    q_twice_shape = Concat <axis: int = 0> (B_1, S_1, last)
    q_both = Reshape (q_twice, q_twice_shape)
    heads_of_keys = Concat <axis: int = 0> (B_1, last, G_1, D_1)
    context_heads = Reshape (context_k, heads_of_keys)
    block_heads = Reshape (block_k, heads_of_keys)
    no_context = Sub (context_heads, context_heads)
    no_block = Sub (block_heads, block_heads)
    context_twice = Concat <axis: int = -1> (context_heads, no_context)
    block_twice = Concat <axis: int = -1> (no_block, block_heads)
    keys_twice = Concat <axis: int = 1> (context_twice, block_twice)
    GDD_1 = Add (GD_1, GD_1)
    keys_twice_shape = Concat <axis: int = 0> (B_1, last, GDD_1)
    k_both = Reshape (keys_twice, keys_twice_shape)
"""


# The key that a sink is has heads of twice the size, too.
NO_KEY = """
    no_key_k_shape = Concat <axis: int = 0> (B_1, one_1, GDD_1)
    no_key_k = ConstantOfShape (no_key_k_shape)
    keys = Concat <axis: int = 1> (k_both, no_key_k)"""


def with_rounded_queries(softmax: str) -> str:
    """The last lines of the node's function."""
    keys = "\n    keys = Concat <axis: int = 1> (all_k, no_key)"
    changed = softmax.replace(keys, NO_KEY).replace("q_rows", "q_both").replace("all_k", "k_both")
    if not {"q_both", "k_both"} <= set(re.findall(r"\w+", changed)):
        raise click.ClickException(
            f"runtime/drafter/onnxruntime/lowering.py: expected attention of q_rows to all_k, found {softmax}"
        )
    return ROUNDED + changed


def walk(engine: Path, features: FeatureFile) -> list[Replayed]:
    return replay(features, open_drafter(engine, read_manifest(engine), num_slots=BATCH_SIZE))


def tau_row(engine: Path, features: Path) -> list[str]:
    """What an engine's tau is with queries as they are and rounded, and its loss with the 95 % interval."""
    functions = {name: with_rounded_queries(getattr(cpu_attention, name)) for name in ("SOFTMAX", "SOFTMAX_WITH_SINKS")}
    # The node as that function, which can be changed, in the place of the compiled operator.
    as_function = patch.object(ort_session, "lower_to_cpu", lambda *graph, **_: lower_to_cpu(*graph))
    with open_features(features, read_manifest(engine).draft) as file, as_function:
        plain = walk(engine, file)
        with patch.dict(vars(cpu_attention), functions):
            rounded = walk(engine, file)
    pairs = [(a.tau, b.tau) for a, b in zip(plain, rounded, strict=True) if a.tau is not None and b.tau is not None]
    taus, rounded_taus = ([pair[i] for pair in pairs] for i in range(2))
    before, after, loss = mean_tau(taus), mean_tau(rounded_taus), tau_loss(rounded_taus, taus)
    if before is None or after is None or loss is None or loss.low is None or loss.high is None:
        raise click.ClickException(f"{features}: expected at least two prompts, found {len(pairs)}")
    interval = f"{loss.loss:.2%} ({loss.low:.2%} to {loss.high:.2%})"
    return [engine.name, str(len(pairs)), f"{before.mean:.3f}", f"{after.mean:.3f}", interval]


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def error_row(case: Case) -> list[str]:
    """Error of the outputs for random rows, as a root mean square in percent of the outputs', by what is rounded."""
    tensors = draw(case)
    unrounded = replace(case, cache_dtype=BF16, k_scale=1.0, v_scale=1.0)
    exact = expect(unrounded, draw(unrounded)).output
    cached = expect(case, tensors).output
    both = expect(case, tensors, rounded_queries=True).output
    shares = (100 * rms(moved) / rms(exact) for moved in (cached - exact, both - cached, both - exact))
    return [case.name, f"{case.norm}", *(f"{share:.2f}" for share in shares)]


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.argument("features", type=click.Path(path_type=Path), required=False)
def main(engine: Path | None, features: Path | None) -> None:
    """Replay FEATURES on ENGINE with queries as they are, and rounded; then compare the outputs of random rows."""
    if engine is not None and features is not None:
        columns = ["engine", "prompts", "tau", "rounded queries", "loss"]
        print_table("Acceptance", columns, [tau_row(engine, features)])
    cases = [
        replace(drafter, context_lengths=(2048,), cache_dtype=FP8, k_scale=0.02, v_scale=0.03, norm=norm)
        for drafter in (GPT_OSS, QWEN3_8B)
        for norm in (0.5, 1.0, 2.0, 4.0)
    ]
    columns = ["drafter", "norm", "FP8 cache", "rounded queries", "both"]
    print_table("Errors of outputs, % of their root mean square", columns, map(error_row, cases))


if __name__ == "__main__":
    main()
