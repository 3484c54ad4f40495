# SPDX-License-Identifier: Apache-2.0
"""Helpers that tests share: warm rank processes, pretraining runs in them, toy models."""
