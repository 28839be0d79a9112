# SPDX-License-Identifier: Apache-2.0
"""Every argument of vLLM's Python API: taken at its default there, else one RequestError with our name for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt import llm as api
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.api.vllm_names import RENAMED
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.llm import LLM
from tests.checkpoint.samples import refusal
from tests.llm.serving import PROMPTS, greedy, within

# Names and defaults of vLLM 0.33.0 (wheel of the package index): entrypoints/llm.py, sampling_params.py.
INIT = {
    **dict.fromkeys(
        (
            "tokenizer", "allowed_media_domains", "quantization", "revision", "tokenizer_revision", "chat_template",
            "offload_params", "hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config",
            "structured_outputs_config", "profiler_config", "attention_config", "kv_cache_memory_bytes",
            "compilation_config", "quantization_config", "logits_processors", "spec_method", "spec_model",
            "spec_tokens",
        )
    ),
    "runner": "auto", "convert": "auto", "tokenizer_mode": "auto", "skip_tokenizer_init": False,
    "trust_remote_code": False, "allowed_local_media_path": "", "tensor_parallel_size": 1, "dtype": "auto", "seed": 0,
    "gpu_memory_utilization": 0.92, "cpu_offload_gb": 0, "offload_group_size": 0, "offload_num_in_group": 1,
    "offload_prefetch_step": 1, "enforce_eager": False, "enable_return_routed_experts": False,
    "return_sampling_mask": False, "disable_custom_all_reduce": False,
}  # fmt: skip
GENERATE: dict[str, Any] = {
    "use_tqdm": True, "lora_request": None, "priority": None, "tokenization_kwargs": None, "mm_processor_kwargs": None,
}  # fmt: skip
CHAT = GENERATE | {
    "chat_template": None, "chat_template_content_format": "auto", "add_generation_prompt": True,
    "continue_final_message": False, "tools": None, "chat_template_kwargs": None,
}  # fmt: skip
SETTINGS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "watermarking": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None,
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "prompt_logprob_token_ids": None, "prompt_logprob_start": None, "logprob_token_ids": None, "flat_logprobs": False,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "output_kind": None, "stream_interval": None, "skip_clone": False,
    "output_text_buffer_length": 0, "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None,
    "extra_args": None, "bad_words": None, "skip_reading_prefix_cache": None, "thinking_token_budget": None,
    "repetition_detection": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
}  # fmt: skip
STRANGE = object()
USER = [{"role": "user", "content": "def f("}]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What LLM() would open."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(api, "open_engine", lambda *arguments: calls.append(arguments))
    return calls


def test_the_defaults_of_llm_change_nothing(opened: list[tuple[Any, ...]]) -> None:
    LLM(model="engine", **INIT)
    assert opened == [("engine", None, RuntimeOptions())]


def test_arguments_that_mean_something_here(opened: list[tuple[Any, ...]]) -> None:
    LLM("engine", max_num_seqs=3, spec_tokens=5, enforce_eager=True)
    assert opened == [("engine", None, RuntimeOptions(max_batch_size=3, draft_length=5))]
    message = refusal(lambda: LLM("engine", model="engine"), RequestError)
    assert message.startswith("model: expected either it or engine, found both")
    assert "found both" in refusal(lambda: LLM("engine", max_batch_size=2, max_num_seqs=2), RequestError)


def test_every_other_value_of_llm_is_named(opened: list[tuple[Any, ...]]) -> None:
    arguments = load_schema("vllm", "0.33.0").properties("serve")
    assert len(arguments) > 300
    for name in {*INIT, *arguments} - {"model", "spec_tokens"}:  # an engine, and what loading it checks
        message = refusal(lambda name=name: LLM("engine", **{name: STRANGE}), RequestError)
        assert message.startswith(f"{RENAMED.get(name, name)}: ")
    assert opened == []


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_is_taken_or_named(name: str) -> None:
    SamplingParams(**{name: SETTINGS[name]})
    assert name in refusal(lambda: SamplingParams(**{name: STRANGE}), RequestError)


def test_what_errors_say(engine: Path) -> None:
    ours = {"tensor_parallel_size": "--tp N", "x": "LLM(eng", "seed": "of SamplingParams", "top_k": "of SamplingParams"}
    for name, hint in ours.items():
        message = refusal(lambda name=name: LLM(engine, **{name: 4}), RequestError)
        assert message.startswith(f"{name}: ")
        assert hint in message
    assert "tensor_parallel_size: expected 1, found 4" in refusal(
        lambda: LLM(engine, tensor_parallel_size=4), RequestError
    )
    assert "ignore_eos" in refusal(lambda: SamplingParams(min_tokens=2), RequestError)  # type: ignore[call-arg]
    message = refusal(lambda: SamplingParams(max_token=2), RequestError)  # type: ignore[call-arg]
    assert message.startswith("max_token: SamplingParams has no such argument")
    assert "max_tokens" in message


def test_a_repository_in_the_place_of_an_engine() -> None:
    assert "--target openai/gpt-oss-120b" in refusal(lambda: LLM(model="openai/gpt-oss-120b"), EngineError)


def test_requests_as_vllm_takes_them(llm: LLM) -> None:
    plain = within(lambda: llm.generate(PROMPTS[0], greedy(4)))
    assert [each.outputs[0].text for each in plain] == [plain[0].text] == [plain.text]
    given = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": [5, 6], "prompt": "text"}]
    text, ids = within(lambda: llm.generate(given, greedy(4), **GENERATE))
    assert (text.token_ids, text.prompt, ids.prompt) == (plain.token_ids, PROMPTS[0], [5, 6])
    assert text.prompt_token_ids == llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    assert (ids.prompt_token_ids, ids.finished) == ([5, 6], True)
    for name in GENERATE.keys() - {"use_tqdm"}:
        assert name in refusal(lambda name=name: llm.generate(PROMPTS[0], **{name: STRANGE}), RequestError)
        assert name in refusal(lambda name=name: llm.chat(USER, **{name: STRANGE}), RequestError)


def test_several_answers_to_a_prompt(llm: LLM) -> None:
    drawn = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    both = within(lambda: llm.generate([PROMPTS[0], PROMPTS[1]], SamplingParams(n=3, **drawn)))
    assert [[each.index for each in answer.outputs] for answer in both] == [[0, 1, 2]] * 2
    for index, answer in enumerate(both[1].outputs):
        alone = within(lambda i=index: llm.generate(PROMPTS[1], SamplingParams(**drawn | {"seed": 3 + i})))
        assert (answer.token_ids, answer.prompt) == (alone.token_ids, PROMPTS[1])
    with pytest.raises(RequestError, match="n: expected 1 in a stream, found 2"):
        next(llm.stream(PROMPTS[0], SamplingParams(n=2)))


def test_numbers_of_log_probabilities(llm: LLM) -> None:
    assert SamplingParams(logprobs=0) == SamplingParams(logprobs=True)
    assert SamplingParams(prompt_logprobs=3) == SamplingParams(prompt_logprobs=True, top_logprobs=3)
    answer = within(lambda: llm.generate(PROMPTS[0], greedy(2, logprobs=4)))
    assert [len(top) for top in answer.top_logprobs or []] == [4, 4]


def test_chat_as_vllm_takes_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{{ extra }}{% for t in tools or [] %}{{ t.name }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)

    def prompt(messages: Any = USER, **options: Any) -> str:
        answer = within(lambda: llm.chat(messages, greedy(1), **options))
        return str(llm.get_tokenizer().decode(answer.prompt))

    assert prompt(**CHAT) == "<user>def f(<a>"
    assert prompt(
        [{"role": "user", "content": [{"type": "text", "text": "def "}, {"type": "text", "text": "f("}]}]
    ) == ("<user>def f(<a>")
    assert prompt(chat_template_kwargs={"extra": "!"}, tools=[{"name": "x"}]) == "<user>def f(!x<a>"
    assert prompt(add_generation_prompt=False) == "<user>def f("
    assert prompt(chat_template="{{ messages[0].content }}") == "def f("
    begun = [*USER, {"role": "assistant", "content": "x"}]
    assert prompt(begun, add_generation_prompt=False, continue_final_message=True) == "<user>def f(<assistant>x"
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        llm.chat(begun, continue_final_message=True)
    with pytest.raises(RequestError, match="content parts"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])
    assert len(within(lambda: llm.chat([USER, USER], greedy(1)))) == 2


class Bar:
    """As tqdm."""

    def __init__(self, total: int, desc: str) -> None:
        self.total, self.count, self.is_closed = total, 0, False

    def update(self, by: int) -> None:
        self.count += by

    def close(self) -> None:
        self.is_closed = True


def test_a_bar_of_ones_own(llm: LLM) -> None:
    made: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        made.append(Bar(**arguments))
        return made[-1]

    within(lambda: llm.generate(PROMPTS, greedy(2), use_tqdm=make))
    assert [(bar.total, bar.count, bar.is_closed) for bar in made] == [(len(PROMPTS), len(PROMPTS), True)]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_bar_on_a_terminal(is_asked: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    real = api.progress_bar
    monkeypatch.setattr(api, "progress_bar", lambda total, label: shown.append(total) or real(total, label))
    monkeypatch.setattr(api.sys.stderr, "isatty", lambda: True, raising=False)
    within(lambda: llm.generate(PROMPTS, greedy(2), use_tqdm=is_asked))
    within(lambda: llm.generate(PROMPTS[0], greedy(2), use_tqdm=is_asked))
    assert shown == [len(PROMPTS)] * is_asked
