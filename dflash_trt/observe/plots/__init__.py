# SPDX-License-Identifier: Apache-2.0
"""Pictures: throughput against a user's speed, what `verify` measured, how a recovery went."""
