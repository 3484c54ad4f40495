# SPDX-License-Identifier: Apache-2.0
"""Makes the reference pages of the site from the code: config classes, the command's parsers, the registries."""
