# SPDX-License-Identifier: Apache-2.0
"""Megatron's parser with all of our options, for ranks: it imports Megatron."""

import argparse


def full_parser() -> argparse.ArgumentParser:
    """Return the parser that a run under `patch_megatron()` has."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.features import all_features

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    for feature in all_features():
        feature.add_arguments(parser)
    return parser
