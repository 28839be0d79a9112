# SPDX-License-Identifier: Apache-2.0
"""Feature files: what `capture` writes, and what reading refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import _C, __version__
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.safetensors_file import read_tensors
from dflash_trt.errors import BuildError, MissingDependencyError, RequestError
from dflash_trt.files.write import new_file
from dflash_trt.runtime.measure import feature_capture
from dflash_trt.runtime.measure.feature_answers import Answered, answer_prompts
from dflash_trt.runtime.measure.feature_capture import FEATURES
from dflash_trt.runtime.measure.feature_writer import bits, narrowest, write_features
from dflash_trt.runtime.measure.features import FeatureFacts, open_features
from dflash_trt.runtime.targets.huggingface import make_target
from dflash_trt.runtime.targets.target import Segment, Target, Verified
from tests.checkpoint.samples import refusal
from tests.cli.commands import run_here
from tests.fixtures_data import PAIRS
from tests.oracle.transformers_dflash import load_target, plain_greedy
from tests.paths import FIXTURES
from tests.reference.decode_loop import target_forward
from tests.runtime.measure.feature_samples import Facts, Tensors, capture, edit, read

COMMAND = import_module("dflash_trt.cli.capture")
FLOAT_ROUNDING = 1e-5  # error of sums in another order, over all layers


@pytest.mark.parametrize("name", PAIRS)
def test_layout(name: str, features: dict[str, Path]) -> None:
    tensors, facts = read(features[name])
    spec = read_draft(FIXTURES / f"{name}-dflash").spec
    config = json.loads((FIXTURES / name / "config.json").read_text())
    assert facts == {
        "schema_version": 4,
        "tool_version": __version__,
        "target_name": name,
        "target": {
            key: config[key]
            for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
        },
        "target_layer_ids": list(spec.target_layer_ids),
        "mask_token_id": spec.mask_token_id,
        "max_tokens": 40,
        "temperature": 0.0,
        "stop_token_ids": [0, 126],
        "prompts": [
            {"name": json.loads(line)["id"], "category": None, "language": None}
            for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()[:3]
        ],
    }
    H = spec.hidden_size
    assert tensors.keys() == {"mask_embedding", "lm_head"} | {
        f"{kind}.{i}" for kind in ("tokens", "prompt_length", "taps", "embeddings") for i in range(3)
    }
    for i in range(3):
        n, p = len(tensors[f"tokens.{i}"]), int(tensors[f"prompt_length.{i}"])
        assert n == p + 40
        assert tensors[f"tokens.{i}"].dtype == tensors[f"prompt_length.{i}"].dtype == torch.int64
        assert tensors[f"taps.{i}"].dtype == torch.float32
        assert tensors[f"embeddings.{i}"].dtype == torch.bfloat16
        assert tensors[f"taps.{i}"].shape == (n - 1, spec.target_hidden_size)
        assert tensors[f"embeddings.{i}"].shape == (40, H)


@pytest.mark.parametrize("name", PAIRS)
def test_content(name: str, features: dict[str, Path]) -> None:
    """Greedy continuations by transformers, taps by hooks on the layers, embeddings from the checkpoint's bytes."""
    tensors, facts = read(features[name])
    model = load_target(FIXTURES / name)
    weights = load_file(FIXTURES / name / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    assert torch.equal(tensors["lm_head"], weights.get("lm_head.weight", table))
    assert torch.equal(tensors["mask_embedding"], table[facts["mask_token_id"]])
    for i in range(3):
        tokens, p = tensors[f"tokens.{i}"].tolist(), int(tensors[f"prompt_length.{i}"])
        assert tokens[p:] == plain_greedy(model, tokens[:p], 40)
        _, expected = target_forward(model, tokens[:-1], facts["target_layer_ids"])
        taps = tensors[f"taps.{i}"].double().numpy()
        assert np.abs(taps - expected).max() <= FLOAT_ROUNDING * np.abs(expected).max()
        assert torch.equal(tensors[f"embeddings.{i}"], table[tokens[p:]])


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sampled answers."""
    file = tmp_path_factory.mktemp("sampled") / "f.safetensors"
    options = ("--temperature", 0.9, "--seed", 2**64 - 1)
    return capture("tiny-qwen3", file, "--max-prompts", 2, "--max-tokens", 12, *options)


def test_sampled_answers(sampled: Path) -> None:
    tensors, facts = read(sampled)
    assert (facts["schema_version"], facts["temperature"], facts["seed"]) == (4, 0.9, 2**64 - 1)
    model = load_target(FIXTURES / "tiny-qwen3")
    for i, seed in enumerate([2**64 - 1, 0]):
        tokens, p = tensors[f"tokens.{i}"].tolist(), int(tensors[f"prompt_length.{i}"])
        with torch.inference_mode():
            expected = model(torch.tensor([tokens[:-1]])).logits[0, p - 1 :]
        sampler = SamplingParams(temperature=0.9, seed=seed).sampler()
        logits = expected.float().numpy()
        assert tokens[p:] == [_C.verify_block(logits[k : k + 1], [], sampler, k)[0] for k in range(len(logits))]


def test_taps_in_bfloat16(features: dict[str, Path], tmp_path: Path) -> None:
    options = ("--max-prompts", 3, "--max-tokens", 40, "--taps-dtype", "bfloat16")
    rounded, _ = read(capture("tiny-qwen3", tmp_path / "f.safetensors", *options))
    exact, _ = read(features["tiny-qwen3"])
    for name, values in exact.items():
        assert torch.equal(rounded[name], values.bfloat16() if name.startswith("taps") else values)


def test_a_target_in_bfloat16(tmp_path: Path) -> None:
    """Taps of a BF16 target stay BF16; the file names the type only then."""
    options = ("--max-prompts", 1, "--max-tokens", 4)
    tensors, facts = read(capture("tiny-qwen3", tmp_path / "f.safetensors", *options, "--dtype", "bfloat16"))
    assert (tensors["taps.0"].dtype, facts["target_dtype"]) == (torch.bfloat16, "bfloat16")
    assert "target_dtype" not in read(capture("tiny-qwen3", tmp_path / "g.safetensors", *options))[1]


def test_floats_take_bfloat16_only_where_it_keeps_every_value() -> None:
    values = torch.tensor([1.0, -0.0, 2.0**-130, 3.375])
    assert narrowest(values) == torch.bfloat16
    assert torch.equal(torch.from_numpy(bits(values.bfloat16())).view(torch.bfloat16).float(), values)
    values[1] = 1 + 2.0**-8
    assert narrowest(values) == torch.float32
    assert torch.equal(torch.from_numpy(bits(values)), values)


def test_what_the_prompts_file_says_is_kept(tmp_path: Path) -> None:
    """Token ids are taken as they are; an empty line is none."""
    prompts = tmp_path / "prompts.jsonl"
    first = '{"token_ids": [7, 8, 9], "category": "coding", "language": "de", "id": "x"}'
    prompts.write_text(f'{first}\n\n{{"token_ids": [3]}}\n')
    tensors, facts = read(capture("tiny-qwen3", tmp_path / "f", "--prompts", prompts, "--max-tokens", 2))
    assert facts["prompts"] == [
        {"name": "x", "category": "coding", "language": "de"},
        {"name": "line 3", "category": None, "language": None},
    ]
    assert [tensors[f"tokens.{i}"].tolist()[:-2] for i in range(2)] == [[7, 8, 9], [3]]


def stop_at(label: str, count: int, stop: Callable[[], object]) -> object:
    """A progress bar that stops the command when `count` prompts have been answered, or recorded."""

    @contextmanager
    def bar(_total: int, of: str) -> Iterator[Callable[[], None]]:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if (of, done) == (label, count):
                stop()

        yield advance

    return bar


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("label", "count"), [("answering", 2), ("recording", 2)])
def test_an_interrupted_capture_goes_on_to_the_same_bytes(
    label: str, count: int, features: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished answers are not requested again; truncated journals, and data in the file beyond them, are redone."""
    output, options = tmp_path / "f", ("--max-prompts", 3, "--max-tokens", 40, "--max-batch-size", 2)
    with monkeypatch.context() as patch:
        patch.setattr(COMMAND, "progress_bar", stop_at(label, count, interrupt))
        with pytest.raises((KeyboardInterrupt, click.exceptions.Abort)):
            capture("tiny-qwen3", output, *options)
    state = {"f.journal"} | ({"f.unfinished"} if label == "recording" else set())
    assert {path.name for path in tmp_path.iterdir()} == state
    with pytest.raises(BuildError, match=r"f\.journal: expected a capture with these inputs and options, found others"):
        capture("tiny-qwen3", output, *options, "--taps-dtype", "bfloat16")
    with (tmp_path / "f.journal").open("ab") as journal:
        journal.write(b'{"key": "0", "token_ids": [1')
    if label == "recording":
        with (tmp_path / "f.unfinished").open("r+b") as unfinished:
            length = int.from_bytes(unfinished.read(8), "little")
            begin, end = json.loads(unfinished.read(length))["taps.2"]["data_offsets"]
            unfinished.seek(8 + length + begin)
            unfinished.write(b"?" * (end - begin))  # rows of the sequence that is not in the journal
    asked: list[int] = []
    decode = answer_prompts

    def counted(target: Target, prompts: Sequence[Sequence[int]], *rest: Any, **named: Any) -> list[Answered]:
        asked.append(len(prompts))
        return decode(target, prompts, *rest, **named)

    monkeypatch.setattr(feature_capture, "answer_prompts", counted)
    capture("tiny-qwen3", output, *options)
    assert asked == [1 if label == "answering" else 0]
    assert output.read_bytes() == features["tiny-qwen3"].read_bytes()
    assert list(tmp_path.iterdir()) == [output]


def test_an_answer_ends_with_its_stop_token() -> None:
    target = make_target(load_target(FIXTURES / "tiny-qwen3"), (), num_slots=1)
    (whole,) = answer_prompts(target, [[5, 6, 7]], 20, frozenset())
    stop = whole.token_ids[8]
    (stopped,) = answer_prompts(target, [[5, 6, 7]], 20, frozenset([stop]))
    end = whole.token_ids.index(stop, 3) + 1
    assert (stopped.token_ids, stopped.prompt_length) == (whole.token_ids[:end], 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"token_ids": [7, 1]}', "the prompt contains the draft's mask token 1"),
        ('{"id": "x", "token_ids": [7, 9999]}', "x: prompt: expected token ids from 0 to 1023, found 9999"),
        ('{"id": "x", "token_ids": []}', "x: prompt: expected at least one token"),
        ("{}", ":1: expected either prompt or token_ids, found neither"),
        ('{"prompt": "a", "token_ids": [1]}', ":1: expected either prompt or token_ids, found both"),
        ('{"text": "a"}', ":1: expected an object with prompt or token_ids, found"),
        ("[1, 2]", ":1: expected an object with prompt or token_ids, found"),
        ("", "expected at least one prompt, found none"),
    ],
)
def test_refused_prompts(line: str, words: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    message = refusal(lambda: capture("tiny-qwen3", tmp_path / "f", "--prompts", prompts), RequestError)
    assert words in message
    assert list(tmp_path.iterdir()) == [prompts]


def test_a_target_of_another_draft_is_refused(tmp_path: Path) -> None:
    draft, target, prompts = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-qwen3", FIXTURES / "prompts.jsonl"

    def mixed() -> None:
        run_here("capture", draft, "--target", target, "--prompts", prompts, "-o", tmp_path / "f")

    assert "model_type: expected qwen3 (target), found gpt_oss (draft)" in refusal(mixed)


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    for options in ((), ("--force",)):
        file.write_text("precious")
        message = refusal(lambda options=options: capture("tiny-qwen3", file, *options), BuildError)  # type: ignore[misc]
        assert "already exists and is not features that this command captured" in message
        assert file.read_text() == "precious"
    file.unlink()
    capture("tiny-qwen3", file, "--max-prompts", 1, "--max-tokens", 2)
    message = refusal(lambda: capture("tiny-qwen3", file), BuildError)
    assert message.endswith("hint: choose another -o FILE, or replace it with --force")
    capture("tiny-qwen3", file, "--max-prompts", 2, "--max-tokens", 2, "--force")
    prompts = read(file)[1]["prompts"]
    assert isinstance(prompts, list)
    assert len(prompts) == 2


class BrokenTarget:
    """A target whose taps are NaN."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*token_ids.shape, 128)

    def head(self) -> Tensors:
        return {"lm_head": torch.zeros(1024, 128)}

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        assert with_taps
        (segment,) = segments
        return Verified(logits=torch.zeros(0, 1), tapped=[torch.full((len(segment.token_ids), 384), float("nan"))])

    def rollback(self, slot: int, num_tokens: int) -> None:
        pass

    def release(self, slot: int) -> None:
        pass


def test_taps_that_are_not_finite_leave_nothing(features: dict[str, Path], tmp_path: Path) -> None:
    with open_features(features["tiny-qwen3"], read_draft(FIXTURES / "tiny-qwen3-dflash").spec) as file:
        facts: FeatureFacts = file.facts
    answered = [Answered(token_ids=[1, 2, 3], prompt_length=1)] * 3

    def write() -> None:
        with new_file(tmp_path / "f", FEATURES) as temporary:
            write_features(BrokenTarget(), answered, facts, temporary, block_size=8)  # type: ignore[arg-type]

    assert "sequence 0: expected finite taps, found NaN or infinity" in refusal(write)
    assert list(tmp_path.iterdir()) == []


def read_all(file: Path, draft: str = "tiny-qwen3-dflash") -> None:
    with open_features(file, read_draft(FIXTURES / draft).spec) as opened:
        list(opened.sequences())
        opened.mask_embedding()
        opened.lm_head()


def test_another_draft_is_refused(features: dict[str, Path]) -> None:
    """The fixtures have equal sizes: only the target's model_type tells them apart."""
    message = refusal(lambda: read_all(features["tiny-qwen3"], "tiny-gpt-oss-dflash"))
    assert "the draft does not fit target tiny-qwen3 of" in message
    assert "model_type: expected qwen3 (target), found gpt_oss (draft)" in message
    assert "hint: capture with this draft and its target: dflash-trt capture DRAFT --target TARGET" in message


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Facts], object]:
    """Changes one tensor."""

    def edit_tensor(tensors: Tensors, facts: Facts) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit_tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, f: f.update(target_layer_ids=[0, 1, 3]), "target_layer_ids: expected (0, 1, 2) (draft), found (0"),
        (lambda t, f: f.update(mask_token_id=2), "mask_token_id: expected 1 (draft), found 2"),
        (lambda t, f: f["target"].update(hidden_size=64), "hidden_size: expected 64 (target), found 128 (draft)"),
        (lambda t, f: f["target"].update(vocab_size=9), "vocab_size: expected 9 (target), found 1024 (draft)"),
        (lambda t, f: f.update(schema_version=2), "schema_version: expected 4, found 2"),
        (lambda t, f: f.update(temperature=-1.0), "Expected `float` >= 0.0 - at `$.temperature`"),
        (lambda t, f: f.pop("target"), "expected facts, found Object missing required field `target`"),
        (lambda t, f: f.update(extra=1), "expected facts, found Object contains unknown field `extra`"),
        (lambda t, f: t.pop("taps.1"), "missing tensor 'crc32.taps.1' [] (2 of 28"),
        (lambda t, f: t.pop("tokens.1"), "missing tensor 'tokens.1'"),
        (lambda t, f: t.pop("mask_embedding"), "missing tensor 'crc32.mask_embedding' [] (2 of"),
        (lambda t, f: t.pop("lm_head"), "missing tensor 'crc32.lm_head' [] (2 of"),
        (lambda t, f: f["prompts"].pop(), "that its metadata describes, found tensor 'crc32.embeddings.2' besides"),
        (put("taps.0", lambda x: x[1:]), "tensor 'taps.0': expected shape ["),
        (put("taps.0", lambda x: x[:, 1:]), "tensor 'taps.0': expected shape ["),
        (put("taps.0", torch.Tensor.half), "tensor 'taps.0': expected dtype F32 or BF16, found F16"),
        (put("lm_head", lambda x: x[1:]), "tensor 'lm_head': expected shape [1024, 128], found [1023, 128]"),
        (lambda t, f: t.update(lm_head_bias=torch.zeros(9)), "lm_head_bias': expected shape [1024], found [9]"),
        (lambda t, f: f.update(max_tokens=41), "expected an answer that ends after 41 tokens (max_tokens, or"),
        (lambda t, f: f["stop_token_ids"].append(int(t["tokens.1"][-3])), "expected an answer that ends after"),
        (put("tokens.0", torch.Tensor.int), "tensor 'tokens.0': expected dtype I64, found I32"),
        (put("tokens.0", lambda x: x[:40]), "tokens.0: expected a prompt, an answer and at most"),
        (put("embeddings.0", lambda x: x[:0]), "tokens.0: expected a prompt, an answer and at most"),
        (put("embeddings.0", lambda x: x[1:]), "prompt_length.0: expected"),
        (put("prompt_length.2", lambda x: x + 1), "prompt_length.2: expected"),
        (put("tokens.1", lambda x: x + 1024), "tokens.1: expected token ids from 0 to 1023, found"),
        (put("tokens.1", lambda x: x - 1024), "tokens.1: expected token ids from 0 to 1023, found -"),
        (put("taps.2", lambda x: x * float("inf")), "taps.2 contains NaN or infinity"),
    ],
)  # fmt: skip
def test_refused_files(
    change: Callable[[Tensors, Facts], object], words: str, features: dict[str, Path], tmp_path: Path
) -> None:
    file = edit(features["tiny-qwen3"], tmp_path / "f.safetensors", change)
    assert words in refusal(lambda: read_all(file))


@pytest.mark.parametrize("name", ["tokens.1", "prompt_length.0", "taps.2", "embeddings.1", "mask_embedding", "lm_head"])
def test_a_changed_bit_is_noticed(name: str, features: dict[str, Path], tmp_path: Path) -> None:
    """A token that became another one is still a token; its checksum is no longer right."""
    content = bytearray(features["tiny-qwen3"].read_bytes())
    stored = read_tensors(features["tiny-qwen3"])[name]
    content[stored.offset] ^= 1
    (tmp_path / "f.safetensors").write_bytes(content)
    assert f"{name} has changed since it was captured" in refusal(lambda: read_all(tmp_path / "f.safetensors"))


@pytest.mark.parametrize("length", [0, -1, 2**40])
def test_a_prompt_of_another_length(length: int, features: dict[str, Path], tmp_path: Path) -> None:
    change = put("prompt_length.0", lambda x: torch.full_like(x, length))
    file = edit(features["tiny-qwen3"], tmp_path / "f.safetensors", change)
    with open_features(file, read_draft(FIXTURES / "tiny-qwen3-dflash").spec) as opened:
        assert "prompt_length.0: expected" in refusal(lambda: opened.prompt(0))


def test_files_that_are_no_features(features: dict[str, Path], tmp_path: Path) -> None:
    def refused(content: bytes | None) -> str:
        file = tmp_path / "f.safetensors"
        if content is not None:
            file.write_bytes(content)
        return refusal(lambda: read_all(file))

    assert ": No such file or directory" in refused(None)
    assert "expected a safetensors file" in refused(b"")
    assert "expected a safetensors file" in refused(b"{} no tensors\n")
    assert "the file is truncated" in refused(features["tiny-qwen3"].read_bytes()[:-1000])
    assert "the file is followed by foreign bytes" in refused(features["tiny-qwen3"].read_bytes() + b"x")
    save_file({"x": torch.zeros(1)}, tmp_path / "plain")
    assert "found a safetensors file without the metadata" in refused((tmp_path / "plain").read_bytes())


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="device: expected a CUDA device, found none"):
        capture("tiny-qwen3", tmp_path / "features.safetensors", "--device", "cuda")
    assert not list(tmp_path.iterdir())
