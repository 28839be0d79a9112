# SPDX-License-Identifier: Apache-2.0
"""Typical mistakes: each answer says what is wrong and names the next command, without a repr or a traceback."""

import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.engines import trained_engine
from tests.paths import FIXTURES, REPOSITORY

DEPLOYMENT = "gpt-oss-120b.b300x8.latency"
DRAFT, TARGET, PROMPTS = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3", FIXTURES / "prompts.jsonl"
PAIR = f"DRAFT --target {TARGET} -o DIR/out"
MISTAKES = {
    # Typos and swapped words
    "serv engine": "No such command 'serv'. (Did you mean one of: 'search', 'serve'?)",
    "serve ENGINE --prot 8000": "No such option '--prot'. (Did you mean",
    "drafts openai/gpt-oss-12b": "no draft is known for openai/gpt-oss-12b",
    "inspect z-lab/Qwen3-8B-DFlash": "no files in the Hugging Face cache",
    "convert DRAFT -o DIR/out --to zlabs": "'zlabs' is not one of 'zlab', 'speculators', 'modelopt'",
    "quantize DRAFT -o DIR/out --recipe nvfp5": "(nearest recipe: nvfp4)",
    "generate ENGINE x --device gpu": "'gpu' is not one of 'auto', 'cpu', 'cuda'",
    "generate ENGINE x --dtype fp16": "'fp16' is not one of 'auto', 'float32', 'bfloat16'",
    "serve ENGINE --log-level verbose": "'verbose' is not one of 'debug', 'info', 'warning', 'error'",
    "serve ENGINE --config DIR/config.yaml": "dflash-trt serve has no option 'prot' (nearest option: port)",
    f"serve-config {DEPLOYMENT} --runtime tgi": "'tgi' is not one of 'trtllm', 'vllm', 'sglang'",
    f"serve-config {DEPLOYMENT} --runtime vllm --method medusa": "'medusa' is not one of 'dflash'",
    "serve-config gpt-oss-120b.b300x8.latancy --runtime vllm": f"(nearest name: {DEPLOYMENT})",
    f"serve-config {DEPLOYMENT} --runtime vllm --set max-num-foo=3": "max_num_foo: not known to this schema",
    "serve-config --list qwen9": "matches qwen9",
    "estimate gpt-oss --tau 3": "gpt-oss is neither a deployment file",
    "try nowhere": "nowhere is neither an engine directory nor a deployment",
    # Missing files and options
    "inspect DIR/nowhere": "neither a checkpoint directory nor a Hugging Face repository id",
    "inspect DIR": "config.json: no such file",
    "inspect DIR/text.txt": "expected a checkpoint directory or a GGUF file",
    "convert DIR/no -o DIR/out --to zlab": "neither a checkpoint directory",
    "quantize DRAFT -o DIR/out": "Missing option '--recipe'",
    "build DRAFT -o DIR/out": "Missing option '--target'",
    f"build DRAFT --target {TARGET}": "Missing option '-o' / '--output'",
    f"capture DRAFT --target {TARGET} -o DIR/f.safetensors": "Missing option '--prompts'",
    f"capture DRAFT --target {TARGET} -o DIR/f.safetensors --prompts DIR/no": "cannot read DIR/no: No such file",
    "verify ENGINE": "expected --prompts or --features",
    f"verify ENGINE --target {TARGET} --prompts DIR/no.jsonl": "cannot read DIR/no.jsonl",
    "verify ENGINE --features DIR/no.safetensors": "cannot read DIR/no.safetensors",
    "search DRAFT --features DIR/no.safetensors --max-tau-loss 1% -o DIR/r.yaml": "cannot read DIR/no.safetensors",
    "search DRAFT --max-tau-loss 1% -o DIR/r.yaml": "Missing option '--features'",
    "generate ENGINE": "give either PROMPT or --token-ids FILE",
    "generate DIR/nowhere x": "DIR/nowhere is not an engine directory: found nothing there",
    "chat DIR/nowhere": "DIR/nowhere is not an engine directory",
    "serve someone/unknown": "found the id of a Hugging Face repository, and no such directory",
    "serve Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16: no files in the Hugging Face cache",
    "serve ENGINE --api-key-file DIR/no.txt": "cannot read DIR/no.txt",
    "serve ENGINE --config DIR/no.yaml": "cannot read DIR/no.yaml",
    f"serve-config {DEPLOYMENT}": "Missing option '--runtime'. Choose from:",
    "serve-config DIR/no.yaml --runtime vllm": "neither a path here nor the name of a shipped deployment",
    "serve-config DIR/deployment.yaml --runtime vllm": "missing key draft",
    "serve-config openai/gpt-oss-120b --runtime vllm": "needs --gpus",
    f"serve-config {DEPLOYMENT} --runtime vllm --check DIR/no.sh": "cannot read DIR/no.sh",
    "serve-config --from DIR/no.sh --draft z-lab/gpt-oss-120b-DFlash": "cannot read DIR/no.sh",
    f"triton-repo {DEPLOYMENT}": "Missing option '-o' / '--output'",
    f"estimate {DEPLOYMENT} --acceptance DIR/no.json": "cannot read DIR/no.json",
    f"tune {DEPLOYMENT} --tau 4": "Missing option '--slo'",
    "bench run --prompts gsm8k -o DIR/run": "expected --endpoint NAME=URL or --engine",
    "bench report DIR/no -o DIR/report": "cannot read DIR/no/run.json",
    # Wrong values
    "inspect DRAFT --target DRAFT": "is a DFlash draft, not a target",
    f"build {TARGET} --target DRAFT -o DIR/out": "draft and target are swapped",
    f"build {PAIR} --gpu rtx5091": "expected sm80 (a100, a30)",
    f"build DRAFT --target {TARGET} -o ENGINE": "engine already exists",
    "quantize DRAFT -o DRAFT --recipe fp8": "would replace the draft itself",
    f"capture DRAFT --target {TARGET} --prompts DIR/text.txt -o DIR/f.safetensors": "text that is not JSON",
    f"verify DRAFT --target {TARGET} --prompts {PROMPTS}": "is not an engine directory: found a checkpoint",
    f"verify ENGINE --max-tau-loss 3 --prompts {PROMPTS}": "expected a share such as 3% or 0.03, found '3'",
    "generate ENGINE x --temperature -1": "temperature: expected 0 or more, found -1",
    f"generate ENGINE x --target {TARGET} --draft-length 99": "draft length: expected 0 to",
    f"generate ENGINE x --target {TARGET} --draft-length fast": "draft length: expected 0 to",
    f"generate ENGINE x --target {TARGET} --acceptance-rule typical": "no acceptance rule is called typical",
    f"generate ENGINE x --target {FIXTURES / 'tiny-gpt-oss'}": "was built for another target",
    f"generate ENGINE x --target {TARGET} --max-tokens 100000000": "prompt: expected at most 8192 tokens",
    "generate ENGINE --token-ids DIR/text.txt": "expected a list of token-id lists",
    "generate ENGINE x --no-thinking": "--no-thinking is for --chat",
    "chat ENGINE --chat-template-kwargs {": "expected a JSON object",
    "serve ENGINE --port 99999": "99999 is not in the range",
    "serve ENGINE --port BUSY": "is already in use",
    "serve ENGINE --host no.such.host.invalid": "is not an address of this machine",
    "serve ENGINE --cache-gib 0": "cache_gib: expected more than 0",
    f"serve {DEPLOYMENT}": "is a deployment, not an engine directory",
    "serve-config gpt-oss-120b --runtime vllm": "expected the whole name of a deployment",
    "serve-config openai/gpt-oss-120b --gpus b301x8 --runtime vllm": "(nearest GPU: b300)",
    "serve-config openai/gpt-oss-120b --gpus b300 --runtime vllm": "b300x1 is one of them",
    "serve-config openai/gpt-oss-120b --gpus b300x7 --runtime vllm": "expected a divisor of the 64 attention heads",
    "serve-config openai/gpt-oss-120b --gpus rtx5090x1 --runtime vllm": "use at least rtx5090x4, with",
    f"serve-config {DEPLOYMENT} --runtime vllm --check DIR/text.txt": "expected a mapping of vllm's arguments",
    f"estimate {DEPLOYMENT} --tau 0.5": "tau: expected 1 to 10",
    "bench run --endpoint a --prompts gsm8k -o DIR/run": "expected NAME=URL, found 'a'",
    "doctor localhost": "expected a URL as http://localhost:8000",
    "doctor localhost:1": "cannot connect to http://localhost:1/v1/models: Connection refused",
    "doctor --seconds 5": "--seconds is for a URL",
    "doctor ftp://x:1": "expected the URL of a server",
}
"""Words of a command, and a part of its answer. DRAFT, ENGINE, DIR and BUSY, a port in use, are replaced."""
SEARCHED = (
    "drafts openai/gpt-oss-12b", "try nowhere", "inspect z-lab/Qwen3-8B-DFlash", "inspect DIR/text.txt",
    "estimate gpt-oss --tau 3", "inspect DRAFT --target DRAFT", f"build DRAFT --target {TARGET} -o ENGINE",
    f"build {TARGET} --target DRAFT -o DIR/out", "serve ENGINE --port BUSY", f"serve {DEPLOYMENT}", "doctor ftp://x:1",
)  # fmt: skip
"""Mistakes whose whole answer, but for its values, is one literal on one line of the sources."""
NEXT = re.compile(r"\nhint: .|^hint: .|Try 'dflash-trt .*--help' for help\.", re.MULTILINE)
REPR = re.compile(r"PosixPath\(|<[\w.]+ object at|<class |Traceback|dict_keys|namespace\(|Error\(")


@cache
def literals() -> list[re.Pattern[str]]:
    """String literals of the package that stand on one line, with any text in the place of values: what grep finds."""
    found = []
    for file in (REPOSITORY / "dflash_trt").rglob("*.py"):
        for literal in re.findall(r'"((?:[^"\\\n]|\\.)+)"', file.read_text()):
            words = re.split(r"\{[^{}]*\}", literal)
            if len("".join(words)) >= 15:
                found.append(re.compile(".+".join(map(re.escape, words))))
    return found


@pytest.fixture(scope="module")
def busy() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_answer_names_the_next_command(
    mistake: str, busy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "config.yaml").write_text("prot: 8000\n")
    (tmp_path / "deployment.yaml").write_text("target: a/b\n")
    names = {"DIR": tmp_path, "DRAFT": DRAFT, "ENGINE": trained_engine("tiny-qwen3"), "BUSY": busy}

    def replaced(text: str) -> str:
        return re.sub(r"\b(DIR|DRAFT|ENGINE|BUSY)\b", lambda match: str(names[match[0]]), text)

    done = run(*map(replaced, mistake.split()))
    if mistake in SEARCHED:
        (sentence,) = re.findall(r"^error: (.*)$", done.stderr, re.MULTILINE)
        assert any(literal.fullmatch(sentence) for literal in literals()), sentence
    assert done.returncode in (1, 2), done.stderr
    assert replaced(MISTAKES[mistake]) in done.stderr
    assert NEXT.search(done.stderr), done.stderr
    assert not REPR.search(done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 60
