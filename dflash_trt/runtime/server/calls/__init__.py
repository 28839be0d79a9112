# SPDX-License-Identifier: Apache-2.0
"""Tool calls in every format: their grammars and their parsers."""
