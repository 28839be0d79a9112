# SPDX-License-Identifier: Apache-2.0
"""Drafts of each dialect, and with vocabularies of their own, decoded with: every proposal against float64 equations.

The equations get the same draft converted here by hand, not by the package, so that the reading of names and keys is
compared, too. Prompts are longer than the windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt.checkpoint.draft_checkpoint import head_token_ids
from dflash_trt.runtime.request import Request
from tests.checkpoint.dialect_samples import (
    FULL,
    MIXED,
    SLIDING,
    write_jetspec,
    write_laguna,
    write_mimo,
    write_modelopt,
    write_muse_glimmer,
    write_nemotron,
    write_speculators,
    write_speculators_vocabulary,
)
from tests.checkpoint.samples import refusal
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.engines import build
from tests.featured import build_featured, featured_draft
from tests.fixtures_data import prompts
from tests.oracle.transformers_dflash import load_target
from tests.paths import FIXTURES
from tests.reference.decode_loop import reference_greedy
from tests.reference.dflash_float64 import read_rotary
from tests.reference.synthetic import write_random_draft

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"
NUM_TOKENS = 12
Proposals = list[list[int]]


def embedding() -> torch.Tensor:
    return load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].bfloat16()


def reduced_head(num_rows: int = 300) -> tuple[Tensors, torch.Tensor]:
    """The target's head on some tokens, in no order; its d2t, and those tokens."""
    head = load_file(TARGET / "model.safetensors")["lm_head.weight"]
    tokens = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))[:num_rows]
    return {"lm_head.weight": head[tokens].bfloat16(), "d2t": tokens - torch.arange(num_rows)}, tokens


def decoded(directory: Path, facts: dict[str, Any], tensors: Tensors) -> Request:
    """The first prompt, by a draft of these facts."""
    build_featured(featured_draft(DRAFT, directory / "draft", facts, tensors), directory / "engine", TARGET)
    return decode(open_without_tokenizer(directory / "engine", TARGET), prompts(TARGET)[0], greedy(NUM_TOKENS))


def proposals(directory: Path, facts: dict[str, Any], tensors: Tensors) -> tuple[Proposals, Proposals]:
    """Ours with a draft of these facts, step by step, and those of the definition; both write the target's text."""
    ours = decoded(directory, facts, tensors)
    expected = reference_greedy(load_target(TARGET), directory / "draft", prompts(TARGET)[0], NUM_TOKENS)
    assert ours.token_ids == expected.output_ids
    assert [len(step.token_ids) for step in ours.steps] == expected.committed
    cut = [proposed[: step.proposed] for proposed, step in zip(expected.proposals, ours.steps, strict=True)]
    return [list(step.proposals) for step in ours.steps], cut


def test_own_reduced_head(tmp_path: Path) -> None:
    """Rows become the target's tokens before anybody sees them."""
    tensors, tokens = reduced_head()
    ours, expected = proposals(tmp_path, {"draft_vocab_size": len(tokens)}, tensors)
    assert ours == expected
    assert {token for proposed in ours for token in proposed} <= set(tokens.tolist())
    assert max(token for proposed in ours for token in proposed) >= len(tokens), "d2t left out would look the same"


def test_own_embedding_and_head_are_not_the_targets(tmp_path: Path) -> None:
    """Both random in part, so that the target's in their place would propose something else."""
    noise = torch.randn(embedding().shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {"embed_tokens.weight": embedding() + 0.5 * noise, "lm_head.weight": noise}
    ours, expected = proposals(tmp_path / "own", {"own_embedding": True, "draft_vocab_size": 1024}, tensors)
    borrowed = decoded(tmp_path / "borrowed", {}, {}).steps[0].proposals
    embedded = decoded(tmp_path / "embedded", {"own_embedding": True}, {"embed_tokens.weight": noise})
    assert ours == expected
    assert tuple(ours[0]) != tuple(borrowed) != tuple(embedded.steps[0].proposals)


@pytest.mark.parametrize("facts", [{}, pytest.param({"own_embedding": True}, marks=pytest.mark.full)], ids=str)
def test_own_mask_row(facts: dict[str, Any], tmp_path: Path) -> None:
    """MiMo's vector replaces the mask token's row only, wherever the other rows come from."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, expected = proposals(tmp_path / "row", {**facts, "mask_embedding": True}, {"mask_embedding": row})
    assert ours == expected
    assert tuple(ours[0]) != tuple(decoded(tmp_path / "without", facts, {}).steps[0].proposals)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({0: -1}, "found 0 + -1"),
        ({3: 1021}, "found 3 + 1021"),
        ({5: 2**62}, f"found 5 + {2**62}"),
        ({1: 5, 2: 4}, "expected each token in one row, found 6 in 3"),
    ],
)
def test_a_wrong_d2t_is_refused(change: dict[int, int], problem: str, tmp_path: Path) -> None:
    offsets = torch.zeros(10, dtype=torch.int64)
    for row, offset in change.items():
        offsets[row] = offset
    draft = featured_draft(DRAFT, tmp_path / "draft", {"draft_vocab_size": 10}, {"d2t": offsets})
    assert problem in refusal(lambda: head_token_ids(draft.spec, draft.weights))


PROMPT, TOKENS = [7, 11, 3, 90, 42, 5, 17, 88, 23, 64, 2, 31], 8
Tensors = dict[str, torch.Tensor]


def weights(directory: Path) -> Tensors:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def unfused(tensors: Tensors) -> Tensors:
    """Laguna's qkv_proj in its parts: 4 query and 2 key-value heads of 16."""
    for i in range(3):
        attention = f"layers.{i}.self_attn"
        parts = tensors.pop(f"{attention}.qkv_proj.weight").split([64, 32, 32])
        tensors |= {f"{attention}.{x}_proj.weight": part.contiguous() for x, part in zip("qkv", parts, strict=True)}
    return tensors


def renamed(*names: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    def rename(tensors: Tensors) -> Tensors:
        for old, new in names:
            tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        return tensors

    return rename


@dataclass(frozen=True)
class Case:
    """How a dialect is written, and the same draft in z-lab's words and those of the equations."""

    write: Callable[[Path], Path]
    layer_types: list[str] = field(default_factory=lambda: [FULL] * 3)
    window: int | None = None
    is_causal: bool | None = None
    features: dict[str, Any] = field(default_factory=dict)
    respell: Callable[[Tensors], Tensors] = dict


NEMOTRON_ROPE = {"factor": 128.0, "original_max_position_embeddings": 64, "rope_theta": 10000, "rope_type": "yarn"}
CASES = {
    "speculators": Case(write_speculators, MIXED, 7),
    "speculators_vocabulary": Case(write_speculators_vocabulary, MIXED, 7),
    "modelopt": Case(write_modelopt, [SLIDING] * 3, 7, False),
    "nemotron": Case(
        write_nemotron, is_causal=False, features={"rotary": read_rotary({"rope_parameters": NEMOTRON_ROPE}, 16)}
    ),
    "jetspec": Case(write_jetspec, is_causal=True),
    "laguna": Case(
        write_laguna, [SLIDING] * 3, 7, True, {"tap_norms": True, "context_input_layernorm": True, "gate": 4}, unfused
    ),
    "mimo": Case(
        write_mimo, [SLIDING] * 3, 7, False,
        {"value_scale": 0.612, "rotary_dim": 8, "rotary": read_rotary({"rope_theta": 1e6}, 8)},
        renamed(("attention_sink_bias", "sinks")),
    ),
    "muse_glimmer": Case(
        write_muse_glimmer, MIXED, 8, False,
        respell=renamed(("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
    ),
}  # fmt: skip
QUICK = ("speculators_vocabulary", "laguna", "mimo")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of the sizes that the random drafts expect."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_a_dialects_proposals_are_those_of_its_equations(name: str, target: Path, tmp_path: Path) -> None:
    case = CASES[name]
    draft, plain = case.write(tmp_path / "draft"), tmp_path / "plain"
    options = {"layer_types": case.layer_types, "sliding_window": case.window, "is_causal": case.is_causal}
    write_random_draft(plain, dialect="qwen3", **options)
    save_file(case.respell(weights(draft)), plain / "model.safetensors")
    expected = reference_greedy(load_target(target), plain, PROMPT, TOKENS, features=case.features)

    build(draft, tmp_path / "engine", target)
    ours = decode(open_without_tokenizer(tmp_path / "engine", target), PROMPT, greedy(TOKENS))
    assert ours.token_ids == expected.output_ids
    assert [len(step.token_ids) for step in ours.steps] == expected.committed
    for step, proposed in zip(ours.steps, expected.proposals, strict=True):
        assert list(step.proposals) == proposed[: step.proposed]
