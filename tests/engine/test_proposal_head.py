# SPDX-License-Identifier: Apache-2.0
"""`build --head`: rows, scales and d2t of the copy, what it proposes, and that the decoded text stays the target's."""

import json
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.proposal_head import HeadChoice, parse_head, with_head
from dflash_trt.errors import BuildError
from dflash_trt.quantize.unwritten_draft import unchanged
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session
from dflash_trt.runtime.measure.features import captured_tokens, frequent_tokens, kept_shares, open_features
from tests.cli.commands import run_here
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.engines import trained_engine
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.quantize.samples import arrays, convert, dequantised, rounded_fp8, rounded_nvfp4
from tests.runtime.measure.feature_samples import Facts, Tensors, edit

NAME = "tiny-gpt-oss"
DRAFT, TARGET = FIXTURES / f"{NAME}-dflash", FIXTURES / NAME
BYTES_AND_SPECIALS = 258  # 256 bytes, eos and mask


def test_what_head_takes() -> None:
    assert parse_head("fp8") == HeadChoice(algorithm="FP8", num_tokens=None)
    assert parse_head("trim:400") == HeadChoice(algorithm=None, num_tokens=400)
    assert parse_head("trim:400:nvfp4") == HeadChoice(algorithm="NVFP4", num_tokens=400)
    for text in ("", "fp4", "trim", "trim:", "trim:4:int8", "nvfp4:400", "trim:-1"):
        with pytest.raises(ValueError, match=f"expected target, .*, found {text}$"):
            parse_head(text)


def test_frequent_tokens_and_what_always_stays() -> None:
    counts = np.array([0, 5, 7, 7, 0, 9, 0])
    assert frequent_tokens(counts, [6, 0], 4).tolist() == [0, 2, 5, 6]  # the lower id of 2 and 3
    assert frequent_tokens(counts, [], 6).tolist() == [0, 1, 2, 3, 4, 5]
    for count in (1, 7):
        with pytest.raises(BuildError, match=f"trim:{count}: expected 2 .* to 6 tokens, found {count}"):
            frequent_tokens(counts, [6, 0], count)


def test_captured_tokens(features: dict[str, Path]) -> None:
    spec = read_draft(DRAFT).spec
    chosen = captured_tokens(spec, features[NAME], TARGET, 300)
    assert (len(chosen), sorted(set(chosen.tolist()))) == (300, chosen.tolist())
    least = captured_tokens(spec, features[NAME], TARGET, BYTES_AND_SPECIALS)
    vocabulary = Tokenizer.from_file(str(TARGET / "tokenizer.json")).get_vocab()
    assert set(least.tolist()) == {i for token, i in vocabulary.items() if len(token) == 1 or token.startswith("<|")}
    assert set(least.tolist()) < set(chosen.tolist())
    with open_features(features[NAME], spec) as file:
        written = torch.cat([file.answer(i)[0] for i in range(file.facts.num_sequences)])
    counts = np.bincount(written.numpy(), minlength=spec.vocab_size)
    others = sorted(set(chosen.tolist()) - set(least.tolist()))
    dropped = sorted(set(range(len(counts))) - set(chosen.tolist()))
    assert counts[others].min() >= counts[dropped].max()


def test_what_a_trimmed_head_can_propose_by_language(features: dict[str, Path], tmp_path: Path) -> None:
    """The head covers most of the tokens it was chosen by, and fewer of another language's."""

    def label(tensors: Tensors, facts: Facts) -> None:
        facts["prompts"][0]["language"], facts["prompts"][2]["language"] = "py", "de"  # type: ignore[index]

    file = edit(features[NAME], tmp_path / "f.safetensors", label)
    spec = read_draft(DRAFT).spec
    chosen = captured_tokens(spec, file, TARGET, 280)
    shares = kept_shares(spec, file, chosen)
    assert list(shares) == [None, "de", "py"]
    with open_features(file, spec) as opened:
        answers = [opened.answer(i)[0].tolist() for i in range(3)]
    kept = [sum(token in set(chosen.tolist()) for token in answer) for answer in answers]
    assert shares == {None: sum(kept) / 120, "de": kept[2] / 40, "py": kept[0] / 40}
    assert 0 < shares["de"] < 1
    assert list(kept_shares(spec, features[NAME], chosen)) == [None]


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
@pytest.mark.parametrize("algorithm", [None, "FP8", "NVFP4"])
def test_the_copy(recipe: str, algorithm: str | None, tmp_path: Path) -> None:
    convert(DRAFT, tmp_path / "draft", recipe)
    draft, token_ids = read_draft(tmp_path / "draft"), np.arange(3, 1000, 3)
    choice = HeadChoice(algorithm=algorithm, num_tokens=len(token_ids))
    (tmp_path / "headed").mkdir()
    with_head(unchanged(draft), read_target(TARGET), choice, token_ids).write(tmp_path / "headed")
    made = read_draft(tmp_path / "headed")
    found, before = arrays(tmp_path / "headed"), arrays(tmp_path / "draft")
    assert (found["d2t"] + np.arange(len(token_ids))).tolist() == token_ids.tolist()
    rows = arrays(TARGET)["lm_head.weight"][token_ids]
    if algorithm is None:
        assert found["lm_head.weight"].tobytes() == rows.tobytes()
    else:
        scale = found["lm_head.weight_scale" if algorithm == "FP8" else "lm_head.weight_scale_2"]
        rounded = rounded_fp8 if algorithm == "FP8" else rounded_nvfp4
        expected = rounded(rows, scale.astype(np.float32)[()])
        np.testing.assert_array_equal(dequantised(found, "lm_head"), expected)
        bound = np.sqrt(128) * np.abs(before["norm.weight"].astype(np.float32)).max()
        divisor = 448 if algorithm == "FP8" else 448 * 6
        assert found["lm_head.input_scale"] == pytest.approx(bound / divisor, rel=1e-6)
    assert all(found[name].tobytes() == values.tobytes() for name, values in before.items())
    assert made.quantization.modules.get("lm_head") == algorithm
    claimed = tmp_path / "headed" / "hf_quant_config.json"
    if claimed.exists():
        details = json.loads(claimed.read_text())["quantization"]
        assert ("lm_head" in details.get("exclude_modules", [])) == (algorithm is None and recipe != "bf16")
    with pytest.raises(BuildError, match="expected a draft that borrows the target's lm_head, found one with its own"):
        with_head(unchanged(made), read_target(TARGET), choice, token_ids)


def build(output: Path, features: dict[str, Path], recipe: str, head: str) -> Path:
    tokens = ("--head-tokens", features[NAME]) if head.startswith("trim") else ()
    run_here("build", DRAFT, "--target", TARGET, "-o", output, "--recipe", recipe, "--head", head, *tokens)
    return output


@pytest.mark.parametrize(("recipe", "head"), [("bf16", "trim:400"), ("nvfp4+fp8-kv", "nvfp4"), ("fp8", "trim:500:fp8")])
def test_the_text_stays_the_targets(recipe: str, head: str, tmp_path: Path, features: dict[str, Path]) -> None:
    """Proposals are the argmax of the copied rows."""
    engine = build(tmp_path / "engine", features, recipe, head)
    manifest = read_manifest(engine)
    kind = parse_head(head)
    assert manifest.draft.draft_vocab_size == (kind.num_tokens or 1024)
    assert manifest.quantization.modules.get("lm_head") == kind.algorithm
    session, plain = open_without_tokenizer(engine, TARGET), open_without_tokenizer(trained_engine(NAME), TARGET)
    for prompt in prompts(TARGET)[:2]:
        ours, expected = (decode(s, prompt, greedy(24)) for s in (session, plain))
        assert ours.token_ids == expected.token_ids
        assert sum(len(step.token_ids) - 1 for step in ours.steps) > 0, "nothing was ever accepted"


def test_proposals_are_the_rows_of_the_target(tmp_path: Path, features: dict[str, Path]) -> None:
    engine = build(tmp_path / "engine", features, "bf16", "trim:400")
    spec = read_manifest(engine).draft
    session = graph_session(engine, "draft.onnx")
    L, G, D, S, H = len(spec.layers), spec.num_key_value_heads, spec.head_dim, spec.block_size, spec.hidden_size
    random = np.random.default_rng(0)
    feed = {
        "noise_embeds": random.standard_normal((2, S, H)).astype(np.float32),
        "positions": np.tile(np.arange(S, dtype=np.int32), (2, 1)),
        "k_cache": np.zeros((1, L, 8, G, D), np.float32),
        "v_cache": np.zeros((1, L, 8, G, D), np.float32),
        "page_ids": np.zeros((2, 1), np.int32),
        "context_lengths": np.zeros(2, np.int32),
    }
    hidden, token_ids = session.run(["hidden", "token_ids"], feed)
    chosen = captured_tokens(spec, features[NAME], TARGET, 400)
    head = load_file(TARGET / "model.safetensors")["lm_head.weight"].float().numpy()
    np.testing.assert_array_equal(token_ids, chosen[(hidden[:, 1:] @ head[chosen].T).argmax(-1)])


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    pair = ("build", DRAFT, "--target", TARGET, "-o", tmp_path / "engine")
    for options, expected in (
        (("--head", "fp4"), "expected target, fp8, nvfp4, trim:N"),
        (("--head", "trim:300"), "--head trim:N needs --head-tokens FILE"),
        (("--head", "fp8", "--head-tokens", "f"), "--head-tokens is for --head trim:N"),
    ):
        with pytest.raises(click.UsageError, match=expected):
            run_here(*pair, *options)
    assert not (tmp_path / "engine").exists()
