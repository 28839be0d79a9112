# SPDX-License-Identifier: Apache-2.0
"""The dialects of draft checkpoints, one file each: config.json becomes a DraftSpec, tensors get canonical names.

Canonical names are z-lab's. Nothing outside this folder knows a dialect.
"""
