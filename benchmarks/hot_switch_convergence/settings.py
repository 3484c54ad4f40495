# SPDX-License-Identifier: Apache-2.0
"""What the study trains on functions and classes, and by which methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.convergence.settings import MODEL, TRAINING, Method, Run, Study
from tests.support.presets import Options, command_line, toy_gpt

__all__ = ["CONTEXT", "HOT", "PADDED", "RANKS", "STOCK", "HotSwitchStudy"]

RANKS = 4
CONTEXT = 512
# Stock packing: rows of CONTEXT tokens, cut out of one stream of documents.
STOCK = Method(
    name="stock",
    title="Megatron, packed",
    options={"micro_batch_size": 4, "global_batch_size": 16, "eval_iters": 9},
)
_BY_PIECE: Options = {
    "micro_batch_size": 1,
    "global_batch_size": 25,  # documents, or pieces of CONTEXT tokens of longer ones
    "eval_global_batch_size": 24,
    "eval_iters": 6,  # on 144 rows, as packed training
    "calculate_per_token_loss": True,
}
# Rows of one document or piece each, filled up. Processes split the model as home does for hot switching, because 25
# rows cannot be shared out among four: so the initial weights are the same, too.
PADDED = Method(
    name="padded",
    title="Megatron, padded",
    options={**_BY_PIECE, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
)
HOT = Method(
    name="hot",
    title="hot switching",
    options={
        **_BY_PIECE,
        "hot_switch_strategies": ["1,2,2", "4,1,1", "2,2,1"],
        "hot_switch_bucket_sizes": [CONTEXT, 256, 128, 0],
    },
    goal=1.02,
)

_STEPS_BY_PIECE = 0.99
"""For a packed one: a piece has 330 tokens to predict on average."""


@dataclass(frozen=True, kw_only=True)
class HotSwitchStudy(Study):
    """Where everything is, and how long a run is."""

    iterations: int = 200
    evaluation: int = 50
    """Steps between evaluations where they are made of pieces."""

    methods: tuple[Method, ...] = (STOCK, PADDED, HOT)

    @property
    def corpus(self) -> Path:
        """Prefix of the tokenized corpus."""
        return self.output / "corpus" / "functions"

    @property
    def held_out(self) -> Path:
        """Prefix of the documents of it that nobody trains on, cut and padded to rows of their own."""
        return self.output / "corpus" / "held_out"

    @property
    def padded(self) -> Path:
        """Prefix of the other documents, padded to whole rows."""
        return self.output / "corpus" / "padded"

    @property
    def validation(self) -> Path:
        """Prefix of the documents that nobody trains on as they are: what Megatron splits off `corpus`."""
        return self.output / "corpus" / "validation"

    def arguments(self, run: Run) -> list[str]:
        """Return the command line of examples/pretrain_gpt.py."""
        is_stock = run.method is STOCK
        # Megatron takes other rows for every evaluation, and shuffles them by how many there are in all: all methods
        # have the same only where their evaluations are as many.
        when: Options = {
            "seed": run.seed,
            "train_iters": self.iterations if is_stock else round(_STEPS_BY_PIECE * self.iterations),
            "eval_interval": round(self.evaluation / _STEPS_BY_PIECE) if is_stock else self.evaluation,
            "log_interval": 1,
        }
        rows: Options = {
            "seq_length": CONTEXT,
            "max_position_embeddings": CONTEXT,
            # Stock packing keeps documents apart by these; hot switching does always, and validates by them.
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "eod_mask_loss": True,
            "make_vocab_size_divisible_by": 2,  # for each tensor parallel rank: 258 rows and 260, of which 257 are used
        }
        data = self.data
        if run.method is PADDED:
            files: Options = {"train_data_path": str(self.padded), "valid_data_path": str(self.validation)}
            data = {**data, "data_path": None, "split": None, **files}
        return toy_gpt(MODEL, TRAINING, when, data, rows, run.method.options, self.overrides)

    def document_arguments(self, run: Run, rows: int, checkpoint: str) -> list[str]:
        """Return the command line that takes the loss of held-out documents: stock Megatron's, for all methods.

        Args:
            run: what was trained.
            rows: of held-out documents.
            checkpoint: its folder.
        """
        batch = int(str(STOCK.options["global_batch_size"]))
        evaluation: Options = {
            "skip_train": True,
            "train_iters": 1,
            "data_path": str(self.held_out),
            "split": f"1,{rows - 1},0",  # Megatron does not return from building a split without documents
            "eval_iters": max(1, (rows - 1) // batch),
            "eval_global_batch_size": batch,
            "load": checkpoint,
            "finetune": True,
            "no_load_optim": True,
            "no_load_rng": True,
        }
        return self.arguments(Run(method=STOCK, seed=run.seed)) + command_line(evaluation)
