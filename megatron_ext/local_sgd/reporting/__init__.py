# SPDX-License-Identifier: Apache-2.0
"""What rounds tell people: reports, log lines, the file of rounds and its picture."""
