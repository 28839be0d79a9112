# SPDX-License-Identifier: Apache-2.0
"""Started on every rank by torch.distributed.run: prints how far a sharded target is from the same one whole."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.sharding import sharding
from tests.runtime.targets.families import NUM_SLOTS, TAPS, computed, random_history, relative_error
from tests.runtime.targets.family_checkpoints import SIZES


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    spec = read_target(directory).spec
    turns = random_history(seed=3, num_turns=6, vocab_size=SIZES.vocab_size)
    whole = computed(make_target(load_model(directory, spec, TAPS), TAPS, NUM_SLOTS, accelerate), turns)
    model = load_model(directory, spec, TAPS, distributed_config=sharding(directory, dist.get_world_size()))
    error = relative_error(computed(make_target(model, TAPS, NUM_SLOTS, accelerate), turns), whole)
    if dist.get_rank() == 0:
        print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
