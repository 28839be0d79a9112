# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate` from the outside, with and without --tp; decoding itself is tested in tests/runtime."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from dflash_trt.api import chat_template
from dflash_trt.api.paired_speed import Pair, Timing, paired_speed
from dflash_trt.cli import decode
from dflash_trt.engine.manifest import sha256
from dflash_trt.errors import CheckpointError, DFlashError, EngineError, RequestError
from tests.checkpoint.samples import refusal
from tests.cli.commands import run, run_here
from tests.engines import trained_engine
from tests.fixtures_data import without_template
from tests.paths import FIXTURES, REPOSITORY
from tests.waiting import PATIENCE

TARGET = FIXTURES / "tiny-qwen3"
PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21]]


@pytest.fixture
def engine() -> Path:
    return trained_engine("tiny-qwen3")


@pytest.fixture(autouse=True)
def _one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SECONDS", 0.0)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(PROMPTS))
    return file


def test_json_of_token_ids(engine: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(
        "generate", engine, "--target", TARGET, "--token-ids", prompts, "--max-tokens", 20, "--ignore-eos",
        "--baseline", "--json",
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["schema"] == "dflash-trt/generate/1"
    assert len(document["requests"]) == len(PROMPTS)
    for request in document["requests"]:
        assert len(request["token_ids"]) == 20
        assert not request.keys() & {"prompt", "prompt_token_ids", "index", "others", "acceptance"}
        assert request["identical"] is True
        assert request["baseline"]["token_ids"] == request["token_ids"]
        assert request["baseline"]["steps"] == 19
        assert 1 <= request["steps"] <= 19
        assert request["tau"] == pytest.approx(19 / request["steps"])
        assert request["accepted"] + request["steps"] == 19
        assert request["accepted"] <= request["proposed"]
        assert isinstance(request["text"], str)


def test_text_goes_to_stdout_and_counts_to_stderr(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("generate", engine, "def add(", "--target", TARGET, "--max-tokens", 8, "--ignore-eos")
    captured = capsys.readouterr()
    assert captured.out.startswith("def add(")
    assert "tau" not in captured.out
    assert "8 tokens in " in captured.err
    assert "tokens/s" in captured.err


@pytest.mark.parametrize("tokens", [4, 2])
def test_speeds_are_compared_in_pairs(
    tokens: int, engine: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens leave no room for a draft: none is rejected."""
    options = ("--max-tokens", tokens, "--baseline", "--json")
    run_here("generate", engine, "--target", TARGET, "--token-ids", prompts, *options)
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert (speed["acceptance_length"] is None) == (tokens == 2)
    assert (speed["num_pairs"], speed["verdict"]) == (1, "not known")
    assert speed["slowest"] == speed["ratio"] == speed["fastest"]


def test_the_drafter_in_torch(engine: Path) -> None:
    command = ("generate", engine, "def add(", "--target", TARGET, "--max-tokens", 24, "--ignore-eos", "--json")
    outputs = [run(*command, "--executor", name).stdout for name in ("torch", "onnxruntime")]
    ours, theirs = (json.loads(output)["requests"][0] for output in outputs)
    assert ours["token_ids"] == theirs["token_ids"]
    assert abs(ours["steps"] - theirs["steps"]) <= 1


@pytest.mark.parametrize(
    ("seconds", "acceptance_length", "expected"),
    [
        (1.0, 3.0, "faster: 2.00x to 2.00x the speed of plain decoding (95 % interval, 16 pairs)"),
        (4.0, 2.5, "slower: 0.50x to 0.50x the speed of plain decoding (95 % interval, 16 pairs); its drafts cost more"
                   " than they bring here"),
        (4.0, 1.05, "slower: 0.50x to 0.50x the speed of plain decoding (95 % interval, 16 pairs); nearly every draft"
                    " is rejected; dflash-trt verify measures it and names possible causes"),
    ],
)  # fmt: skip
def test_a_slow_drafter_is_remarked_upon(seconds: float, acceptance_length: float, expected: str) -> None:
    pairs = [Pair(Timing(10, 2.0), Timing(10, seconds))] * 16
    assert decode.speed_line(paired_speed(pairs, acceptance_length), acceptance_length) == expected


def test_baseline_prints_both_texts_and_a_table(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("generate", engine, "def add(", "--target", TARGET, "--max-tokens", 8, "--ignore-eos", "--baseline")
    output = capsys.readouterr().out
    with_drafter, _, rest = output.partition("\nwithout the drafter:\n")
    without, _, table = rest.partition("\nidentical tokens")
    assert with_drafter.strip() == without.strip()
    for word in ("plain", "DFlash", "steps", "acceptance length (tau)", "pairs"):
        assert word in table


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read FILE: No such file or directory"),
        (b'[["a"]]', "FILE: expected a list of token-id lists, found Expected `int`, got `str` - at `$[0][0]`"),
        (b"[]", "FILE: expected at least one prompt, found an empty list"),
    ],
)
def test_wrong_token_ids(content: bytes | None, words: str, tmp_path: Path) -> None:
    """Said before any model is loaded: the engine and the target of this test do not exist."""
    file = tmp_path / "prompts.json"
    if content is not None:
        file.write_bytes(content)
    arguments = ("generate", tmp_path / "engine", "--target", tmp_path, "--token-ids", file)
    assert words.replace("FILE", str(file)) in refusal(lambda: run_here(*arguments), RequestError)


@pytest.mark.parametrize(
    ("engine", "prompt", "target", "error", "words"),
    [
        (FIXTURES / "nothing", "prompt", TARGET, EngineError, ["is not an engine directory: found "]),
        (None, "prompt", FIXTURES / "nothing", CheckpointError, ["neither a "]),
        (None, "<|mask|>", TARGET, RequestError, ["the prompt contains the draft's mask token"]),
        (None, os.fsdecode(b"def \xff"), TARGET, RequestError, ["prompt: expected Unicode text, found '\\udcff' at 4"]),
        (None, "prompt", FIXTURES / "tiny-gpt-oss", EngineError,
         ["was built for another target", "model_type: expected qwen3, found gpt_oss",
          "hint: give --target the model that the engine was built for"]),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded(
    engine: Path | None, prompt: str, target: Path, error: type[DFlashError], words: list[str]
) -> None:
    arguments = ("generate", engine or trained_engine("tiny-qwen3"), prompt, "--target", target)
    message = refusal(lambda: run_here(*arguments), error)
    for word in words:
        assert word in message


@pytest.mark.parametrize("take", [partial(run_here, name) for name in ("serve", "dynamo")])
def test_a_deployment_is_served_elsewhere(take: Callable[[str], object]) -> None:
    """`generate`, `chat`, `verify` and LLM run it in TensorRT-LLM; these only take engines."""
    message = refusal(lambda: take("gpt-oss-120b.b300x8.latency"), EngineError)
    assert "gpt-oss-120b.b300x8.latency is a deployment, not an engine directory" in message
    assert "dflash-trt serve-config gpt-oss-120b.b300x8.latency --runtime trtllm" in message


def requests(capsys: pytest.CaptureFixture[str], *command: object) -> list[dict[str, Any]]:
    run_here("generate", *command, "--target", TARGET, "--ignore-eos", "--json")
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["requests"]
    return found


def test_sampling_settings(engine: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A seed gives the same tokens with and without the drafter, one by one and in a batch."""
    command = [
        engine, "--token-ids", prompts, "--max-tokens", 8, "--temperature", 1, "--top-p", 0.9, "--seed", 7,
        "--logprobs",
    ]  # fmt: skip
    alone, batch = requests(capsys, *command), requests(capsys, *command, "--batch-size", 4, "--baseline")
    assert [request["token_ids"] for request in alone] == [request["token_ids"] for request in batch]
    assert all(request["identical"] for request in batch)
    assert all(len(request["logprobs"]) == 8 and max(request["logprobs"]) <= 0 for request in alone)
    assert {request["seed"] for request in alone} == {7}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "temperature: expected 0 or more, found -1"),
        ("--draft-length", "99", "draft length: expected 0 to 7, a schedule by batch size that begins at 1 (1:7,8:3)"),
        ("--cache-gib", "0.00001", "which is what 1e-05 GiB of cache hold"),
        ("--cache-gib", "0", "cache_gib: expected more than 0 and at most 1048576 GiB, found 0"),
        ("--max-tokens", "9999", "prompt: expected at most 8192 tokens (max_position_embeddings of the target)"),
        ("--device", "cuda", "device: expected a CUDA device, found none that torch"),
    ],
)
def test_settings_that_cannot_be_served(
    engine: Path, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Errors come before the target is loaded, except where its caches decide."""
    if option == "--device" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    if value != "0.00001":
        monkeypatch.setattr("dflash_trt.runtime.load.load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(DFlashError) as refused:
        run_here("generate", engine, "def", "--target", TARGET, option, value)
    assert message in refused.value.message
    assert capsys.readouterr().out == ""  # not even the prompt


def test_chat_needs_a_template(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_trt.runtime.load.load_model", lambda *_: pytest.fail("loaded"))
    target = without_template(TARGET.name, tmp_path)
    message = refusal(lambda: run_here("generate", engine, "def", "--chat", "--target", target), RequestError)
    assert "chat: expected a tokenizer with a chat template, found none" in message


def with_template(template: str, directory: Path) -> Path:
    target = without_template(TARGET.name, directory)
    (target / "chat_template.jinja").write_text(template)
    return target


TEMPLATE = "{{ messages[-1].content }} in {{ language }}{% if enable_thinking is false %}!{% endif %}"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_variables_of_the_chat_template(
    engine: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt that the model gets is the template's text; of `chat`, by what is encoded."""
    prompts: list[str] = []
    encode = chat_template.TemplateOptions.encode

    def record(self: Any, tokenizer: Any, messages: Any) -> list[int]:
        ids = encode(self, tokenizer, messages)
        prompts.append(tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(chat_template.TemplateOptions, "encode", record)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"sort")))
    words = (engine, "sort", "--chat") if command == "generate" else (engine,)
    options = ("--chat-template-kwargs", '{"language": "C"}', "--no-thinking", "--max-tokens", 1)
    run_here(command, *words, "--target", with_template(TEMPLATE, tmp_path), *options)
    assert prompts[-1] == "sort in C!"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chat", "--chat-template-kwargs", "[1]"), "expected a JSON object such as"),
        (("--chat", "--chat-template-kwargs", "{"), "expected a JSON object such as"),
        (("--chat-template-kwargs", "{}"), "--chat-template-kwargs is for --chat"),
        (("--no-thinking",), "--no-thinking is for --chat"),
    ],
)
def test_variables_that_are_none(engine: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        run_here("generate", engine, "def", *options)
    assert message in str(refused.value)


@pytest.mark.full
def test_libraries_say_nothing_and_record_nothing(engine: Path, tmp_path: Path) -> None:
    """At a terminal neither transformers' bars nor its warnings, one line of ours; no telemetry of onnxruntime."""
    leader, follower = os.openpty()
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    command = [sys.executable, "-m", "dflash_trt", "generate", engine, "def", "--target", TARGET, "--max-tokens", "2"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=follower, env=environment)
    os.close(follower)
    said = b""
    while piece := _read(leader):
        said += piece
    assert process.wait() == 0
    assert b"loading " in said
    for leak in (b"Loading", b"it/s", b"rope", b"Warning", b"100%"):
        assert leak not in said, said
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name or path.name == "deviceid"] == []


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # on Linux, the writing end was closed
        return b""


def test_a_batch_larger_than_memory_takes_the_slots_of_its_prompts(
    engine: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [engine, "--token-ids", prompts, "--max-tokens", 4, "--batch-size"]
    assert len(requests(capsys, *command, 2**31 - 1)) == len(PROMPTS)


@pytest.mark.parametrize("damage", ["link", "garbage"])
def test_an_engine_that_onnx_runtime_refuses(engine: Path, tmp_path: Path, damage: str) -> None:
    """Links as those of a Hugging Face cache, and a graph whose hash was written anew."""
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    if damage == "link":
        (copy / "model.safetensors").rename(tmp_path / "blob")
        (copy / "model.safetensors").symlink_to(tmp_path / "blob")
    else:
        (copy / "context.onnx").write_bytes(b"garbage")
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["sha256"]["context.onnx"] = sha256(copy / "context.onnx")
        (copy / "manifest.json").write_text(json.dumps(manifest))
    message = refusal(lambda: run_here("generate", copy, "def", "--target", TARGET), EngineError)
    assert f"{copy / 'context.onnx'}: expected a graph that onnxruntime " in message
    assert "hint: copy the engine with files instead of links" in message


SCRIPTS = f"{sys.prefix}/bin"


def answers(command: list[str], *options: str) -> list[dict[str, Any]]:
    pair = (str(trained_engine("tiny-gpt-oss")), "--target", str(FIXTURES / "tiny-gpt-oss"))
    arguments = [*command, "generate", *pair, "--max-tokens", "24", "--json", *options]
    result = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["requests"]  # type: ignore[no-any-return]


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "num_ranks"), [("torchrun", 2), ("mpiexec", 8)])
def test_ranks_give_the_tokens_of_one(tmp_path: Path, launcher: str, num_ranks: int) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps([list(range(40, 40 + length)) for length in (5, 90, 300)]))
    options = ("--token-ids", str(tmp_path / "prompts.json"), "--batch-size", "2", "--draft-length", "7")
    command = {
        "torchrun": [f"{SCRIPTS}/torchrun", "--nproc-per-node", str(num_ranks), "-m", "dflash_trt"],
        "mpiexec": [f"{SCRIPTS}/mpiexec", "-n", str(num_ranks), sys.executable, "-m", "dflash_trt"],
    }[launcher]
    one = answers([sys.executable, "-m", "dflash_trt"], *options)
    many = answers(command, *options, "--tp", str(num_ranks), "--baseline")
    assert [request["token_ids"] for request in many] == [request["token_ids"] for request in one]
    assert [request["steps"] for request in many] == [request["steps"] for request in one]
    assert all(request["identical"] for request in many)
