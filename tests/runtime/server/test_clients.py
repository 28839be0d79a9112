# SPDX-License-Identifier: Apache-2.0
"""Clients that are not OpenAI's: `dflash-trt doctor URL`, its endpoint client, and lm_eval."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_trt import __version__
from dflash_trt.errors import EndpointError
from dflash_trt.llm import LLM
from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup, ProbePrompt, prompts
from dflash_trt.observe.diagnosis.prober import OUT_OF_TIME, Prober, chats, group
from dflash_trt.observe.diagnosis.probes import plain
from dflash_trt.observe.diagnosis.speed import speeds
from dflash_trt.observe.endpoints.answer_stream import Answer
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from tests.cli.commands import run
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.server.live import MODEL, Live, serving, started
from tests.waiting import PATIENCE

TARGET = FIXTURES / "tiny-qwen3"
ROWS = [
    {"question": "for i in range(", "choices": ["10):", "n):\n", "lambda"], "answer": 1},
    {"question": "class A:\n    def ", "choices": ["__init__(self):", "f(x):", "return"], "answer": 0},
    {"question": "é = 'ü'; print(", "choices": ["é)", "x)", "1"], "answer": 0},
    {"question": "return x + ", "choices": ["1", "y", "self.x"], "answer": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generate": {
        "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False, "temperature": 0},
    },
}  # fmt: skip


def run_tasks(url: str, work: Path) -> dict[str, list[Any]]:
    """Each task's samples: arguments and answers."""
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / "rows.jsonl")}}}
        texts = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
        document = {"task": name, "test_split": "test", **data, **texts, **task}
        (work / f"{name}.yaml").write_text(json.dumps(document))  # JSON is YAML
    arguments = f"model=engine,base_url={url}/v1/completions,tokenizer={TARGET},tokenizer_backend=huggingface"
    subprocess.run(
        [
            "lm_eval", "--model", "local-completions", "--tasks", ",".join(TASKS), "--batch_size", "8",
            "--include_path", work, "--log_samples", "--output_path", work / "out", "--model_args", arguments,
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, timeout=PATIENCE,
    )  # fmt: skip
    lines = {name: next((work / "out").rglob(f"samples_{name}_*.jsonl")).read_text().splitlines() for name in TASKS}
    return {name: [json.loads(line) for line in lines[name]] for name in TASKS}


class Plain:
    """transformers alone."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def log_likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log likelihood of the continuation, and whether greedy decoding gives it."""
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            rows = self._model(ids).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        picked = rows.gather(1, ids[0, len(context) :, None])
        return float(picked.sum()), rows.argmax(1).tolist() == continuation

    def pair(self, context: str, continuation: str) -> tuple[float, bool]:
        """Encoded as lm_eval does: spaces that end the context belong to the continuation."""
        stripped = context.rstrip()
        num_context = len(self.tokenizer.encode(stripped))
        whole = self.tokenizer.encode(context + continuation)
        return self.log_likelihood(self.tokenizer.encode(stripped), whole[num_context:])

    def greedy(self, prompt: str) -> str:
        ids = self.tokenizer.encode(prompt)
        with torch.no_grad():
            output = self._model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        return str(self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)).partition("\n\n")[0]


@pytest.mark.full
def test_lm_eval_sees_what_transformers_computes(tmp_path: Path) -> None:
    if shutil.which("lm_eval") is None:
        pytest.skip("no lm_eval on PATH: `pip install 'lm_eval[api]' transformers` in an environment of its own")
    with started(trained_engine("tiny-qwen3"), TARGET, tmp_path / "log") as process:
        samples = run_tasks(process.await_url(), tmp_path)
    plain = Plain()
    pairs = [
        (tuple(arguments.values()), answer[0])
        for sample in samples["choice"]
        for arguments, answer in zip(sample["arguments"].values(), sample["resps"], strict=True)
    ]
    assert len(pairs) == 3 * len(ROWS)
    assert {str(is_greedy) for _, (_, is_greedy) in pairs} == {"True", "False"}
    for (context, continuation), (found, is_greedy) in pairs:
        expected, expected_greedy = plain.pair(context, continuation)
        assert float(found) == pytest.approx(expected, abs=1e-3)
        assert str(is_greedy) == str(expected_greedy)
    for sample in samples["rolling"]:
        (text,) = sample["arguments"]["gen_args_0"].values()
        prefix = [plain.tokenizer.eos_token_id]
        expected, _ = plain.log_likelihood(prefix, plain.tokenizer.encode(text))
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-3)
    for sample in samples["generate"]:
        assert sample["resps"][0][0] == plain.greedy(sample["arguments"]["gen_args_0"]["arg_0"])
    assert all(len(samples[name]) == len(ROWS) for name in TASKS)


def test_it_is_known(live: Live) -> None:
    with Client(f"{live.url}/v1") as client:
        found = identify(client)
    assert (found.kind, found.version, found.model) == ("dflash-trt", __version__, MODEL)
    assert found.max_model_len == live.llm.backend.max_length


def test_a_streamed_answer_and_its_acceptance(live: Live) -> None:
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 30, "temperature": 0}
    whole = live.complete(**body)
    before = live.llm.metrics()
    with Client(live.url) as client, acceptance_during(meter(client, identify(client))) as end:
        answer = client.answer(body, is_chat=False)
        found = end()
    after = live.llm.metrics()
    assert (answer.text, answer.finish) == (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"])
    assert answer.output_tokens == whole["usage"]["completion_tokens"]
    assert answer.input_tokens == whole["usage"]["prompt_tokens"]
    assert 0 < answer.emitted[0] <= answer.emitted[-1] <= answer.seconds
    for name in ("drafting_passes", "proposed", "accepted"):
        assert getattr(found.counts, name) == getattr(after.acceptance, name) - getattr(before.acceptance, name)
    assert found.output_tokens == after.output_tokens - before.output_tokens == answer.output_tokens
    assert sum(found.counts.accepted_by_position) == found.counts.accepted
    assert answer.acceptance.counts == found.counts


def test_a_chat(live: Live) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "temperature": 0}
    with Client(live.url) as client:
        answer = client.answer(body, is_chat=True)
    message = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert (answer.text, answer.reasoning) == (message["content"] or "", message.get("reasoning_content") or "")


def test_a_refusal_says_what_the_server_said(live: Live) -> None:
    with Client(live.url) as client, pytest.raises(EndpointError, match="top_logprobs") as error:
        client.answer({"model": MODEL, "prompt": "x", "top_logprobs": 3}, is_chat=False)
    assert error.value.status == 400


FIELDS = ("prompt", "text", "output_tokens", "acceptance", "tau_of_drafting_passes")


def some(asker: Prober) -> ProbeGroup:
    questions = list(prompts().short.items())[:3]

    def ask(name: str, question: ProbePrompt) -> object:
        return lambda: asker.ask(name, question, max_tokens=24)

    return group("some", [ask(name, question) for name, question in questions])  # type: ignore[misc]


def test_a_probe_counts_what_the_server_counts(live: Live) -> None:
    """From the figures of each request, and from the counters around it: the same, to the last token."""
    before = live.llm.metrics()
    with Client(live.url) as client:
        runtime = identify(client)
        assert chats(client, runtime)
        asked = live.llm.metrics()
        asker = Prober(client, runtime, is_chat=False, seconds=PATIENCE)
        found = some(asker)
        after = live.llm.metrics()
        asker._has_own_figures = False
        counted = some(asker)
        undrafted = group("plain", [lambda: asker.ask("p", prompts().short["gcd"], max_tokens=5, draft_length=0)])
    assert asked.finished != before.finished  # whether it chats was asked
    for name in ("drafting_passes", "proposed", "accepted"):
        served = getattr(after.acceptance, name) - getattr(asked.acceptance, name)
        assert getattr(found.acceptance, name) == served > 0
    assert sum(s.output_tokens for s in found.samples) == after.output_tokens - asked.output_tokens
    for one, other in zip(found.samples, counted.samples, strict=True):
        assert [getattr(one, name) for name in FIELDS] == [getattr(other, name) for name in FIELDS]
    assert asker.foreign_tokens == 0
    assert (undrafted.acceptance.drafting_passes, undrafted.tau_of_drafting_passes) == (0, None)


def test_others_tokens_are_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=False, seconds=PATIENCE)
        asker._has_own_figures = False
        answer = client.answer

        def beside(*arguments: Any, **named: Any) -> Answer:
            live.complete(prompt="import os", max_tokens=7, temperature=0, ignore_eos=True)
            return answer(*arguments, **named)

        monkeypatch.setattr(client, "answer", beside)
        some(asker)
    assert asker.foreign_tokens == 3 * 7


def test_the_time_is_bounded(live: Live) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=False, seconds=0)
        assert (plain(asker).samples, plain(asker).why_not) == ([], OUT_OF_TIME)


def test_what_the_server_refuses_ends_the_probe(live: Live) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=True, seconds=PATIENCE)
        question = prompts().short["tea"]
        refused = group("thinking", [lambda: asker.ask("tea", question, max_tokens=4, best_of=2)])
    assert refused.samples == []
    assert refused.why_not.startswith("the server refuses it: ")
    assert "best_of" in refused.why_not


@pytest.mark.full
def test_a_busy_server_is_named_as_busy(llm: LLM) -> None:
    """A probe that gets 429 is no verdict: the load is left out by name, and a first probe ends the command."""
    with serving(llm, max_waiting=0) as live:
        with Client(live.url) as client:
            found, why_not = speeds(Prober(client, identify(client), is_chat=False, seconds=PATIENCE), [None])
        assert {speed.concurrency for speed in found} == {1}
        assert why_not == "the server refuses 16 requests at a time"
        admission = live.endpoints.admission
        with admission.admit(2, "one"), admission.admit(2, "another"):
            result = run("doctor", live.url, "--no-load")
        assert (result.returncode, result.stdout) == (1, "")
        assert "429" in result.stderr
