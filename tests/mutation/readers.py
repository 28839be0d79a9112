# SPDX-License-Identifier: Apache-2.0
"""The readers of what comes from outside: what each reads, how that is damaged, and the command that reads it."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from huggingface_hub import constants

from dflash_trt.api.chat_template import prompt_token_ids
from dflash_trt.api.prompts import read_prompts
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.cli import cli
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.files.json_file import json_object
from dflash_trt.observe.bench.load.aiperf_export import read_records
from dflash_trt.observe.bench.prompts.prompt_list import read_prompt_list
from dflash_trt.observe.bench.run_directory import read_points, read_run
from dflash_trt.observe.diagnosis.diagnosis import read_baseline
from dflash_trt.observe.diagnosis.judge_acceptance import low_acceptance
from dflash_trt.observe.estimate.acceptance_profile import read_acceptance
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.measure.features import METADATA_KEY, open_features
from tests.mutation.mutations import NASTY, Mutation, mutate_bytes, mutate_document, mutate_header, mutate_lines
from tests.observe.diagnosis.samples import group
from tests.paths import FIXTURES

GGUF_HEADER = 5500
"""Bytes of the GGUF file that hold its header, about."""


@dataclass(frozen=True)
class Reader:
    """`read(directory, rng)` reads the file `file` of a directory that `inputs.write_inputs` has made."""

    file: str
    mutate: Mutation
    read: Callable[[Path, Random], object]


def command(*arguments: object) -> None:
    """`dflash-trt`, in this process; errors come out as they are."""
    cli.main([str(argument) for argument in arguments], prog_name="dflash-trt", standalone_mode=False)


def inspect(kind: str, *options: str) -> Callable[[Path, Random], object]:
    def read(directory: Path, rng: Random) -> None:
        target = [] if kind == "target" else ["--target", directory / "target"]
        command("inspect", directory / kind, *rng.choice(([], target)), *rng.choice(([], ["--json"])))

    return read


def mutate_dialect(content: bytes, rng: Random) -> bytes:
    """The name of a dialect, and its config.json, damaged."""
    configs = json.loads(content)
    name = rng.choice(sorted(configs))
    return name.encode() + b"\n" + mutate_document(json.dumps(configs[name]).encode(), rng)


def inspect_dialects(directory: Path, rng: Random) -> None:
    """A draft of the dialect that `mutate_dialect` has chosen, or of each; what is read is spelled in another, too."""
    content = (directory / "dialects" / "configs.json").read_bytes()
    if content.startswith(b"{"):  # undamaged: some cannot be spelled otherwise, and that is refused
        chosen = {name: json.dumps(config).encode() for name, config in json.loads(content).items()}
    else:
        name, _, config = content.partition(b"\n")
        chosen = {name.decode(): config}
    for dialect, config in chosen.items():
        draft = directory / "dialects" / dialect
        (draft / "config.json").write_bytes(config)
        command("inspect", draft, *rng.choice(([], ["--json"])))
        with contextlib.suppress(CheckpointError):
            LAYOUTS[rng.choice(sorted(LAYOUTS))].to_config(read_draft(draft).spec, "bfloat16")


def read_deployment(directory: Path, rng: Random) -> None:
    file, runtime = directory / "deployment.yaml", rng.choice(("trtllm", "vllm", "sglang"))
    command(*rng.choice((("serve-config", file, "--runtime", runtime), ("build", file, "--dry-run"))))


def ask(directory: Path, rng: Random) -> None:
    """A request: its settings, and its prompt as a text or as token ids of any kind."""
    given: dict[str, Any] = json_object((directory / "request.json").read_bytes(), "request", RequestError)
    prompt = given.pop("prompt", None)
    if rng.random() < 0.4:
        prompt = rng.choice([*NASTY, b"abc", [b"a"], {1}, (0.5,), [True]])
    if rng.random() < 0.3:
        given[rng.choice(list(SamplingParams.__struct_fields__))] = rng.choice([*NASTY, b"a", {1}, object()])
    known = {name: value for name, value in given.items() if name in SamplingParams.__struct_fields__}
    params = SamplingParams(**known)
    params.sampler()
    draft, target = read_draft(directory / "draft").spec, read_target(directory / "target").spec
    check_prompt(prompt_token_ids(prompt), params.max_tokens, draft, target)


def read_diagnosis(directory: Path, rng: Random) -> None:
    baseline = read_baseline(directory / "healthy.json")
    for short in (each for each in baseline.groups if each.samples):
        low_acceptance("vllm", group("short prompts", 0.5), short, None)
        low_acceptance("vllm", short, group("short prompts", 0.5), 3.0)


READ_BENCH = lambda d, _: read_points(d / "bench", read_run(d / "bench"))  # noqa: E731
RUNTIMES = ("trtllm",) * 8 + ("vllm", "sglang")


def decode(name: str) -> Callable[[Path, Random], object]:
    """Reads a draft that others packed, and all its weights."""

    def read(directory: Path, rng: Random) -> None:
        check_finite(read_draft(directory / name).weights.values())

    return read


def mutate_features(content: bytes, rng: Random) -> bytes:
    """A capture file whose facts, header, or any bytes are damaged."""
    if rng.random() < 0.6:
        return mutate_header(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    facts = mutate_document(header["__metadata__"][METADATA_KEY].encode(), rng)
    header["__metadata__"][METADATA_KEY] = facts.decode(errors="replace")
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :]


def read_features(directory: Path, _: Random) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    with open_features(directory / "features.safetensors", read_draft(FIXTURES / "tiny-qwen3-dflash").spec) as file:
        for sequence in range(file.facts.num_sequences):
            file.prompt(sequence)
            file.answer(sequence)
        list(file.sequences())
        file.mask_embedding()
        file.lm_head()


def read_cached(directory: Path, _: Random) -> None:
    """A draft of the hub's cache in `directory`, offline."""
    constants.HF_HUB_CACHE = str(directory / "hub")
    read_draft(checkpoint_directory("owner/name"))


def mutate_gguf(content: bytes, rng: Random) -> bytes:
    """A GGUF file with its header damaged, or any bytes."""
    length = rng.choice((GGUF_HEADER, GGUF_HEADER, len(content)))
    return mutate_bytes(content[:length], rng) + content[length:]


READERS = {
    "draft config.json": Reader("draft/config.json", mutate_document, inspect("draft")),
    "target config.json": Reader("target/config.json", mutate_document, inspect("target")),
    "dialects' config.json": Reader("dialects/configs.json", mutate_dialect, inspect_dialects),
    "DFlash2's config.json": Reader("dflash2/config.json", mutate_document, inspect("dflash2")),
    "safetensors header": Reader("draft/model.safetensors", mutate_header, inspect("draft")),
    "index": Reader("sharded/model.safetensors.index.json", mutate_document, inspect("sharded")),
    "hf_quant_config.json": Reader("quantised/hf_quant_config.json", mutate_document, inspect("quantised")),
    "compressed-tensors' config.json": Reader("packed/config.json", mutate_document, decode("packed")),
    "compressed-tensors' header": Reader("packed/model.safetensors", mutate_header, decode("packed")),
    "GGUF": Reader("draft.gguf", mutate_gguf, decode("draft.gguf")),
    "capture": Reader("features.safetensors", mutate_features, read_features),
    "hub ref": Reader("hub/models--owner--name/refs/main", mutate_bytes, read_cached),
    "manifest": Reader("engine/manifest.json", mutate_document, inspect("engine")),
    "recipe": Reader(
        "recipe.yaml", mutate_lines,
        lambda d, _: load_recipe(str(d / "recipe.yaml")).algorithms(read_draft(d / "draft").spec.linear_modules()),
    ),
    "deployment": Reader("deployment.yaml", mutate_lines, read_deployment),
    "configuration": Reader(
        "serve.yaml", mutate_lines,
        lambda d, rng: command("serve-config", "--check", d / "serve.yaml", "--runtime", rng.choice(RUNTIMES)),
    ),
    "prompts": Reader("prompts.jsonl", mutate_lines, lambda d, _: read_prompts(d / "prompts.jsonl")),
    "request": Reader("request.json", mutate_document, ask),
    "bench run": Reader("bench/run.json", mutate_document, READ_BENCH),
    "bench point": Reader("bench/points/dflash/c2.json", mutate_document, READ_BENCH),
    "bench prompts": Reader(
        "turns.jsonl", mutate_lines, lambda d, _: read_prompt_list(str(d / "turns.jsonl")).exactly(3)
    ),
    "AIPerf's records": Reader(
        "aiperf/profile_export.jsonl", mutate_lines, lambda d, _: list(read_records(d / "aiperf", {}, 64))
    ),
    "diagnosis": Reader("healthy.json", mutate_document, read_diagnosis),
    "report": Reader("verify.json", mutate_document, lambda d, _: read_acceptance(d / "verify.json", 7).tau(7)),
}  # fmt: skip
