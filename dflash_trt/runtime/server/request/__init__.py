# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests: read, checked, and turned into what is generated."""
