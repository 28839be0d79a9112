# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 connections: uvicorn's, with the limits of time, size and number that it lacks."""
