# SPDX-License-Identifier: Apache-2.0
"""Load against an endpoint, the records of it, and reports on them. Loads no torch."""
