# SPDX-License-Identifier: Apache-2.0
"""What a drafter is worth: losslessness, tau, acceptance by position, error by layer; features captured for later."""
