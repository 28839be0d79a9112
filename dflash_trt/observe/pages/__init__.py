# SPDX-License-Identifier: Apache-2.0
"""Pages of reports: tables as values, templates as HTML that loads nothing and as Markdown."""
