# SPDX-License-Identifier: Apache-2.0
"""The embedded runtime's metrics on Triton's /metrics page."""

from __future__ import annotations

GAUGES = {
    "dflash_running_requests": "Requests that hold a slot",
    "dflash_waiting_requests": "Queued requests",
    "dflash_free_slots": "Free slots",
}
COUNTERS = {
    "dflash_output_tokens": "Tokens emitted",
    "dflash_verify_steps": "Verify passes, counted once for each request in them",
    "dflash_draft_tokens": "Draft tokens verified",
    "dflash_accepted_draft_tokens": "Draft tokens accepted",
}
FIELDS = {
    "dflash_running_requests": "running",
    "dflash_waiting_requests": "waiting",
    "dflash_free_slots": "free_slots",
    "dflash_output_tokens": "output_tokens",
    "dflash_verify_steps": "acceptance.passes",
    "dflash_draft_tokens": "acceptance.proposed",
    "dflash_accepted_draft_tokens": "acceptance.accepted",
}
"""Fields of DecoderMetrics."""
