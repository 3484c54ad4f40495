# SPDX-License-Identifier: Apache-2.0
"""The figures that README and docs quote: the commands that make them, what these said, and the page that shows it."""
