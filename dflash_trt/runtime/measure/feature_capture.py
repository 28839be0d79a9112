# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`: runs the target over prompts and writes the features that calibration and replay need.

First the answers are decoded; then each prompt with its answer runs once more, in passes as speculative decoding makes
them, and its taps go to disk. All lengths are known by then, so only a batch's taps are in memory. A journal beside the
output holds the answers and the number of sequences in the file, so a stopped capture continues.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import torch

from dflash_trt import __version__
from dflash_trt.api.chat_template import TemplateOptions
from dflash_trt.api.prompts import PromptLine
from dflash_trt.api.runtime_options import choose_device
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.safetensors_writer import metadata
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError
from dflash_trt.files.write import OutputKind, new_file
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.load import prepare_target
from dflash_trt.runtime.measure.feature_answers import Answered, answer_prompts
from dflash_trt.runtime.measure.feature_writer import write_features
from dflash_trt.runtime.measure.features import METADATA_KEY, SCHEMA_VERSION, FeatureFacts, PromptFacts
from dflash_trt.runtime.measure.journal import Journal, journal_file
from dflash_trt.runtime.measure.verification import tokenize
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.targets.huggingface import stop_token_ids
from dflash_trt.runtime.targets.target import Target

FEATURES = OutputKind(
    name="features that this command captured",
    recognizes=lambda file: METADATA_KEY in metadata(file),
    form="file",
    option="-o FILE",
)
WRITTEN = "written"
Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]


class CaptureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a capture."""

    target_name: str
    max_tokens: int
    template: TemplateOptions | None
    """Chat template that wraps text prompts, if any."""
    max_batch_size: int
    """Prompts answered at once, and sequences whose taps are in memory."""
    device: str
    """Device of the target: cpu, cuda or auto."""
    dtype: str
    """Type that the target is computed in."""
    num_ranks: int
    """Ranks that share the target."""
    taps_dtype: str | None
    """Type of the recorded taps; None: the target's."""
    temperature: float
    seed: int


class Captured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the journal: the answer to a prompt, or how many sequences the file has."""

    key: str
    token_ids: tuple[int, ...] = ()
    """Prompt and answer."""
    num_written: int = 0


def _unfinished(output: Path) -> Path:
    """The features themselves, until they are complete."""
    return output.parent / f"{output.name}.unfinished"


def capture_features(
    draft: DraftCheckpoint,
    target: TargetCheckpoint,
    prompts: Sequence[PromptLine],
    output: Path,
    options: CaptureOptions,
    ranks: Leader | Follower,
    *,
    force: bool,
    progress: Progress,
) -> tuple[int, int]:
    """Writes the feature file `output`, on rank 0; returns the numbers of sequences and of answer tokens.

    Goes on with what an interrupted run left: its caller is the `sole_writer` of `output`. BuildError where the file
    cannot be written or what was left is of something else, RequestError for a prompt that cannot be answered to its
    last token.
    """
    device = choose_device(options.device)

    def check(token_ids: list[int]) -> None:
        check_prompt(token_ids, options.max_tokens, draft.spec, target.spec, is_all_drafted=True)

    tokenizer = load_tokenizer(target.directory)
    encoded = [prompt.token_ids for prompt in tokenize(prompts, tokenizer, check, options.template)]
    taps, width = draft.spec.target_layer_ids, draft.spec.tap_hidden_size
    if width not in (None, target.spec.hidden_size):
        raise CheckpointError(
            f"{options.target_name}: expected taps of {target.spec.hidden_size} values to capture, found a draft that"
            f" reads {width}, all residual streams"
        )
    running = prepare_target(target, taps, options.max_batch_size, ranks, dtype=options.dtype, device=device)()
    model = running.model
    stop_ids = stop_token_ids(model)
    facts = FeatureFacts(
        schema_version=SCHEMA_VERSION,
        tool_version=__version__,
        target_name=options.target_name,
        target=target.spec,
        target_layer_ids=taps,
        mask_token_id=draft.spec.mask_token_id,
        max_tokens=options.max_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
        has_embedding=draft.spec.lilicorr is not None,
        target_dtype="bfloat16" if model.dtype == torch.bfloat16 else "float32",
        prompts=tuple(PromptFacts(name=p.id, category=p.category, language=p.language) for p in prompts),
        temperature=options.temperature,
        seed=options.seed if options.temperature else 0,
    )
    identity = _identity(facts, target, encoded, draft.spec.block_size, (device, options.num_ranks, options.taps_dtype))
    partial = _unfinished(output)
    with new_file(output, FEATURES, force=force) as temporary:
        journal = Journal(journal_file(output), identity, Captured, of="a capture with these inputs and options")
        answered = _answers(running, encoded, facts, options.max_batch_size, journal, progress)
        with progress(len(answered), "recording") as advance:
            begin = journal.entries[WRITTEN].num_written if WRITTEN in journal.entries and partial.exists() else 0
            done = 0

            def on_written(count: int) -> None:
                nonlocal done
                journal.record(Captured(key=WRITTEN, num_written=count))
                while done < count:
                    done += 1
                    advance()

            try:
                write_features(
                    running, answered, facts, partial, block_size=draft.spec.block_size,
                    taps_dtype=model.dtype if options.taps_dtype is None else getattr(torch, options.taps_dtype),
                    batch_size=options.max_batch_size, num_written=begin, on_written=on_written,
                )  # fmt: skip
            except CheckpointError:  # again it would be no other
                partial.unlink()
                journal.remove()
                raise
        shutil.move(partial, temporary)
    journal.remove()
    return len(answered), sum(len(sequence.token_ids) - sequence.prompt_length for sequence in answered)


def _answers(
    target: Target,
    prompts: Sequence[list[int]],
    facts: FeatureFacts,
    num_slots: int,
    journal: Journal[Captured],
    progress: Progress,
) -> list[Answered]:
    """Every prompt's answer, from the journal or decoded and then recorded there."""
    left = [i for i in range(len(prompts)) if str(i) not in journal.entries]
    with progress(len(prompts), "answering") as advance:

        def on_answer(index: int, answered: Answered) -> None:
            journal.record(Captured(key=str(left[index]), token_ids=tuple(answered.token_ids)))
            advance()

        for _ in range(len(prompts) - len(left)):
            advance()
        answer_prompts(
            target, [prompts[i] for i in left], facts.max_tokens, frozenset(facts.stop_token_ids),
            temperature=facts.temperature, seeds=[facts.sampler_seed(i) for i in left], num_slots=num_slots,
            on_answer=on_answer,
        )  # fmt: skip
    tokens = [journal.entries[str(i)].token_ids for i in range(len(prompts))]
    return [Answered(token_ids=[*t], prompt_length=len(p)) for t, p in zip(tokens, prompts, strict=True)]


def _identity(
    facts: FeatureFacts, target: TargetCheckpoint, prompts: Sequence[list[int]], block_size: int, rest: object
) -> str:
    """One line that is the same for the same capture; weights count by their files' sizes and times."""
    files = sorted({tensor.file for tensor in read_weights(target.directory).values()})
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    document = msgspec.json.encode((facts, weights, prompts, block_size, rest), order="deterministic")
    return hashlib.sha256(document).hexdigest()
