# SPDX-License-Identifier: Apache-2.0
"""Runs AIPerf (https://github.com/ai-dynamo/aiperf), a program of the extra `aiperf` or of another environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflash_trt.errors import EndpointError, MissingDependencyError, cut
from dflash_trt.files.read import open_file
from dflash_trt.observe.bench.load.aiperf_export import RECORDS, first_error
from dflash_trt.observe.bench.prompts.conversation import Conversation
from dflash_trt.observe.bench.run_record import Arrivals, RequestSettings
from dflash_trt.observe.servers.local_server import child_process

VERSION = "0.13.0"
"""Release whose exports `aiperf_export` reads."""
INSTALL = "pip install 'dflash-trt[aiperf]'; --aiperf FILE takes that of another environment"
POLL_SECONDS = 0.5
LOG_TAIL_BYTES = 64 * 2**10
TOKENIZER = {
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}',
    "tokenizer.json": b'{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,'
    b' "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,'
    b' "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}',
}
"""AIPerf insists on a tokenizer, although the server's own token counts are used."""


def find_aiperf(program: Path | None) -> Path:
    """`program`, or the one on PATH; raises MissingDependencyError without release VERSION."""
    if program is None and (on_path := shutil.which("aiperf")) is not None:
        program = Path(on_path)
    if program is None:
        raise MissingDependencyError(f"bench run needs AIPerf {VERSION}, and no aiperf is on PATH", hint=INSTALL)
    words: list[str] = []
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        words = subprocess.run(  # noqa: S603  # the program that the user names
            [str(program), "--version"], capture_output=True, text=True, timeout=120, check=True
        ).stdout.split()
    if words[-1:] != [VERSION]:
        raise MissingDependencyError(
            f"{program}: expected aiperf {VERSION}, found {cut(words[-1]) if words else 'no version'}", hint=INSTALL
        )
    return program.absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class AiperfLoad:
    """The load on one server at one concurrency."""

    url: str
    model: str
    prompts: Sequence[Conversation]
    request: RequestSettings
    concurrency: int
    seed: int
    timeout_seconds: float
    api_key: str | None = None
    goodput: str | None = None
    arrivals: Arrivals | None = None
    """None: closed loop."""

    @property
    def is_replayed(self) -> bool:
        """Whether prompts begin at their timestamps."""
        return self.arrivals is not None and self.arrivals.request_rate is None

    @property
    def num_requests(self) -> int:
        """Planned requests; a conversation ends early if one of its requests fails."""
        return sum(prompt.num_requests for prompt in self.prompts)


def body_fields(request: RequestSettings, seed: int) -> dict[str, object]:
    """All fields of a request's body except the prompt."""
    fields: dict[str, object] = {"max_tokens": request.max_tokens, "temperature": request.temperature}
    if request.temperature > 0:
        fields["seed"] = seed
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking == "on"}
    return fields | request.extra


def _arrivals(arrivals: Arrivals | None) -> list[str]:
    """AIPerf's options of an open loop."""
    if arrivals is None:
        return []
    if arrivals.request_rate is None:
        return ["--fixed-schedule", "--fixed-schedule-auto-offset"]
    return ["--request-rate", f"{arrivals.request_rate:g}", "--arrival-pattern", arrivals.arrival_pattern]


def command(program: Path, load: AiperfLoad, prompts: Path, tokenizer: Path, output: Path) -> list[str]:
    """AIPerf's command line; without the key, because other users may see the words."""
    return [
        str(program), "profile",
        "--model", load.model, "--url", load.url,
        "--endpoint-type", "chat" if load.request.template == "chat" else "completions",
        "--streaming", "--use-server-token-count", "--tokenizer", str(tokenizer),
        "--custom-dataset-type", "mooncake-trace" if load.is_replayed else "multi-turn", "--input-file", str(prompts),
        "--dataset-sampling-strategy", "sequential", "--conversation-num", str(len(load.prompts)),
        "--concurrency", str(load.concurrency), *_arrivals(load.arrivals),
        *(["--goodput", load.goodput] if load.goodput is not None else []),
        "--random-seed", str(load.seed),
        "--extra-inputs", msgspec.json.encode(body_fields(load.request, load.seed)).decode(),
        "--request-timeout-seconds", str(load.timeout_seconds),
        "--no-gpu-telemetry", "--no-server-metrics", "--ui-type", "none",
        "--output-artifact-dir", str(output),
    ]  # fmt: skip


def run_load(program: Path, load: AiperfLoad, output: Path, progress: Callable[[int], None]) -> None:
    """Runs AIPerf with exports to `output`; `progress` gets the number of answers. Raises EndpointError."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    inputs = output / "inputs"
    _write_inputs(inputs, load)
    words = command(program, load, inputs / "prompts.jsonl", inputs, output)
    environment = _environment(load.api_key)
    with (
        (output / "aiperf.log").open("wb") as log,
        child_process(words, log.fileno(), environment=environment) as process,
    ):
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                break
            progress(_num_lines(output / RECORDS))
    shutil.rmtree(inputs)
    (output / "inputs.json").unlink(missing_ok=True)  # AIPerf's copy of the prompts, whose licence may forbid copies
    if process.returncode:
        raise _failure(output, process.returncode)
    progress(_num_lines(output / RECORDS))


def _write_inputs(folder: Path, load: AiperfLoad) -> None:
    folder.mkdir()
    for name, content in TOKENIZER.items():
        (folder / name).write_bytes(content)
    with (folder / "prompts.jsonl").open("wb") as file:
        for prompt in load.prompts:
            turns = [{"role": turn.role, "text": turn.content} for turn in prompt.turns]
            line = _replayed(prompt, load) if load.is_replayed else {"session_id": prompt.id, "turns": turns}
            file.write(msgspec.json.encode(line) + b"\n")


def _replayed(prompt: Conversation, load: AiperfLoad) -> dict[str, object]:
    """A line of a Mooncake trace, the form in which AIPerf replays timestamps."""
    line: dict[str, object] = {"session_id": prompt.id, "timestamp": prompt.timestamp}
    if load.request.template == "completions":
        return line | {"text_input": prompt.turns[0].content}
    return line | {"messages": prompt.turns}


def _environment(api_key: str | None) -> dict[str, str]:
    """HF_HUB_OFFLINE makes AIPerf refuse a tokenizer that is a directory."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return environment if api_key is None else environment | {"AIPERF_INJECTED_API_KEY": api_key}


def _num_lines(file: Path) -> int:
    if not file.exists():  # not begun
        return 0
    with open_file(file, EndpointError) as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(2**20), b""))


def _failure(output: Path, code: int) -> EndpointError:
    """AIPerf's last error, and the first request's."""
    log = output / "aiperf.log"
    with open_file(log, EndpointError) as stream:
        stream.seek(-min(log.stat().st_size, LOG_TAIL_BYTES), os.SEEK_END)
        lines = stream.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
    errors = [line.split(" ERROR ", 1)[1].strip() for line in lines if " ERROR " in line]
    error = first_error(output)
    why = "" if error is None else f" (the first error: {error})"
    return EndpointError(
        f"{output}: AIPerf failed: {cut(errors[-1]) if errors else f'exit code {code}'}{why}", hint=f"{log} says more"
    )
