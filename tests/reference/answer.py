# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping of an answer, written for reading: acceptance by equality, the end, and what each pass did."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


def accept_chosen(choices: Sequence[int], are_finite: Sequence[bool], proposals: Sequence[int]) -> list[int]:
    """Proposals that equal the target's choices [n], and the choice after them, up to a row that is not finite."""
    accepted = list[int]()
    for row, (choice, is_finite) in enumerate(zip(choices, are_finite, strict=True)):
        if not is_finite:
            break
        accepted.append(choice)
        if row >= len(proposals) or proposals[row] != choice:
            break
    return accepted


@dataclass
class Answer:
    """Tokens, and passes as _C.Answer lists them."""

    max_tokens: int
    stop_ids: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    passes: list[tuple[float, tuple[int, ...], tuple[int, ...], int, bool]] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens until max_tokens."""
        return self.max_tokens - len(self.token_ids)

    def append(self, time: float, drafts: Sequence[int], is_forced: bool, accepted: Sequence[int]) -> str | None:
        """Appends the accepted tokens of a pass, up to one that ends the answer; the reason if one does."""
        taken, ending = list[int](), None
        for token in accepted:
            taken.append(token)
            if token in self.stop_ids:
                ending = "stop"
            elif len(taken) == self.num_left:
                ending = "length"
            if ending is not None:
                break
        if not taken:
            return "error"
        num_drafts = len(taken) if len(taken) < len(accepted) else len(taken) - 1  # the last one is the target's own
        self.token_ids += taken
        self.passes.append((time, tuple(taken), tuple(drafts), num_drafts, is_forced))
        return ending

    def cut(self, num_tokens: int) -> None:
        """Takes tokens of the last pass back."""
        time, tokens, drafts, num_drafts, is_forced = self.passes[-1]
        if removed := len(self.token_ids) - num_tokens:
            del self.token_ids[num_tokens:]
            kept = tokens[: len(tokens) - removed]
            self.passes[-1] = time, kept, drafts, len(kept), is_forced
        assert num_drafts >= self.passes[-1][3]


def last_passes(answers: Sequence[Answer]) -> tuple[int, dict[tuple[bool, int, int, int], int]]:
    """Does what _C.last_passes does, for the answers that have begun."""
    last = [answer.passes[-1] for answer in answers if answer.passes]
    counted = [answer.passes[-1] for answer in answers if len(answer.passes) > 1]
    verified = [(is_forced, len(drafts), len(tokens), accepted) for _, tokens, drafts, accepted, is_forced in counted]
    return sum(len(tokens) for _, tokens, *_ in last), dict(Counter(verified))


def draft_counts(
    drafts: Sequence[tuple[Sequence[int], bool]], accepted: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Does what _C.draft_counts does, for drafts and whether they were forced."""
    blocks = [(*each, tokens) for each, tokens in zip(drafts, accepted, strict=False) if tokens]
    return (
        [0 if is_forced else len(ids) for ids, is_forced, _ in blocks],
        [0 if is_forced else len(tokens) - 1 for _, is_forced, tokens in blocks],
    )


def row_passes(
    slots: Sequence[int], num_rows: Sequence[int], num_kept: Sequence[int], max_rows: int
) -> list[tuple[list[int], list[int], list[int]]]:
    """Does what _C.row_passes does."""
    ends = accumulate(num_rows)
    kept = [
        (slot, end - count + row)
        for slot, end, count, keep in zip(slots, ends, num_rows, num_kept, strict=True)
        for row in range(keep)
    ]
    passes = [kept[begin : begin + max_rows] for begin in range(0, len(kept), max_rows)]
    counts = [Counter(slot for slot, _ in each) for each in passes]
    return [([*count], [*count.values()], [row for _, row in each]) for each, count in zip(passes, counts, strict=True)]
