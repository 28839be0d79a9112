# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping of an answer, written for reading: acceptance by equality, the end, and what each pass did."""

from collections.abc import Sequence
from dataclasses import dataclass, field


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


def last_passes(answers: Sequence[Answer]) -> tuple[int, list[tuple[bool, int, int, int]]]:
    """Does what _C.last_passes does, for the answers that have begun."""
    last = [answer.passes[-1] for answer in answers if answer.passes]
    counted = [answer.passes[-1] for answer in answers if len(answer.passes) > 1]
    verified = [(is_forced, len(drafts), len(tokens), accepted) for _, tokens, drafts, accepted, is_forced in counted]
    return sum(len(tokens) for _, tokens, *_ in last), verified
