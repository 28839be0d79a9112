# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding by vLLM on a CPU, for bench_decode.py: run by the Python of an environment that has vLLM.

Reads one JSON document: `target`, `draft` (a speculative_config, or null), `tokens`, `rounds` and `batches`, the
prompts as token ids by batch size. Writes one to the file named on the command line: for each batch size the seconds
of each round, the outputs, and the verify passes and accepted drafts of one round. One engine runs all, in FLOAT.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Loads the models and runs every batch size."""
    from vllm import LLM

    llm = LLM(
        model=job["target"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,  # compiling takes minutes here
        enable_prefix_caching=False,
        max_num_seqs=max(map(int, job["batches"])),
        max_model_len=max(len(prompt) for prompts in job["batches"].values() for prompt in prompts)
        + job["tokens"]
        + 64,
        speculative_config=job["draft"],
        disable_log_stats=False,
    )
    return {batch: measure(llm, job, int(batch), prompts) for batch, prompts in job["batches"].items()}


def measure(llm: Any, job: dict[str, Any], batch: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Seconds of each round in which at most `batch` requests run at once, after one that warms up."""
    from vllm import SamplingParams

    llm.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = batch
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    seconds, before, answers = [], count(llm), []
    for _ in range(job["rounds"] + 1):
        begin = time.perf_counter()
        answers = llm.generate(inputs, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
    after = count(llm)
    per_round = {name: (after[name] - before[name]) / len(seconds) for name in after}
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    return {"seconds": seconds[1:], "outputs": outputs, **per_round}


def count(llm: Any) -> dict[str, int]:
    """vLLM's own counters of verify passes and accepted drafts."""
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        name: found.get(f"vllm:spec_decode_num_{counter}", 0)
        for name, counter in (("steps", "drafts"), ("accepted", "accepted_tokens"))
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(json.load(sys.stdin))))
