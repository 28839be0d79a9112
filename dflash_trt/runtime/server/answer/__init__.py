# SPDX-License-Identifier: Apache-2.0
"""Answers: from the decoder's chunks to documents and events."""
