# SPDX-License-Identifier: Apache-2.0
"""A running OpenAI-compatible server, seen from outside: what it is, what it answers, what its drafts are worth.

`Client` asks, `identify` tells which runtime answers, `meter` counts acceptance between two moments.
"""
