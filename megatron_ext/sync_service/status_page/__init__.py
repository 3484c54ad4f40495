# SPDX-License-Identifier: Apache-2.0
"""The status page: what a server's runs are doing, over plain HTTP, for people and for Prometheus."""
