# SPDX-License-Identifier: Apache-2.0
"""`spec_generate` returns what z-lab's method of that name does: tokens, shape, and the end of the answer."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dflash_trt import spec_generate
from dflash_trt.errors import CheckpointError, EngineError, RequestError
from tests.engines import trained_engine
from tests.fixtures_data import prompts
from tests.oracle.transformers_dflash import load_target, plain_greedy
from tests.paths import FIXTURES

TARGET, DRAFT = FIXTURES / "tiny-qwen3", FIXTURES / "tiny-qwen3-dflash"
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_target(TARGET)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache of this module's own; the engine is built once in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def ids_of(prompt: list[int]) -> torch.Tensor:
    return torch.tensor([prompt])


def ending(tokens: list[int], stop: list[int]) -> list[int]:
    """Tokens up to the first stop token, which stays."""
    ends = [index for index, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("draft", [DRAFT, "engine"])
def test_the_answer_is_plain_decoding_up_to_the_first_stop_token(draft: Any, target: PreTrainedModel) -> None:
    draft = trained_engine("tiny-qwen3") if draft == "engine" else draft
    prompt = prompts(TARGET)[0]
    plain = plain_greedy(target, prompt, NUM_TOKENS, [])
    for stop in (None, [], plain[20:21], [plain[30], plain[7]]):
        found = spec_generate(draft, target, ids_of(prompt), NUM_TOKENS, stop_token_ids=stop)
        assert found.dtype == torch.int64
        assert found.tolist() == [prompt + ending(plain, stop or [])]


def test_end_of_sequence_is_no_stop_token_of_its_own(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(TARGET)[1]
    plain = plain_greedy(target, prompt, 12, [])
    monkeypatch.setattr(target.generation_config, "eos_token_id", plain[4])
    assert spec_generate(DRAFT, target, ids_of(prompt), 12).tolist() == [prompt + plain]


def test_a_chat_as_the_tokenizer_returns_it(target: PreTrainedModel) -> None:
    """A named target is loaded; a loaded one keeps its weights and its way of computing."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Sort a list."}], return_tensors="pt", add_generation_prompt=True
    )
    implementation, weights = target.config._attn_implementation, len(list(target.parameters()))
    arguments: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": [tokenizer.eos_token_id]}
    loaded = spec_generate(DRAFT, target, chat, **arguments)
    assert torch.equal(loaded, spec_generate(DRAFT, str(TARGET), chat["input_ids"], **arguments))
    assert (target.config._attn_implementation, len(list(target.parameters()))) == (implementation, weights)


def test_torch_seeds_what_is_drawn(target: PreTrainedModel) -> None:
    def draw(seed: int) -> list[int]:
        torch.manual_seed(seed)
        tokens: list[int] = spec_generate(DRAFT, target, ids_of([5, 6, 7]), 16, temperature=1.5)[0].tolist()
        return tokens

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    "given", [[5, 6], torch.tensor([5, 6]), torch.tensor([[5], [6]]), torch.tensor([[5.0]]), {"ids": 1}, None], ids=str
)
def test_other_prompts_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match=r"input_ids: expected a tensor of token ids of shape \[1, P\]"):
        spec_generate(DRAFT, TARGET, given, 4)


def test_pairs_that_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    prompt = ids_of([5, 6])
    with pytest.raises(RequestError, match="draft: expected a directory or a repository id, found Qwen3ForCausalLM"):
        spec_generate(target, TARGET, prompt, 4)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="target: expected a directory, a repository id or a transformers model"):
        spec_generate(DRAFT, 3, prompt, 4)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="its target is not known"):
        spec_generate(DRAFT, None, prompt, 4)
    with pytest.raises(EngineError, match="is not an engine directory"):
        spec_generate(tmp_path, TARGET, prompt, 4)
    other = load_target(FIXTURES / "tiny-gpt-oss")
    other.name_or_path = str(TARGET)
    with pytest.raises(CheckpointError, match=r"target: expected a qwen3 model \(.*\), found a gpt_oss model"):
        spec_generate(DRAFT, other, prompt, 4)
    shorter = load_target(TARGET)
    shorter.config.num_hidden_layers = 3
    with pytest.raises(CheckpointError, match=r"target: num_hidden_layers: expected 4 .* found 3"):
        spec_generate(DRAFT, shorter, prompt, 4)


@pytest.mark.full
@pytest.mark.skipif(find_spec("dflash") is None, reason="z-lab's package: pip install --no-deps dflash==0.1.0")
def test_tokens_equal_the_packages_own(target: PreTrainedModel) -> None:
    from dflash.model import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(DRAFT, dtype=torch.float32).eval()
    for prompt in prompts(TARGET)[:16]:
        for stop in (None, [0, 17]):
            theirs = model.spec_generate(target, ids_of(prompt), NUM_TOKENS, stop)
            assert spec_generate(DRAFT, target, ids_of(prompt), NUM_TOKENS, stop_token_ids=stop).equal(theirs)


@pytest.mark.full
def test_a_bfloat16_model_decodes_in_its_own_type() -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    found = spec_generate(DRAFT, model, ids_of([5, 6, 7]), 16)
    assert found.shape == (1, 19)
    assert model.dtype == torch.bfloat16
