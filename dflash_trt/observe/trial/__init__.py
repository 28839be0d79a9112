# SPDX-License-Identifier: Apache-2.0
"""A short trial: a server is started plain and with DFlash, asked the same, diagnosed, compared and stopped."""
