# SPDX-License-Identifier: Apache-2.0
"""A running OpenAI-compatible server, seen from outside: its runtime, its answers, its acceptance.

`Client` asks, `identify` tells which runtime answers, `meter` counts acceptance between two moments.
"""
