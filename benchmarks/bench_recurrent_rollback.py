# SPDX-License-Identifier: Apache-2.0
"""Measures what rejected drafts cost a hybrid target on this machine's CPU: the replay of recurrent state after a
verify step.

A random model with Qwen3.5's layers (three gated delta nets, one of full attention), every block verified and then
rolled back to the number of tokens in the row. `packed` replays what was kept on the older state, for all requests at
once; `sequential` copies transformers' cache before each block and runs the whole model again over what was kept.
Numbers are the fastest of several rounds, as the machine may be shared. Prints a table, asserts nothing.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.utils import logging

from dflash_trt.cli.output import print_table
from dflash_trt.files.processor import cpu_model
from dflash_trt.runtime.targets.packed_target import PackedTarget
from dflash_trt.runtime.targets.sequential_target import SequentialTarget
from dflash_trt.runtime.targets.target import Segment

PROMPT_TOKENS = 64
VOCAB_SIZE = 1000


def random_hybrid(hidden: int, layers: int) -> PreTrainedModel:
    """Qwen3.5's proportions: heads of 128 in delta nets, two value heads per key head; MLP three times as wide."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 256,
        num_key_value_heads=max(1, hidden // 1024),
        linear_num_key_heads=hidden // 256,
        linear_num_value_heads=hidden // 128,
    )
    return Qwen3_5ForCausalLM(config).eval()


def measure(target: PackedTarget | SequentialTarget, requests: int, block: int, kept: int, rounds: int) -> list[float]:
    """Fastest milliseconds of a verify pass over `block` tokens of each request, and of the way back to `kept`."""
    passes, ways_back = [], []
    for slot in range(requests):
        target.verify([Segment(slot=slot, token_ids=list(range(PROMPT_TOKENS)), num_logits=1)], with_taps=False)
        target.rollback(slot, 0)
    segments = [Segment(slot=slot, token_ids=list(range(block)), num_logits=block) for slot in range(requests)]

    def roll_back() -> None:
        for slot in range(requests):
            target.rollback(slot, block - kept)
        if isinstance(target, PackedTarget):
            with torch.inference_mode():
                target._delta_nets.apply_rollbacks()

    for _ in range(rounds + 1):
        passes.append(timed(lambda: target.verify(segments, with_taps=False)))
        ways_back.append(timed(roll_back))
    for slot in range(requests):
        target.release(slot)
    return [1000 * min(times[1:]) for times in (passes, ways_back)]


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@click.command()
@click.option("--hidden", default=1024, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--block", default=16, show_default=True, help="Tokens that a pass verifies of each request.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(hidden: int, layers: int, block: int, rounds: int, threads: int) -> None:
    """Measure verify passes and roll back of a hybrid target, packed and one request after the other."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    sequential = SequentialTarget(random_hybrid(hidden, layers), (), num_slots=4)
    packed = PackedTarget(random_hybrid(hidden, layers), (), num_slots=4)
    click.echo(f"{cpu_model()}, {threads} of {len(os.sched_getaffinity(0))} threads")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    click.echo(f"Python {platform.python_version()}, {versions}")
    size = packed.model.num_parameters() / 1e6
    click.echo(f"{layers} layers of {hidden}, {size:.0f} M parameters, FLOAT, blocks of {block}, {rounds} rounds")
    click.echo(f"recurrent state and its copy: {packed.cache_bytes_per_slot / 2**20:.1f} MiB a request\n")
    rows = []
    for requests in (1, 4):
        for kept in (1, block // 4, block - 1, block):
            ours = measure(packed, requests, block, kept, rounds)
            theirs = measure(sequential, requests, block, kept, rounds)
            numbers = [*(f"{ms:.1f}" for ms in ours), f"{ours[1] / ours[0]:.0%}"]
            numbers += [*(f"{ms:.1f}" for ms in theirs), f"{theirs[1] / theirs[0]:.0%}"]
            rows.append([f"{requests}", f"{kept}", *numbers])
    columns = ["requests", "kept", "packed, ms", "back, ms", "of it", "sequential, ms", "back, ms", "of it"]
    print_table(
        f"A verify pass over {block} tokens of each request, and the way back to those that are kept", columns, rows
    )


if __name__ == "__main__":
    main()
