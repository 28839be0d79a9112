# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations, each with the message that it must get."""

from __future__ import annotations

from tests.deploy.broken import keys, other_runtimes, rules

CASES = keys.CASES | rules.CASES | other_runtimes.CASES
