# SPDX-License-Identifier: Apache-2.0
"""The Python API: prompts in, completions out, many requests at once."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflash_trt.api.backend import Chunk, DecoderMetrics, Prompt, run
from dflash_trt.api.chat_template import Messages, encode_chat, is_prompt
from dflash_trt.api.completion import Completion
from dflash_trt.api.fields import refusal
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.api.signature import takes
from dflash_trt.deploy.deployment_file import Method, deployment_path
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.progress_display import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.runtime.embedded_backend import EmbeddedBackend
    from dflash_trt.trtllm.llm_backend import TrtllmBackend

Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each."""
Given = Prompt | Mapping[str, Any]
"""A prompt, also as {"prompt": text} or {"prompt_token_ids": ids}."""
Bar = bool | Callable[..., Any]
"""Whether to show a progress bar, or a function that makes one, like tqdm."""


class LLMArguments(RuntimeOptions, frozen=True):
    """Arguments of LLM: an engine directory, a deployment or a draft, its target, and the settings of the runtime."""

    engine: str | Path
    target: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, path in (("engine", self.engine), ("target", self.target)):
            if not isinstance(path, str | Path) and not (name == "target" and path is None):
                raise refusal(name, "a path or a name", path)


class LLM(AbstractContextManager["LLM", None]):
    """A target with its DFlash drafter, serving requests from any thread.

    >>> with LLM("engine") as llm:
    ...     print(llm.generate("def quicksort(")[0].text)
    """

    @takes(LLMArguments)
    def __init__(self, arguments: LLMArguments) -> None:
        """Loads both models. `engine` chooses what runs them:

        * an engine directory, or a draft or target, whose engine is then built in the cache (`engine_of`): the embedded
          runtime;
        * a deployment, by file or name: TensorRT-LLM, whose ranks are then spawned. Its file has the settings; the only
          other one is draft_length=0, which decodes without the drafter.

        `target` is a directory or a repository id, by default the engine's, the deployment's, or the catalogue's for a
        known draft. The other arguments are the fields of `RuntimeOptions`. Raises BuildError, CheckpointError,
        ConfigError, EngineError, RequestError and MissingDependencyError.
        """
        self.backend = _open(
            str(arguments.engine), None if arguments.target is None else str(arguments.target), arguments
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running requests, ends the decoder's thread and frees both models.

        So does dropping the last reference.
        """
        self.backend.close()

    def metrics(self) -> DecoderMetrics | None:
        """The decoder's current state, and totals since it started; None for a deployment."""
        return self.backend.metrics()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.backend.tokenizer

    def generate(
        self, prompts: Given | Sequence[Given], sampling_params: Params = None, *, use_tqdm: Bar = True
    ) -> list[Completion]:
        """The answers to a prompt, or to a list of prompts that run together, in their order; always a list.

        A prompt is a text, or token ids in a list, a tuple or an array, also as {"prompt": text} and
        {"prompt_token_ids": ids}. A terminal's stderr shows a progress bar for several prompts unless `use_tqdm` is
        False; a function makes another bar. Raises RequestError for an invalid prompt before any of them runs.
        """
        return self._run([prompts] if is_prompt(prompts) else prompts, sampling_params, use_tqdm)  # type: ignore[arg-type]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """The answers to a conversation [{"role": "user", "content": "..."}, ...], or to a list of them.

        `tools` and `chat_template_kwargs` go to the target's chat template, or to `chat_template` in its place. Raises
        RequestError without a template, and for a conversation that the template rejects.
        """
        is_list = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        prompts = [
            encode_chat(
                self.get_tokenizer(),
                each,
                tools=tools,
                template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for each in (messages if is_list else [messages])
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def _run(self, prompts: Sequence[Any], sampling_params: Params, bar: Bar) -> list[Completion]:
        with _bar(bar, len(prompts)) as advance:
            return run(self.backend, list(map(_prompt, prompts)), _settings(sampling_params), advance)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[Chunk]:
        """The answer step by step, from the first `next` on; closing the iterator cancels the request."""
        return self.backend.follow(prompt, _params(sampling_params))

    def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The answer step by step on the running event loop; closing the iterator, or cancelling the task, cancels."""
        return self.backend.stream(prompt, _params(sampling_params))


def _open(engine: str, target: str | None, options: RuntimeOptions) -> EmbeddedBackend | TrtllmBackend:
    """The runtime of an engine directory, a draft checkpoint or a deployment."""
    if (config := deployment_path(engine)) is not None:
        from dflash_trt.trtllm.llm_backend import open_deployment

        return open_deployment(config, target, _deployed_method(config, options))
    from dflash_trt.runtime.cached_engine import engine_of
    from dflash_trt.runtime.load import open_engine  # it loads transformers: seconds

    return open_engine(*engine_of(engine, target), options)


def _deployed_method(config: Path, options: RuntimeOptions) -> Method:
    """Whether a deployment drafts; RequestError for settings that its file has."""
    for name in RuntimeOptions.__struct_fields__:
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name) and not (name == "draft_length" and value == 0):
            raise RequestError(f"{name} is for an engine directory; the deployment file {config} sets it")
    return "none" if options.draft_length == 0 else "dflash"


def _prompt(given: Any) -> Any:
    """Text or ids of vLLM's {"prompt": text} and {"prompt_token_ids": ids}; other prompts unchanged."""
    if not isinstance(given, dict):
        return given
    for key in ("prompt_token_ids", "prompt"):
        if key in given and given.keys() <= {"prompt_token_ids", "prompt"}:
            return given[key]
    raise RequestError(f"prompt: expected a text or a list of token ids, found {shown(given)}")


@contextmanager
def _bar(asked: Bar, total: int) -> Iterator[Callable[[], object]]:
    """A function that advances the bar by one."""
    if callable(asked):
        bar = asked(total=total, desc="Answers")
        try:
            yield lambda: bar.update(1)
        finally:
            bar.close()
    elif asked and total > 1 and sys.stderr.isatty():
        with progress_bar(total, "Answers") as advance:
            yield advance
    else:
        yield lambda: None


def _params(given: object) -> SamplingParams:
    if given is not None and not isinstance(given, SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, found {given!r}")
    return given or SamplingParams()


def _settings(given: Params) -> SamplingParams | list[SamplingParams]:
    return [_params(each) for each in given] if isinstance(given, list | tuple) else _params(given)
