# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: the processes of one target find each other, decode as one, and end together."""
