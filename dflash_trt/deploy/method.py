# SPDX-License-Identifier: Apache-2.0
"""The decoding methods that a deployment can be served with."""

from __future__ import annotations

from typing import Literal

from dflash_trt.deploy.deployment_file import Eagle3
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.errors import ConfigError

Method = Literal["dflash", "eagle3", "none"]
METHODS: tuple[Method, ...] = ("dflash", "eagle3", "none")


def eagle3_of(deployment: ResolvedDeployment) -> Eagle3:
    """The EAGLE-3 drafter that the deployment names; raises ConfigError where it names none."""
    if deployment.eagle3 is None:
        raise ConfigError(
            f"{deployment.name}: missing key eagle3: expected the EAGLE-3 drafter to compare with",
            hint="add to the file: eagle3: {model: DIRECTORY_OR_REPOSITORY, draft_tokens: 3}",
        )
    return deployment.eagle3
