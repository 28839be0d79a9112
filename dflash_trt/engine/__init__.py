# SPDX-License-Identifier: Apache-2.0
"""The engine directory: its manifest, what it holds, and what it needs of a machine."""
