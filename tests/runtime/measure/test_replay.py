# SPDX-License-Identifier: Apache-2.0
"""A replay of captured answers is decoding with the target, step for step; errors planted in it are seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt import __version__
from dflash_trt.api.acceptance import Step
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import Manifest
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import FP8_KV, load_recipe, recipe_names
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.measure.feature_answers import answer_prompts
from dflash_trt.runtime.measure.feature_writer import write_features
from dflash_trt.runtime.measure.features import SCHEMA_VERSION, FeatureFacts, FeatureFile, PromptFacts, open_features
from dflash_trt.runtime.measure.replay import replay
from dflash_trt.runtime.session import Session
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.engines import build, trained_engine
from tests.featured import build_featured, featured_draft
from tests.fixtures_data import PAIRS
from tests.oracle.random_pairs import write_random_pair
from tests.paths import FIXTURES
from tests.reference.synthetic import Dialect
from tests.runtime.test_dialects_decode import embedding, reduced_head

RECIPES = [f"{name}{suffix}" for name in recipe_names() for suffix in ("", FP8_KV)]
Steps = list[list[Step]]


def with_recipe(session: Session, name: str, recipe: str, path: Path) -> Session:
    """The session with its draft quantised."""
    draft = read_draft(FIXTURES / f"{name}-dflash")
    quantize_checkpoint(draft, load_recipe(recipe), path / "draft", threads=1)
    manifest = build(path / "draft", path / "engine", FIXTURES / name)
    return session.with_drafter(manifest, open_drafter(path / "engine", manifest))


def decoded(session: Session, features: FeatureFile, stop_ids: frozenset[int] = frozenset()) -> Steps:
    """Every captured prompt, decoded with the target."""
    params = greedy(features.facts.max_tokens, sorted(stop_ids))
    return [decode(session, features.prompt(i).tolist(), params).steps for i in range(features.facts.num_sequences)]


def replayed(features: FeatureFile, drafter: Drafter) -> Steps:
    return [prompt.steps for prompt in replay(features, drafter)]


def check(session: Session, file: Path) -> None:
    with open_features(file, session.manifest.draft) as features:
        assert replayed(features, session.drafter) == decoded(session, features)


@pytest.mark.parametrize("name", PAIRS)
def test_replay_is_decoding(name: str, sessions: dict[str, Session], features: dict[str, Path]) -> None:
    check(sessions[name], features[name])


def test_replay_of_a_quantised_drafter(sessions: dict[str, Session], features: dict[str, Path], tmp_path: Path) -> None:
    check(with_recipe(sessions["tiny-qwen3"], "tiny-qwen3", "nvfp4", tmp_path), features["tiny-qwen3"])


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", PAIRS)
def test_replay_of_every_recipe(
    name: str, recipe: str, sessions: dict[str, Session], features: dict[str, Path], tmp_path: Path
) -> None:
    check(with_recipe(sessions[name], name, recipe, tmp_path), features[name])


def test_batches_and_shorter_drafts(sessions: dict[str, Session], features: dict[str, Path]) -> None:
    """Slots are taken anew by later sequences, in any order that is asked for."""
    session = sessions["tiny-qwen3"]
    drafter = open_drafter(trained_engine("tiny-qwen3"), session.manifest, num_slots=2)
    with open_features(features["tiny-qwen3"], session.manifest.draft) as file:
        alone = replay(file, session.drafter)
        assert [prompt.steps for prompt in replay(file, drafter)] == [prompt.steps for prompt in alone]
        backwards = replay(file, drafter, numbers=[2, 1, 0])
        assert [prompt.prompt for prompt in backwards] == list(reversed(file.facts.prompts))
        assert [prompt.steps for prompt in backwards] == [prompt.steps for prompt in reversed(alone)]
        (short,) = replay(file, drafter, numbers=[1], draft_length=3)
        assert max(step.proposed for step in short.steps) == 3
    assert alone[0].tau == 39 / len(alone[0].steps)


def test_replay_of_a_draft_with_a_vocabulary_of_its_own(
    sessions: dict[str, Session], features: dict[str, Path], tmp_path: Path
) -> None:
    """Embedding, mask row and a reduced head are the draft's; the file's are not asked."""
    facts = {"own_embedding": True, "mask_embedding": True, "draft_vocab_size": 300}
    draft = featured_draft(
        FIXTURES / "tiny-qwen3-dflash",
        tmp_path / "draft",
        facts,
        reduced_head()[0] | {"embed_tokens.weight": embedding()},
    )
    manifest = build_featured(draft, tmp_path / "engine", FIXTURES / "tiny-qwen3")
    session = sessions["tiny-qwen3"].with_drafter(manifest, open_drafter(tmp_path / "engine", manifest))
    check(session, features["tiny-qwen3"])


class RandomPair:
    """A random pair and its answers, which end at token 2."""

    stop_ids = frozenset([2])
    max_tokens = 40

    def __init__(self, path: Path, dialect: Dialect) -> None:
        self.target, draft = write_random_pair(path, dialect=dialect)
        self.manifest: Manifest = build(draft, path / "engine", self.target)
        self.session = open_without_tokenizer(path / "engine", self.target)
        self.file = path / "features.safetensors"
        prompts = [[i % 4, 3, 1 if i % 3 else 0, *[3] * i] for i in range(12)]
        prompts = [[token + (token >= self.manifest.draft.mask_token_id) for token in prompt] for prompt in prompts]
        answered = answer_prompts(self.session.target, prompts, self.max_tokens, self.stop_ids)
        facts = FeatureFacts(
            schema_version=SCHEMA_VERSION,
            tool_version=__version__,
            target_name="random",
            target=read_target(self.target).spec,
            target_layer_ids=self.manifest.draft.target_layer_ids,
            mask_token_id=self.manifest.draft.mask_token_id,
            max_tokens=self.max_tokens,
            stop_token_ids=tuple(self.stop_ids),
            prompts=tuple(PromptFacts(name=str(i)) for i in range(len(prompts))),
        )
        write_features(self.session.target, answered, facts, self.file, block_size=self.manifest.draft.block_size)
        self.lengths = [len(sequence.token_ids) - sequence.prompt_length for sequence in answered]


@pytest.mark.parametrize("dialect", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_replay_of_random_pairs(dialect: Dialect, tmp_path: Path) -> None:
    """Answers that end in the middle of a block, at once, and at the limit."""
    pair = RandomPair(tmp_path, dialect)
    with open_features(pair.file, pair.manifest.draft) as features:
        live = decoded(pair.session, features, pair.stop_ids)
        assert replayed(features, pair.session.drafter) == live
    assert any(length < pair.max_tokens for length in pair.lengths)
    ends = [steps[-1] for steps in live if steps]
    assert any(step.accepted < step.proposed for steps in live for step in steps)
    assert any(step.proposed > len(step.token_ids) for step in ends), "none ended inside its block"
