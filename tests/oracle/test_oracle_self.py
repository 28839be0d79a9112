"""The transformers oracle against plain greedy decoding and against the loop written from the definition."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracle.random_pairs import write_random_pair
from tests.oracle.transformers_dflash import OracleRun, dflash_greedy, load_assistant, load_target, plain_greedy
from tests.reference.decode_loop import reference_greedy
from tests.reference.synthetic import Dialect

PAIRS = [("gpt_oss", 1), *(pytest.param(*pair, marks=pytest.mark.full) for pair in (
    ("qwen3", 0), ("qwen3", 5), ("qwen3", 8), ("gpt_oss", 6), ("gpt_oss", 10),
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
