# SPDX-License-Identifier: Apache-2.0
"""Configuration of training with hot switching: the fields' docstrings are the help texts of the command line."""

# Annotations are evaluated here (no postponed evaluation): Megatron's argument factory reads the types.

from dataclasses import dataclass

from megatron_ext.config_options import FromArgs, flag

__all__ = ["ATTENTIONS", "HotSwitchConfig"]

ATTENTIONS = ("documents", "rows", "padded")
"""How layers can keep the documents of a row apart."""


@dataclass(frozen=True, kw_only=True)
class HotSwitchConfig(FromArgs):
    """Each training step runs several parallel strategies, one per bucket of sequence lengths (HotSPa, SOSP 2024).

    The training data is read document by document, and --global-batch-size counts sequences: documents, or pieces of
    --seq-length tokens of longer ones.
    """

    hot_switch_strategies: list[str] | None = None
    """Strategies as DP,TP,PP, each for all ranks. The first one is home: it owns the optimizer's state and trains
    the longest sequences, and --tensor-model-parallel-size and --pipeline-model-parallel-size are taken from it. The
    others are guests in the order in which they run, shortest sequences first. With one strategy nothing switches.
    --context-parallel-size holds for all of them, Megatron's options on pipeline stages for those with as many stages
    as home (others have one chunk per stage, as even as the layers divide), and the expert parallel sizes for those
    whose ranks they fit (others have the nearest that do)."""

    hot_switch_bucket_sizes: list[int] | None = None
    """Bounds of the sequence lengths, from --seq-length down to 0, one more than strategies. A strategy trains the
    sequences that are longer than the lower bound of its bucket, up to the upper one."""

    hot_switch_strategy_file: str | None = None
    """The same as a YAML file, in which each strategy can also have cp, vpp, ep, etp, first_stage_layers,
    last_stage_layers, stage_layers, micro_batch_group, sequence_parallel, micro_batch_size and recompute of its own;
    home's are taken for the run's."""

    hot_switch_gpus_per_node: int = 8
    """Ranks of a node, for the choice of who sends in a switch: of several ranks that hold the same part, one on the
    receiver's node is taken."""

    hot_switch_algorithm: str = "balanced"
    """How senders are chosen where several ranks hold the same part: balanced, joint (links within and between nodes
    together), greedy, round-robin or fcfs."""

    hot_switch_attention: str | None = None
    """How documents are kept apart. documents: rows are packed, and attention is computed one document at a time, by
    torch's scaled dot product attention, which keeps no scores. rows: by Megatron's own unfused attention over whole
    packed rows with a mask, whose time and memory grow with the square of a row's length. padded: as documents, but a
    row has one document and padding, as recurrent layers need, which carry their state across documents. Unless given
    it is documents, and padded with Gated DeltaNet."""

    hot_switch_direct_bytes: int | None = flag("--hot-switch-direct-bytes", None, type=int)
    """Parts of a switch from this size on travel as messages of their own, smaller ones together. Unless given it is
    what was measured for gloo (131072), and an assumption for NCCL (1048576)."""

    hot_switch_profile: bool = False
    """Print at every --log-interval what each switch of the step moved and took on the first rank. On a GPU this waits
    for the device around each of them, which costs time."""

    @property
    def active(self) -> bool:
        """Whether there are strategies."""
        return self.hot_switch_strategies is not None or self.hot_switch_strategy_file is not None
