# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API over HTTP: requests in, answers and their acceptance out, metrics, and a page that shows it."""
