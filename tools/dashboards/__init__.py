# SPDX-License-Identifier: Apache-2.0
"""Grafana dashboards and Prometheus alert rules: docs/dashboards/, written from one list of panels."""
