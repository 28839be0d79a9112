# SPDX-License-Identifier: Apache-2.0
"""The verdict on the page's comparison is `paired_speed`'s, within bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.runtime.server.live import Live

PAIR = {"plain": {"tokens": 100, "seconds": 1.0}, "dflash": {"tokens": 100, "seconds": 0.5}}


def judged(live: Live, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = live.post("/paired-speed", **body).json()
    return answer


def test_pairs_are_judged(live: Live) -> None:
    assert judged(live, pairs=[PAIR] * 16, acceptance_length=2.5) == {
        "sentence": "faster: 2.00x to 2.00x the speed of plain decoding (95 % interval, 16 pairs)",
        "outcome": "faster", "is_narrow": True,
    }  # fmt: skip
    impossible = judged(live, pairs=[PAIR] * 16, acceptance_length=1.5)
    assert impossible["outcome"] == "not known"
    assert "too busy to tell" in impossible["sentence"]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"pairs": []}, {"pairs": [PAIR] * 257}, {"pairs": [{"plain": PAIR["plain"]}]},
        {"pairs": [PAIR | {"dflash": {"tokens": 0, "seconds": 1.0}}]},
        {"pairs": [PAIR | {"dflash": {"tokens": 1, "seconds": 0}}]},
        {"pairs": [PAIR], "acceptance_length": 0.5}, {"pairs": [PAIR], "more": 1},
    ],
)  # fmt: skip
def test_other_bodies_are_refused(body: dict[str, Any], live: Live) -> None:
    response = live.post("/paired-speed", **body)
    assert response.status_code == 400
    assert json.loads(response.content)["error"]["message"].startswith("body: ")
