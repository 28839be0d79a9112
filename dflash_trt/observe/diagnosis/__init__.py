# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the speculative decoding of a running server, seen from a client's side.

`probes` ask, `noise` says what is more than noise, `judge` finds what is wrong, `causes` name why.
"""
