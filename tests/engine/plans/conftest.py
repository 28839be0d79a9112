# SPDX-License-Identifier: Apache-2.0
"""Engines of the fixtures in every recipe, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.plans.rtx import Engines, engine_of


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """(draft, recipe) -> its engine directory."""
    made: dict[tuple[str, str], Path] = {}

    def make(draft: str, recipe: str) -> Path:
        if (draft, recipe) not in made:
            made[draft, recipe] = engine_of(draft, recipe, tmp_path_factory.mktemp("engine"))
        return made[draft, recipe]

    return make
