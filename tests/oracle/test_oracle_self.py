"""The transformers oracle against plain greedy decoding and against the loop written from the definition."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.oracle.random_pairs import VOCAB_SIZE, write_random_pair
from tests.oracle.transformers_dflash import OracleRun, dflash_greedy, load_assistant, load_target, plain_greedy
from tests.reference.decode_loop import reference_greedy
from tests.reference.synthetic import Dialect

PAIRS = [("qwen3", 0), ("gpt_oss", 1), *(pytest.param(*pair, marks=pytest.mark.full) for pair in (
    ("qwen3", 5), ("qwen3", 8), ("gpt_oss", 6), ("gpt_oss", 10),
))]  # fmt: skip
"""Random pairs, chosen among seeds 0..11 for accepting often and repeating little."""
FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPT = [3, 1, 0, 2, 2, 1, 3, 0, 1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps float32 sums, and so near ties, the same on every machine load."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_oracle_is_right(
    target_dir: Path, draft_dir: Path, prompt: list[int], max_new_tokens: int, eos_ids: list[int]
) -> OracleRun:
    """Tokens of plain greedy decoding; drafts and tokens of each step as the definition has them."""
    target, assistant = load_target(target_dir), load_assistant(draft_dir)
    run = dflash_greedy(target, assistant, prompt, max_new_tokens, eos_ids)
    assert run.output_ids == plain_greedy(target, prompt, max_new_tokens, eos_ids)
    expected = reference_greedy(target, draft_dir, prompt, max_new_tokens, eos_ids)
    assert run.output_ids == expected.output_ids
    assert run.committed == expected.committed
    assert len(run.output_ids) == 1 + sum(run.committed)
    for ours, defined in zip(run.proposals, expected.proposals, strict=True):
        assert ours in ([], defined)
    return run


@pytest.mark.parametrize(("dialect", "seed"), PAIRS)
def test_oracle_equals_definition(tmp_path: Path, dialect: Dialect, seed: int) -> None:
    target_dir, draft_dir = write_random_pair(tmp_path, dialect=dialect, seed=seed)
    run = assert_oracle_is_right(target_dir, draft_dir, PROMPT, 40, [])
    assert len(run.output_ids) == 40
    assert run.steps < 0.8 * 39, "a pair that accepts nothing shows nothing"


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gpt-oss"])
def test_trained_fixtures(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / name)
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()[:2]
    for line in lines:
        prompt = tokenizer(json.loads(line)["prompt"])["input_ids"]
        run = assert_oracle_is_right(FIXTURES / name, FIXTURES / f"{name}-dflash", prompt, 48, [])
        assert run.steps < 0.8 * 47, "a trained drafter is right more often"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 11])
def test_budget(tmp_path: Path, max_new_tokens: int) -> None:
    target_dir, draft_dir = write_random_pair(tmp_path, dialect="qwen3", seed=8)
    run = assert_oracle_is_right(target_dir, draft_dir, PROMPT, max_new_tokens, [])
    assert len(run.output_ids) == max_new_tokens
    assert run.steps <= max_new_tokens - 1


@pytest.mark.parametrize("eos", range(0, VOCAB_SIZE, 2))
def test_eos_ends_the_output(tmp_path: Path, eos: int) -> None:
    target_dir, draft_dir = write_random_pair(tmp_path, dialect="gpt_oss", seed=6)
    run = assert_oracle_is_right(target_dir, draft_dir, PROMPT, 60, [eos])
    assert eos not in run.output_ids[:-1]
    assert run.output_ids[-1] == eos or len(run.output_ids) == 60
