# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as files: every dialect in, one DraftSpec and one TargetSpec out; safetensors read and written."""
