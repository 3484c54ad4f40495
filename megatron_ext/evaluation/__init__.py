# SPDX-License-Identifier: Apache-2.0
"""How good a model is: perplexity on a part of a corpus, tasks of lm-evaluation-harness, beside other models."""
