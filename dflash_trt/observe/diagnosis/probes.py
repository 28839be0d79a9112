# SPDX-License-Identifier: Apache-2.0
"""The probes of a diagnosis, each compared with the short prompts, and their answers."""

from __future__ import annotations

import secrets
from statistics import fmean
from zlib import crc32

import msgspec

from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup, ProbePrompt, passage, prompts
from dflash_trt.observe.diagnosis.prober import REFUSED, Prober, greedy_group
from dflash_trt.observe.diagnosis.speed import NO_PLAIN, Speed
from dflash_trt.observe.endpoints.counter_growth import EngineAcceptance

SHORT_TOKENS = 64
TOKENS = 48
PREFIX_TOKENS = 512
"""More than a page of a prefix cache, of most models."""
NUM_PREFIXES = 8
NUM_PAIRED = 6
"""Short prompts that are repeated in other ways."""
NUM_LONG = 8
LONG_TOKENS = 6000
"""Length of a long prompt: beyond the windows of 2048 and 4096 tokens that drafters are trained with."""
NUM_THINKING = 6
MIN_LONG = 512


def short(prober: Prober) -> ProbeGroup:
    """Sixteen short greedy prompts: the reference for all other probes."""
    return greedy_group(prober, "short prompts", prompts().short, SHORT_TOKENS)


def served(prober: Prober) -> ProbeGroup:
    """The first of them with the server's own draft length, if requests may choose one."""
    if prober.runtime.kind != "dflash-trt":
        return ProbeGroup(name="as served", why_not="the short prompts are", is_left_out=True)
    some = dict(list(prompts().short.items())[:NUM_PAIRED])
    return greedy_group(prober, "as served", some, SHORT_TOKENS, draft_length=None)


def plain(prober: Prober) -> ProbeGroup:
    """The first of them without drafts, if requests may disable them."""
    if prober.runtime.kind != "dflash-trt":
        return ProbeGroup(name="plain decoding", why_not=NO_PLAIN, is_left_out=True)
    some = dict(list(prompts().short.items())[:NUM_PAIRED])
    return greedy_group(prober, "plain decoding", some, SHORT_TOKENS, draft_length=0)


def foreign(prober: Prober) -> ProbeGroup:
    """Chinese, German, Japanese and Spanish."""
    return greedy_group(prober, "other languages", prompts().foreign, TOKENS)


def prefixes(prober: Prober, reference: ProbeGroup) -> tuple[ProbeGroup, ProbeGroup]:
    """Prompts that no cache can contain, then the same again."""
    nonce = secrets.token_hex(4)
    characters = int(PREFIX_TOKENS * _characters_per_token(prober, reference))
    questions: dict[str, ProbePrompt] = {}
    for index in range(NUM_PREFIXES):
        name = f"prefix-{index}"
        prompt = passage(index, NUM_PREFIXES, characters)
        questions[name] = ProbePrompt(f"[{nonce}-{index}] {prompt.chat}", f"# {nonce}-{index}\n{prompt.text}")
    first = greedy_group(prober, "new prefixes", questions, TOKENS)
    return first, greedy_group(prober, "the same again", questions, TOKENS)


def long(prober: Prober, reference: ProbeGroup, num_tokens: int | None) -> ProbeGroup:
    """Prompts of `num_tokens`, or of LONG_TOKENS if model and draft have enough positions.

    Positions beyond the start of RoPE scaling are used only if `num_tokens` requests them: it is unknown whether the
    model was trained on them.
    """
    room = prober.runtime.max_model_len or (num_tokens or LONG_TOKENS) + 4 * TOKENS
    unscaled = room if num_tokens else prober.runtime.unscaled_length or room
    wanted = min(num_tokens or LONG_TOKENS, room - 4 * TOKENS, unscaled - TOKENS)
    if wanted < MIN_LONG:
        name = "RoPE scaling begins at" if unscaled < room else "the model has room for"
        why_not = f"{name} {min(room, unscaled)} tokens: --long-tokens asks for more"
        return ProbeGroup(name="long prompts", why_not=why_not, is_left_out=True)
    found = _long(prober, reference, wanted)
    while (
        not (found.samples or num_tokens) and found.why_not.startswith(REFUSED) and (wanted := wanted // 2) >= MIN_LONG
    ):
        found = _long(prober, reference, wanted)  # a server need not report its maximum prompt length
    return found


def _long(prober: Prober, reference: ProbeGroup, num_tokens: int) -> ProbeGroup:
    characters = int(num_tokens * _characters_per_token(prober, reference))
    passages = [passage(index, NUM_LONG, characters) for index in range(NUM_LONG)]
    # Another release of this package has other passages, with other names, so that comparisons notice.
    questions = {f"long-{index}-{crc32(prompt.text.encode()):08x}": prompt for index, prompt in enumerate(passages)}
    return greedy_group(prober, "long prompts", questions, TOKENS)


def sampled(prober: Prober) -> tuple[ProbeGroup, ProbeGroup]:
    """Short prompts at temperature 1 with two seeds."""
    some = dict(list(prompts().short.items())[-NUM_PAIRED:])
    first, second = (
        greedy_group(prober, f"temperature 1, seed {seed}", some, TOKENS, temperature=1.0, seed=seed) for seed in (1, 2)
    )
    return first, second


def thinking(prober: Prober) -> tuple[ProbeGroup, ProbeGroup]:
    """Chats with thinking on and off, as in the templates of Qwen and others."""
    some = dict(list(prompts().short.items())[-NUM_THINKING:])
    names = ("thinking on", "thinking off")
    if not prober.is_chat:
        on, off = (ProbeGroup(name=name, why_not="it serves no chats") for name in names)
        return on, off
    on, off = (
        greedy_group(prober, name, some, TOKENS, chat_template_kwargs={"enable_thinking": is_on})
        for name, is_on in zip(names, (True, False), strict=True)
    )
    return on, off


def _characters_per_token(prober: Prober, reference: ProbeGroup) -> float:
    """By the server's token counts of the reference, template included; at most 3, so that no prompt is too long."""
    sizes = [
        len(prober.prompt(prompts().short[sample.prompt])) / sample.input_tokens
        for sample in reference.samples
        if sample.input_tokens
    ]
    return min(3.0, fmean(sizes) if sizes else 3.0)


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the probes."""

    short: ProbeGroup
    served: ProbeGroup
    seeds: tuple[ProbeGroup, ProbeGroup]
    prefixes: tuple[ProbeGroup, ProbeGroup]
    long: ProbeGroup
    plain: ProbeGroup
    foreign: ProbeGroup
    thinking: tuple[ProbeGroup, ProbeGroup]
    speeds: list[Speed]
    speeds_missing: str
    """Why speeds are missing."""
    unreadable: str
    """Why published figures could not be read."""
    how: str
    """The figures from which acceptance was read, or why there are none."""

    engines: list[EngineAcceptance] = []
    """Over all probes; empty for a server that does not tell its engines apart."""

    @property
    def groups(self) -> list[ProbeGroup]:
        """In the order in which they were asked."""
        return [
            self.short, self.served, *self.seeds, *self.prefixes, self.long, self.plain, self.foreign, *self.thinking
        ]  # fmt: skip
