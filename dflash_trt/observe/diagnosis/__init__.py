# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the speculative decoding of a running server, seen from a client's side.

`probes` asks, `noise` separates signal from noise, `judge_*` find faults and name their `causes`.
"""
