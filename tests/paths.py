# SPDX-License-Identifier: Apache-2.0
"""Where things lie."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FIXTURES = REPOSITORY / "tests" / "fixtures"
