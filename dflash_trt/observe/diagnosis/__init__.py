# SPDX-License-Identifier: Apache-2.0
"""Diagnoses the speculative decoding of a running server from a client's side.

`probes` sends requests, `noise` separates signal from noise, `judge_*` find faults and name their `causes`.
"""
