# SPDX-License-Identifier: Apache-2.0
"""What the processes of a benchmark do; the command beside this folder starts them, and reports."""
