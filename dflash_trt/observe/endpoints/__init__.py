# SPDX-License-Identifier: Apache-2.0
"""A running OpenAI-compatible server, seen from outside: its runtime, its answers, its acceptance.

`Client` sends requests, `identify` recognises the runtime, `meter` counts acceptance between two points in time.
"""
