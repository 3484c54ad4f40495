# SPDX-License-Identifier: Apache-2.0
"""How the values of workers meet: segments, owners, and the kinds of rounds over collectives."""
