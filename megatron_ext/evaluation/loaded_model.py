# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model as its files have it, and whether a corpus is of its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.convert.tokenizer_files import tokenizer_folder
from megatron_ext.data.checks.given_vocabulary import VocabularyConfig
from megatron_ext.data.checks.vocabulary import refuse_other_tokenizer
from megatron_ext.data.corpus_files import check_corpus
from megatron_ext.data.tokenizers import TokenizerSpec
from megatron_ext.errors import UserError
from megatron_ext.extras import pip_install
from megatron_ext.quietly import quietly

__all__ = ["check_data", "load_model"]

_MOST = 3
"""Names of weights that a message has."""


def load_model(folder: Path, device: str, dtype: str) -> Any:
    """Return a model as transformers loads it.

    Args:
        folder: of the model.
        device: as torch names it.
        dtype: of the weights, as torch names it, or auto.

    Raises:
        UserError: it cannot be loaded, or its files have other weights than it takes: transformers would begin with
            random ones, and leave others out.
    """
    try:
        with quietly():
            import transformers
            from safetensors import SafetensorError
    except ImportError as error:
        raise UserError(f"evaluate: transformers is not installed; run `{pip_install('transformers')}`") from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        # Other shapes are named below; transformers would name none.
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        model = model.to(device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise UserError(f"{folder}: transformers cannot load it on {device} ({reason})") from error
    problems = [
        f"{what} {_listed(found[kind])}"
        for kind, what in (
            ("missing_keys", "its files lack"),
            ("unexpected_keys", "the model does not take"),
            ("mismatched_keys", "of another shape is"),
        )
        if found.get(kind)
    ]
    if problems:
        raise UserError(
            f"{folder}: the weights are not those of its config.json: {'; '.join(problems)}; copy or convert the "
            "model again"
        )
    return model.eval()


def check_data(prefix: str, model: Path) -> str | None:
    """Check that a corpus was made with a model's tokenizer, as far as both say which one theirs is.

    Args:
        prefix: of the corpus.
        model: folder of the model.

    Returns:
        What was not checked, None for nothing.

    Raises:
        UserError: it was made with another one, or is not whole.
    """
    check_corpus(prefix, option="--data")
    folder = tokenizer_folder(model)
    if folder is None:
        return f"{model} has no tokenizer: whether the ids of {prefix} are its own is not checked"
    given = VocabularyConfig(tokenizer=TokenizerSpec(folder=str(folder)), tokenizer_name="the model's tokenizer")
    if not refuse_other_tokenizer(prefix, given):
        return f"{prefix} has no record of its tokenizer ({prefix}.json): whether it is the model's is not checked"
    return None


def _listed(names: Any) -> str:
    ordered = sorted(name if isinstance(name, str) else str(name[0]) for name in names)
    more = f" and {len(ordered) - _MOST} more" if len(ordered) > _MOST else ""
    return f"{', '.join(ordered[:_MOST])}{more}"
