# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt capture`: runs the target over prompts and writes what calibration and replay need of it.

First the answers are decoded; then each prompt with its answer runs once more, in passes as speculative decoding makes
them, and its taps go to disk. All lengths are known by then, so a batch's taps are in memory. A journal beside the
output holds the answers, and how many sequences the file has: a capture that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt import __version__
from dflash_trt.api.prompts import PromptLine
from dflash_trt.api.runtime_options import DEFAULTS, choose_device
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.safetensors_writer import Layout, SafetensorsWriter, aligned, metadata
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import CheckpointError
from dflash_trt.files.write import OutputKind, new_file
from dflash_trt.runtime.checked_pair import check_prompt
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.load import prepare_target
from dflash_trt.runtime.measure.features import (
    LM_HEAD_BIAS,
    MASK_EMBEDDING,
    METADATA_KEY,
    SCHEMA_VERSION,
    FeatureFacts,
    PromptFacts,
    tensor_shapes,
)
from dflash_trt.runtime.measure.journal import Journal, journal_file
from dflash_trt.runtime.measure.verification import tokenize
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.huggingface import stop_token_ids
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Target

FEATURES = OutputKind(
    name="features that this command captured",
    recognizes=lambda file: METADATA_KEY in metadata(file),
    form="file",
    option="-o FILE",
)

SPELLINGS = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt and the target's answer."""

    token_ids: list[int]
    prompt_length: int


def answer_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    num_slots: int = 1,
    on_answer: Callable[[int, Answered], None] = lambda index, answered: None,
) -> list[Answered]:
    """Decodes every prompt, to a stop token (kept) or `max_tokens` tokens, `num_slots` at once; `seeds` by prompt.

    `on_answer` gets each answer with its prompt's index as soon as it is there.
    """
    asked = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed in seeds or [0] * len(prompts)
    ]
    requests = [
        Request(prompt_ids=prompt, params=params, sampler=params.sampler(), stop_ids=stop_ids)
        for prompt, params in zip(prompts, asked, strict=True)
    ]
    longest = max((request.max_length for request in requests), default=0)
    slots = SlotPool.for_each_slot(num_slots, longest)
    target.allocate(slots.num_tokens // TOKENS_PER_PAGE)
    decoder = Decoder(ModelRunner(target, None), slots, FixedLength(0))

    def answered(request: Request) -> Answered:
        return Answered(token_ids=[*request.prompt_ids, *request.token_ids], prompt_length=len(request.prompt_ids))

    def watch(index: int, request: Request) -> None:
        request.on_progress = lambda request: on_answer(index, answered(request)) if request.finished else None

    for index, request in enumerate(requests):
        watch(index, request)
    decoder.run(requests)
    return [answered(request) for request in requests]


def write_features(
    target: HuggingFaceTarget,
    answered: Sequence[Answered],
    facts: FeatureFacts,
    output: Path,
    *,
    block_size: int,
    taps_dtype: torch.dtype = torch.float32,
    batch_size: int = 1,
    num_written: int = 0,
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Runs the target over each sequence, in blocks of `block_size`, and writes the feature file (layout: features.py).

    Embeddings and lm_head take BF16 where that keeps every value, else FLOAT; the taps are of `taps_dtype`.
    `batch_size` sequences run at once. The first `num_written` are in the file, from an earlier call with the same
    arguments; `on_written` gets their number when a batch is on disk. Raises CheckpointError for taps that are not
    finite, OSError when the file cannot be written.
    """
    head = target.head()
    table = target.embed(torch.tensor(sorted({facts.mask_token_id, *_answer_tokens(answered)})))
    dtypes = {name: narrowest(tensor) for name, tensor in head.items()} | {"embeddings": narrowest(table)}
    dtypes |= {MASK_EMBEDDING: dtypes["embeddings"], "taps": taps_dtype}
    header = {METADATA_KEY: msgspec.json.encode(facts, order="deterministic").decode()}
    layout = _layout(answered, facts, dtypes)
    done = {name for name in layout if int(name.partition(".")[2] or 0) < num_written}
    with SafetensorsWriter(output, layout, metadata=header, written=done) as writer:

        def write(name: str, values: torch.Tensor) -> None:
            writer.write(name, bits(values, dtypes[name.partition(".")[0]]))

        if not done:
            for name, tensor in head.items():
                write(name, tensor)
            write(MASK_EMBEDDING, target.embed(torch.tensor(facts.mask_token_id)))
        for begin in range(num_written, len(answered), batch_size):
            batch = answered[begin : begin + batch_size]
            for i, (sequence, taps) in enumerate(zip(batch, _taps(target, batch, block_size), strict=True), begin):
                answer = sequence.token_ids[sequence.prompt_length :]
                writer.write(f"tokens.{i}", np.array(sequence.token_ids, dtype=np.int64))
                writer.write(f"prompt_length.{i}", np.array(sequence.prompt_length, dtype=np.int64))
                if not torch.isfinite(taps).all():
                    name = f"{facts.target_name}: sequence {i}"
                    raise CheckpointError(f"{name}: expected finite taps, found NaN or infinity")
                write(f"taps.{i}", taps)
                write(f"embeddings.{i}", target.embed(torch.tensor(answer)))
            writer.flush()
            on_written(begin + len(batch))


def _answer_tokens(answered: Sequence[Answered]) -> set[int]:
    return {token for sequence in answered for token in sequence.token_ids[sequence.prompt_length :]}


def _layout(answered: Sequence[Answered], facts: FeatureFacts, dtypes: Mapping[str, torch.dtype]) -> Layout:
    """dtype and shape of every tensor; `dtypes` are those of the floats, by the name before the number."""
    lengths = [(len(sequence.token_ids), sequence.prompt_length) for sequence in answered]
    shapes = tensor_shapes(facts, lengths, has_bias=LM_HEAD_BIAS in dtypes)

    def spelling(name: str, allowed: tuple[str, ...]) -> str:
        dtype = dtypes.get(name.partition(".")[0])
        return allowed[0] if dtype is None else SPELLINGS[dtype]

    return aligned({name: (spelling(name, allowed), shape) for name, (allowed, shape) in shapes.items()})


def _taps(target: Target, batch: Sequence[Answered], block_size: int) -> list[torch.Tensor]:
    """Taps of all tokens but the last of each sequence, on the CPU.

    In chunks and blocks as decoding has them: one pass would add its sums in another order. Prompts run one by one,
    then the blocks of all at once.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in batch]

    def run(pieces: Mapping[int, list[int]]) -> None:
        segments = [Segment(slot=slot, token_ids=piece, num_logits=0) for slot, piece in pieces.items()]
        taps = target.verify(segments, with_taps=True).taps.cpu()
        for slot, rows in zip(pieces, torch.split(taps, [len(piece) for piece in pieces.values()]), strict=True):
            parts[slot].append(rows)
            target.rollback(slot, 0)

    for slot, sequence in enumerate(batch):
        for piece in _pieces(sequence.token_ids[: sequence.prompt_length], DEFAULTS.prefill_chunk):
            run({slot: piece})
    blocks = [_pieces(sequence.token_ids[sequence.prompt_length : -1], block_size) for sequence in batch]
    for number in range(max(map(len, blocks))):
        run({slot: pieces[number] for slot, pieces in enumerate(blocks) if number < len(pieces)})
    for slot in range(len(batch)):
        target.release(slot)
    return [torch.cat(rows) for rows in parts]


def _pieces(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def narrowest(values: torch.Tensor) -> torch.dtype:
    """BF16 where it holds each of `values`, else FLOAT."""
    is_exact = torch.equal(values.to(torch.bfloat16).to(values.dtype), values)
    return torch.bfloat16 if is_exact else torch.float32


def bits(values: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """`values` in `dtype`, BF16 as its bits: numpy has no such type."""
    converted = values.to(dtype).contiguous()
    array: NDArray[Any] = (converted.view(torch.int16) if dtype == torch.bfloat16 else converted).cpu().numpy()
    return array


class CaptureOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a capture."""

    target_name: str
    max_tokens: int
    chat: bool
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


WRITTEN = "written"
Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]


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
        check_prompt(token_ids, options.max_tokens, draft.spec, target.spec)

    encoded = [
        prompt.token_ids for prompt in tokenize(prompts, load_tokenizer(target.directory), check, chat=options.chat)
    ]
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
