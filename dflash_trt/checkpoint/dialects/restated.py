# SPDX-License-Identifier: Apache-2.0
"""Compares facts that config.json states twice, under other names or in another numbering.

Runtimes do not read the same one: vLLM 0.33 takes eagle_aux_hidden_state_layer_ids before target_layer_ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import CONFLICT, Facts
from dflash_trt.errors import CheckpointError, cut

SECTIONS = ("dflash_config", "dspark_config", "eagle_config")


def _taps(spec: DraftSpec) -> list[int]:
    return list(spec.target_layer_ids)


def _entered_layers(spec: DraftSpec) -> list[int]:
    """The taps by the layer that they enter, one more than the layer that they leave."""
    return [tap + 1 for tap in spec.target_layer_ids]


RESTATED: dict[str, Callable[[DraftSpec], object]] = {
    "target_layer_ids": _taps,
    "dspark_target_layer_ids": _taps,
    "eagle_aux_hidden_state_layer_ids": _entered_layers,
    "aux_hidden_state_layer_ids": _entered_layers,
    "num_aux_layers": lambda spec: len(spec.target_layer_ids),
    "num_aux_hidden_states": lambda spec: len(spec.target_layer_ids),
    "mask_token_id": lambda spec: spec.mask_token_id,
    "pard_token": lambda spec: spec.mask_token_id,
    "dspark_noise_token_id": lambda spec: spec.mask_token_id,
    "num_target_layers": lambda spec: spec.num_target_layers,
    "target_num_hidden_layers": lambda spec: spec.num_target_layers,
    "block_size": lambda spec: spec.block_size,
    "dspark_block_size": lambda spec: spec.block_size,
    "target_hidden_size": lambda spec: spec.tap_hidden_size or spec.hidden_size,
}
"""Value of each key that states a fact, by the fact."""


def check_restated(config: Facts, spec: DraftSpec) -> None:
    """Raises CheckpointError, with both values, for a key that contradicts the fact that was read; it counts as read.

    A fact that is stated once and nowhere else is not compared with itself: `spec` has its value.
    """
    for place in _places(config):
        for key, value_of in RESTATED.items():
            value = value_of(spec)
            if key not in place or value is None or place.equals(key, value):
                continue
            raise CheckpointError(
                f"{config.file}: {place.path(key)} is {cut(json.dumps(place.values()[key]))}, but the other keys of"
                f" this fact mean {json.dumps(value)} there",
                hint=CONFLICT,
            )


def _places(config: Facts) -> Iterator[Facts]:
    yield config
    for name in SECTIONS:
        if config.peek(name):
            yield config.section(name)
