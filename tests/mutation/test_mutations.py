# SPDX-License-Identifier: Apache-2.0
"""Damaged input of every reader: facts or our own error, within 5 s and 500 MB, and never a traceback.

The seeds are fixed; `make test-full` tries 10,000 for each.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.observe.bench.run_directory import write_point, write_run
from dflash_trt.observe.diagnosis.diagnosis import SCHEMA
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.compressed_samples import write_packed
from tests.checkpoint.dialect_samples import WRITERS
from tests.checkpoint.gguf_samples import Type, write_gguf
from tests.checkpoint.samples import cache_repository, shard, write_target
from tests.engines import build
from tests.mutation.readers import READERS
from tests.observe.bench import samples
from tests.observe.bench.load.aiperf_samples import record, write_export
from tests.observe.diagnosis.samples import SHARES, sample
from tests.paths import REPOSITORY
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.measure.feature_samples import capture

SERVE = """\
backend: pytorch
tensor_parallel_size: 1
max_batch_size: 8
max_seq_len: 4096
speculative_config:
  decoding_type: DFlash
  speculative_model: {draft}
  max_draft_len: 5
kv_cache_config: {{dtype: auto, free_gpu_memory_fraction: 0.8, enable_block_reuse: false}}
"""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def write_inputs(directory: Path) -> None:
    """Fills `directory` with a file for each of `readers.READERS`."""
    draft = write_random_draft(directory / "draft", dialect="gpt_oss")
    target = write_target(directory / "target")
    write_random_draft(directory / "dflash2", dialect="qwen3", is_causal=False, dflash2=True)
    shutil.copytree(draft, directory / "sharded")
    shard(directory / "sharded")
    quantize_checkpoint(read_draft(draft), load_recipe("fp8"), directory / "quantised")
    build(draft, directory / "engine", target)
    sizes = DraftSizes(hidden=64)
    packed = write_random_draft(directory / "packed", dialect="qwen3", dflash2=True, is_causal=False, sizes=sizes)
    write_gguf(packed, directory / "draft.gguf", Type.Q8_0)
    write_packed(packed, symmetric=False)
    shutil.copy(REPOSITORY / "build_configs" / "recipes" / "nvfp4.yaml", directory / "recipe.yaml")
    draft = write_random_draft(directory / "qwen3-draft", dialect="qwen3")
    target = write_target(directory / "qwen3", model_type="qwen3", **HEADS)
    text = f"description: a test\ntarget: {target}\ndraft: {draft}\ngpus: b300x1\npurpose: latency\nmax_batch_size: 4\n"
    (directory / "deployment.yaml").write_text(text + "num_draft_tokens: 3\nkv_cache_fraction: 0.5\nrecipe: bf16\n")
    (directory / "serve.yaml").write_text(SERVE.format(draft=draft))
    (directory / "prompts.jsonl").write_text('{"prompt": "a", "id": "1"}\n{"token_ids": [1, 2, 3]}\n')
    (directory / "turns.jsonl").write_text('{"prompt": "a", "category": "x"}\n{"turns": ["b", "c"], "category": "y"}\n')
    write_export(directory / "aiperf", [record("a", 0), record("b", 0, error="Bad Request")])
    healthy: dict[str, Any] = {key: [] for key in ("speeds", "findings", "unmeasured", "checks", "notes")}
    healthy |= {"schema": SCHEMA, "url": "http://h", "runtime": "vllm", "version": "0.32.0", "model": "m"}
    healthy |= {"is_chat": True, "acceptance": "counters", "seconds": 9.5}
    healthy |= {"groups": [{"name": "short prompts", "samples": msgspec.to_builtins([sample("prime", SHARES)])}]}
    (directory / "healthy.json").write_text(json.dumps(healthy))
    acceptance = [{"position": i, "share": 0.5} for i in range(1, 8)]
    report = {"schema": "dflash-trt/verify/1", "engine": {"acceptance": acceptance}}
    (directory / "verify.json").write_text(json.dumps(report))
    request = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    request |= {"prompt": [1, 2, 3], "seed": 3, "stop": ["a"], "stop_token_ids": [5], "max_tokens": 7}
    (directory / "request.json").write_text(json.dumps(request, default=list))
    write_run(directory / "bench", samples.run("none", "dflash", concurrencies=(1, 2)))
    point = samples.point("dflash", 2, 50.0, 90.0, acceptance=samples.counters(10, (8, 5, 5)), failed=1)
    write_point(directory / "bench", point)
    write_dialects(directory / "dialects")
    (directory / "prompt.jsonl").write_text('{"token_ids": [7, 8, 9]}\n')
    capture(
        "tiny-qwen3", directory / "features.safetensors", "--prompts", directory / "prompt.jsonl", "--max-tokens", 8
    )
    cache_repository(directory / "hub", "owner/name", directory / "qwen3-draft")


def write_dialects(directory: Path) -> None:
    """A draft of each dialect, by its name, and all their configurations in one file."""
    for name, write in WRITERS.items():
        write(directory / name)
    configs = {name: json.loads((directory / name / "config.json").read_text()) for name in WRITERS}
    (directory / "configs.json").write_text(json.dumps(configs))


def mutate(count: int, directory: Path, *names: str) -> str:
    write_inputs(directory)
    process = [sys.executable, "-m", "tests.mutation", str(count), str(directory), *names]
    result = subprocess.run(process, cwd=REPOSITORY, capture_output=True, text=True, errors="replace", check=False)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-6000:]}"
    return result.stdout


def test_10_mutations(tmp_path: Path) -> None:
    assert mutate(10, tmp_path, *READERS).count(": 10 mutations, ") == len(READERS)


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_10_000_mutations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = mutate(10_000, tmp_path, name)
    with capsys.disabled():
        print(said, end="")
