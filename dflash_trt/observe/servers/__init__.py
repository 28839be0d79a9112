# SPDX-License-Identifier: Apache-2.0
"""Programs and servers that this process starts on this machine, and that end with it."""
