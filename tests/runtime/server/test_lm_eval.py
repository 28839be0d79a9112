# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness, as docs/serve.md runs it, against plain transformers; it needs an environment of its own."""

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

from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.server.process import started

pytestmark = pytest.mark.full
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
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, timeout=300,
    )  # fmt: skip
    lines = {name: next((work / "out").rglob(f"samples_{name}_*.jsonl")).read_text().splitlines() for name in TASKS}
    return {name: [json.loads(line) for line in lines[name]] for name in TASKS}


class Plain:
    """transformers alone."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def log_likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Of the continuation, and whether greedy decoding gives it."""
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            rows = self._model(ids).logits[0].log_softmax(-1)[len(context) - 1 : -1]
        picked = rows.gather(1, ids[0, len(context) :, None])
        return float(picked.sum()), rows.argmax(1).tolist() == continuation

    def pair(self, context: str, continuation: str) -> tuple[float, bool]:
        """As lm_eval encodes them: spaces that end the context belong to the continuation."""
        stripped = context.rstrip()
        num_context = len(self.tokenizer.encode(stripped))
        whole = self.tokenizer.encode(context + continuation)
        return self.log_likelihood(self.tokenizer.encode(stripped), whole[num_context:])

    def greedy(self, prompt: str) -> str:
        ids = self.tokenizer.encode(prompt)
        with torch.no_grad():
            output = self._model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        return str(self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)).partition("\n\n")[0]


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
