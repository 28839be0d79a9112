# SPDX-License-Identifier: Apache-2.0
"""Decisions of the decode loop: how many drafts are verified, greedy or drawn proposals.

The decode loop asks each policy for its decision, and tells both what every step did, by one `StepRecord`.
Policies know settings and records, no requests and no models. Output never depends on them (docs/sampling.md).
"""
