# SPDX-License-Identifier: Apache-2.0
"""Decoding on a GPU: plain and DFlash by our runtime at several batch sizes, beside transformers and z-lab's loop.

The shapes have the sizes of published pairs, random weights in BF16, and forced acceptance (forced_acceptance.py), a
tau of 5.7 in blocks of 16 and 4.5 in blocks of 8: times mean something, text does not. gpt-oss's experts are computed
in BF16, too, by all. With --target, --draft and --prompts real checkpoints decode real prompts to the end of the text,
and nothing is forced. All decode greedily, but for a row of ours at temperature 1.

Ours is what RuntimeOptions(device="cuda", executor="torch", dtype="bfloat16") opens; first the target's pass alone is
timed, beside a copy of its weights, and at last what `capture` records. The others decode with the same weights in the
same process: transformers' generate in batches of the same sizes, and DFlash one prompt at a time, by z-lab's own loop
where its package `dflash` is installed, else by transformers' assisted decoding, compared with transformers' plain
decoding. Ours run in turn, then the others, a third as often; a row's time is the median round after a first one that
is not counted. "ms a pass" is that time by the target's forward calls, prompts included. Prints tables as soon as they
are known, asserts nothing.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import (  # noqa: E402
    SIZES,
    Calls,
    ForcedLogits,
    ForcedLogitsRunner,
    random_prompts,
    target_sizes,
)
from benchmarks.target_rates import print_capture, print_passes  # noqa: E402
from benchmarks.ways import COLUMNS, Answers, Way, measure  # noqa: E402
from dflash_trt import __version__  # noqa: E402
from dflash_trt.api.chat_template import TemplateOptions  # noqa: E402
from dflash_trt.api.prompts import read_prompts  # noqa: E402
from dflash_trt.api.runtime_options import choose_device  # noqa: E402
from dflash_trt.api.sampling_params import SamplingParams  # noqa: E402
from dflash_trt.checkpoint.target_checkpoint import read_target  # noqa: E402
from dflash_trt.checkpoint.tokenizer import load_tokenizer  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.manifest import Manifest  # noqa: E402
from dflash_trt.errors import DFlashError  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.decoder import Decoder  # noqa: E402
from dflash_trt.runtime.drafter.open import open_drafter  # noqa: E402
from dflash_trt.runtime.policy.draft_length import FixedLength  # noqa: E402
from dflash_trt.runtime.session import Session, run  # noqa: E402
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant  # noqa: E402
from tests.reference.synthetic import Dialect, DraftSizes, write_random_draft  # noqa: E402

PATH, COUNT = click.Path(exists=True, path_type=Path), click.IntRange(min=1)
NUM_PROMPTS = 4
CACHE_GIB = 16
"""Room for 32 answers of 2,048 tokens, beside gpt-oss-20b on a GPU of 80 GB; with less, fewer requests run at once."""
ZLAB = "dflash"
"""Import name of z-lab's package."""


class Shape(NamedTuple):
    """Sizes of a pair."""

    draft: DraftSizes
    num_layers: int
    """Layers of the draft."""
    experts: tuple[int, int] | None = None
    """Number and inner width of a gpt-oss target's experts, of which four take a token; None for a Qwen3 target."""
    ties_head: bool = False
    """Whether the target's head is its embedding."""

    def target(self) -> PreTrainedConfig:
        """The target's configuration."""
        sizes = target_sizes(self.draft) | {"tie_word_embeddings": self.ties_head}
        if self.experts is None:
            return Qwen3Config(**sizes)
        number, width = self.experts
        return GptOssConfig(**sizes | {"num_local_experts": number, "intermediate_size": width})


SHAPES = {
    "qwen3-8b": Shape(SIZES["qwen3-8b"], num_layers=5),
    "gpt-oss-20b": Shape(SIZES["gpt-oss-20b"], num_layers=8, experts=(32, 2880)),
    "qwen3-0.6b": Shape(SIZES["qwen3-0.6b"], num_layers=5, ties_head=True),
    "tiny": Shape(SIZES["tiny"], num_layers=2),
    "tiny-gpt-oss": Shape(SIZES["tiny"], num_layers=2, experts=(4, 64)),
}
SMALL = ("tiny", "tiny-gpt-oss")
"""Shapes that a CPU decodes in seconds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is decoded, and where."""

    device: str
    batches: tuple[int, ...]
    num_prompts: int | None
    tokens: int


@dataclass(kw_only=True)
class Pair:
    """Models that all ways share, and what they decode."""

    title: str
    session: Session
    peer: PreTrainedModel
    """The target as transformers runs it, on the same weights."""
    draft: Path
    prompts: list[list[int]]
    num_prompts: int
    """Prompts to decode at least, even one by one."""
    settings: Settings
    is_forced: bool
    calls: Calls = field(init=False)

    def __post_init__(self) -> None:
        self.calls = Calls(self.peer, ForcedLogits() if self.is_forced else None)

    def chosen(self, batch: int) -> list[list[int]]:
        """Prompts for batches of this size."""
        return self.prompts[: max(batch, self.num_prompts)]


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-8b", show_default=True)
@click.option("--target", type=PATH, help="A real target, with --draft, --prompts.")
@click.option("--draft", type=PATH, help="The drafter of --target.")
@click.option("--prompts", "prompt_file", type=PATH, metavar="FILE", help="As for `verify`.")
@click.option("--chat", is_flag=True, help="Wrap --prompts in the target's chat template.")
@click.option(
    "--num-prompts", type=COUNT, help="Prompts of each way, or a batch of them: by default 4, or all of FILE."
)
@click.option("--tokens", type=click.IntRange(min=2), default=128, show_default=True, help="New tokens a prompt.")
@click.option("--rounds", type=COUNT, default=3, show_default=True)
@click.option("--batch", "batches", multiple=True, type=COUNT, default=(1, 8, 32), show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--peers/--no-peers", default=True, help="Whether transformers and z-lab's loop decode, too.")
def main(
    shape: str, target: Path | None, draft: Path | None, prompt_file: Path | None, chat: bool, rounds: int, peers: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Measure tokens/s, tau and milliseconds a pass of every way to decode."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    settings = Settings(**given)
    real = [path for path in (target, draft, prompt_file) if path is not None]
    if real and len(real) < 3:
        raise click.UsageError("expected --target, --draft and --prompts together")
    if not real and settings.device == "cpu" and shape not in SMALL:
        raise click.UsageError(f"--shape {shape}: expected a GPU; {' and '.join(SMALL)} decode on a CPU")
    try:
        choose_device(settings.device)
        with tempfile.TemporaryDirectory() as work:
            if target and draft and prompt_file:
                pair = _real(target, draft, prompt_file, chat, Path(work), settings)
            else:
                pair = _random(shape, Path(work), settings)
            _print_hardware(pair)
            print_passes(pair.session, pair.peer, pair.prompts[0])
            _measure(pair, list(_ours(pair)), rounds)
            prompts = pair.prompts[: max(settings.batches)]
            print_capture(pair.session, prompts, settings.tokens, Path(work) / "features")
            if peers:
                _measure(pair, [way for way in _peers(pair) if _works(way)], rounds // 3 or 1)
    except DFlashError as error:
        raise click.ClickException(str(error)) from error


def _random(name: str, work: Path, settings: Settings) -> Pair:
    shape = SHAPES[name]
    dialect: Dialect = "gpt_oss" if shape.experts else "qwen3"
    layers = ["full_attention"] * shape.num_layers
    draft = write_random_draft(work / "draft", dialect=dialect, layer_types=layers, sizes=shape.draft)
    manifest = build(draft, work / "engine")
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(shape.target(), dtype=torch.bfloat16).eval()
    session, peer = _open(work / "engine", manifest, model, settings, frozenset())
    num_prompts = settings.num_prompts or NUM_PROMPTS
    return Pair(
        title=f"{name}'s shape, random weights, FORCED ACCEPTANCE", session=session, peer=peer, draft=draft,
        prompts=random_prompts(max(num_prompts, *settings.batches), shape.draft), num_prompts=num_prompts,
        settings=settings, is_forced=True,
    )  # fmt: skip


def _real(target: Path, draft: Path, file: Path, chat: bool, work: Path, settings: Settings) -> Pair:
    manifest = build(draft, work / "engine", target)
    spec, taps = read_target(target).spec, manifest.draft.target_layer_ids
    model = load_model(target, spec, taps, dtype="bfloat16", device=settings.device)
    session, peer = _open(work / "engine", manifest, model, settings, stop_token_ids(model))
    tokenizer = load_tokenizer(target)
    prompts = [line.encode(tokenizer, TemplateOptions() if chat else None) for line in read_prompts(file)]
    return Pair(
        title=f"{target.name} with {draft.name}", session=session, peer=peer, draft=draft, prompts=prompts,
        num_prompts=settings.num_prompts or len(prompts), settings=settings, is_forced=False,
    )  # fmt: skip


def _open(
    engine: Path, manifest: Manifest, model: PreTrainedModel, settings: Settings, stop_ids: frozenset[int]
) -> tuple[Session, PreTrainedModel]:
    """A session as `load_session` makes one on a GPU, and a second model on the same weights."""
    num_slots = max(settings.batches)
    weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    peer = copy.deepcopy(model, weights)
    target = make_target(model, manifest.draft.target_layer_ids, num_slots)
    drafter = open_drafter(engine, manifest, num_slots=num_slots, device=settings.device, executor="torch")
    session = Session(manifest, target, drafter, None, stop_ids, max_batch_size=num_slots, cache_gib=CACHE_GIB)
    session.allocate()
    return session, peer


def _ours(pair: Pair) -> Iterator[Way]:
    session, block = pair.session, FixedLength(pair.session.manifest.draft.num_draft_tokens)

    def plain(batch: int) -> Decoder:
        return session.decoder(FixedLength(0), max_batch_size=batch)

    def speculative(batch: int) -> Decoder:
        if pair.is_forced:
            return ForcedLogitsRunner(session, block, batch).decoder
        return session.decoder(block, max_batch_size=batch)

    def decode(make: Callable[[int], Decoder], batch: int, temperature: float = 0) -> Answers:
        decoder, tokens, is_forced = make(batch), pair.settings.tokens, pair.is_forced
        params = SamplingParams(max_tokens=tokens, ignore_eos=is_forced, temperature=temperature, seed=0)
        found = run(decoder, [session.request(prompt, params) for prompt in pair.chosen(batch)])
        steps = sum(answer.steps for answer in found)
        return Answers([answer.token_ids for answer in found], steps, decoder.metrics().passes)

    for batch in pair.settings.batches:
        baseline = Way("dflash-trt plain", batch, partial(decode, plain, batch))
        yield baseline
        yield Way("dflash-trt DFlash", batch, partial(decode, speculative, batch), baseline)
        yield Way("dflash-trt DFlash, sampled", batch, partial(decode, speculative, batch, 1.0), baseline)


def _peers(pair: Pair) -> Iterator[Way]:
    """Ways of transformers, and one of z-lab or transformers to decode with drafts, for one prompt at a time."""

    def plain(batch: int) -> Answers:
        chosen = pair.chosen(batch)
        pair.calls.start()
        groups = [chosen[begin : begin + batch] for begin in range(0, len(chosen), batch)]
        outputs = [output for group in groups for output in _generate(pair, group)]
        return Answers(outputs, sum(len(output) - 1 for output in outputs), pair.calls.count)

    ways = [Way("transformers plain", batch, partial(plain, batch)) for batch in pair.settings.batches]
    yield from ways
    loop = cache(partial(_dflash, pair))  # the first round opens its models

    def speculative() -> Answers:
        decode = loop()
        pair.calls.start()
        found = [decode(prompt) for prompt in pair.chosen(1)]
        return Answers([output for output, _ in found], sum(steps for _, steps in found), pair.calls.count)

    name = "z-lab DFlash" if find_spec(ZLAB) else "transformers DFlash"
    yield Way(name, 1, speculative, next((way for way in ways if way.batch == 1 and way.seconds), None))


def _generate(pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers to a batch of prompts, shorter ones filled up on the left."""
    width, stop_ids = max(map(len, prompts)), pair.session.stop_ids
    token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=pair.peer.device)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=pair.peer.device)
    never_emitted = pair.session.manifest.target.vocab_size
    pair.calls.begin()
    with torch.inference_mode():
        rows = pair.peer.generate(
            token_ids, attention_mask=(torch.arange(width, device=lengths.device) >= width - lengths).long(),
            max_new_tokens=pair.settings.tokens, do_sample=False, eos_token_id=sorted(stop_ids) or [never_emitted],
            pad_token_id=0,
        )  # fmt: skip
    return [_until_stop(row, stop_ids) for row in rows[:, width:].tolist()]


def _until_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """A batch's answers go on, filled up, until the last one ends."""
    end = next((place for place, token in enumerate(tokens) if token in stop_ids), len(tokens) - 1)
    return tokens[: end + 1]


def _dflash(pair: Pair) -> Callable[[list[int]], tuple[list[int], int]]:
    """A loop: a function of a prompt that returns the answer and its verify passes."""
    stop_ids, device = sorted(pair.session.stop_ids), pair.peer.device
    if find_spec(ZLAB) is None:
        assistant = load_assistant(pair.draft, torch.bfloat16).to(device)

        def by_transformers(prompt: list[int]) -> tuple[list[int], int]:
            pair.calls.begin()
            found = dflash_greedy(pair.peer, assistant, prompt, pair.settings.tokens, eos_ids=stop_ids)
            return found.output_ids, found.steps

        return by_transformers
    from dflash import model as zlab

    drafts = zlab.DFlash2DraftModel if pair.session.drafter.spec.num_candidates else zlab.DFlashDraftModel
    draft = drafts.from_pretrained(pair.draft, dtype=torch.bfloat16).to(device).eval()

    def by_zlab(prompt: list[int]) -> tuple[list[int], int]:
        begun, token_ids = pair.calls.count, torch.tensor([prompt], device=device)
        pair.calls.begin()
        row = zlab.dflash_generate(draft, pair.peer, token_ids, pair.settings.tokens, stop_ids or None)
        return row[0, len(prompt) :].tolist(), pair.calls.count - begun - 1

    return by_zlab


def _print_hardware(pair: Pair) -> None:
    packages = [name for name in ("torch", "transformers", ZLAB) if find_spec(name) is not None]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    attention = pair.peer.config._attn_implementation
    hardware = torch.cuda.get_device_name() if pair.settings.device == "cuda" else cpu_model()
    click.echo(f"{hardware}; dflash-trt {__version__}, {versions}, whose attention is {attention}")


def _works(way: Way) -> bool:
    """Whether another library decodes here; prints what it says otherwise."""
    try:
        _first(way)
    except Exception as error:  # any error about a model or GPU that it does not support
        click.echo(f"{way.name}, batch {way.batch}: {(str(error) or repr(error)).splitlines()[0]}")
        return False
    return True


def _first(way: Way) -> None:
    """Warms up, and says so: a run that is cut off shows how far it came."""
    way.round()
    click.echo(f"{way.name}, batch {way.batch}: first round {way.seconds[-1]:.1f} s", err=True)


def _measure(pair: Pair, ways: list[Way], rounds: int) -> None:
    # The largest batch first: caches that grow make every CUDA graph so far be recorded again.
    ways = sorted(ways, key=lambda way: -way.batch)
    for way in ways:
        if not way.seconds:
            _first(way)
    measure(ways, rounds)
    rows = [(*way.cells, f"{1e3 * way.median / way.answers.passes:.2f}") for way in ways]
    work = f"{pair.num_prompts} prompts, or a batch of them, x {pair.settings.tokens} tokens"
    how = "one round" if rounds == 1 else f"median of {rounds} rounds"
    print_table(f"{pair.title}: {work}, BF16, {how}", (*COLUMNS, "ms a pass"), rows)


if __name__ == "__main__":
    main()
