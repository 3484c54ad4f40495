# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, and the promise that stock Megatron agrees about their ids."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.tokenizers import ByteTokenizer, TokenizerSpec, token_dtype
from megatron_ext.errors import UserError
from megatron_ext.quietly import quietly
from tests.support.corpus import EOS, make_tokenizer, unhurried


def megatron_tokenizer(flags: list[str]) -> Any:
    """Build the tokenizer that stock Megatron builds for these flags, with its own parser."""
    with quietly():
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args(flags)
        args.rank = 0
        return build_tokenizer(args)


@unhurried
@given(st.text())
def test_bytes_turn_back_into_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_a_character_cut_in_half_is_marked_when_decoding() -> None:
    assert ByteTokenizer().decode(list("\u00e9x".encode())[1:]) == "\ufffdx"


def test_megatrons_own_flags_give_the_byte_vocabulary_and_its_end_of_document_id() -> None:
    tokenizer = megatron_tokenizer(TokenizerSpec().megatron_args())
    assert tokenizer.vocab_size == ByteTokenizer.vocab_size == 257
    assert tokenizer.eod == ByteTokenizer.eod == 256
    assert tokenizer.pad not in range(257), (
        "a padding id that occurs in the data would be masked out of the loss"
    )


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.int32), (250_000, np.int32)]
)
def test_token_type_follows_megatrons_gpt_dataset(vocab_size: int, dtype: type) -> None:
    assert token_dtype(vocab_size) is dtype


class TestHuggingFace:
    """All of these load a real tokenizer that is trained here."""

    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        pytest.importorskip("transformers", reason="the extra `data` is not installed")

    def test_ids_equal_megatrons_for_the_flags_it_prints(self, tmp_path: Path) -> None:
        spec = TokenizerSpec(folder=str(make_tokenizer(tmp_path / "tok")))
        ours, megatrons = spec.load(), megatron_tokenizer(spec.megatron_args())
        texts = ["def main(self):\n    return 1\n", "h\u00e9llo \U0001f600", "  ", f"a {EOS} b"]
        assert [ids.tolist() for ids in ours.encode(texts)] == [megatrons.tokenize(text) for text in texts]
        assert (ours.vocab_size, ours.eod) == (megatrons.vocab_size, megatrons.eod)
        assert ours.decode(ours.encode(texts[:1])[0]) == texts[0]

    def test_special_tokens_that_the_tokenizer_adds_itself_are_kept_as_megatron_keeps_them(
        self, tmp_path: Path
    ) -> None:
        from tokenizers.processors import TemplateProcessing

        around = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
        spec = TokenizerSpec(folder=str(make_tokenizer(tmp_path / "tok", post_processor=around)))
        (ids,) = spec.load().encode(["hello"])
        assert ids[0] == 0
        assert ids.tolist() == megatron_tokenizer(spec.megatron_args()).tokenize("hello")

    def test_the_sep_token_ends_documents_where_there_is_no_eos(self, tmp_path: Path) -> None:
        folder = make_tokenizer(tmp_path / "tok", eos_token=None, sep_token=EOS)
        spec = TokenizerSpec(folder=str(folder))
        assert spec.load().eod == megatron_tokenizer(spec.megatron_args()).eod == 0

    def test_no_end_of_text_token_is_refused(self, tmp_path: Path) -> None:
        folder = make_tokenizer(tmp_path / "tok", eos_token=None)
        with pytest.raises(UserError, match=r"no end-of-text token; set eos_token in tokenizer_config\.json"):
            TokenizerSpec(folder=str(folder)).load()

    def test_a_vocabulary_with_holes_is_refused_at_the_first_id_beyond_its_size(self, tmp_path: Path) -> None:
        folder = make_tokenizer(tmp_path / "tok")
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"] = {
            token: index + 5000 if index > 200 else index
            for token, index in content["model"]["vocab"].items()
        }
        (folder / "tokenizer.json").write_text(json.dumps(content))
        tokenizer = TokenizerSpec(folder=str(folder)).load()
        with pytest.raises(UserError, match=r"yields id 5\d+ although its vocabulary has \d+ entries"):
            tokenizer.encode(["h\u00e9llo def main return \U0001f600"])

    def test_a_folder_that_is_not_a_tokenizer_is_refused_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "tok").mkdir()
        (tmp_path / "tok/tokenizer.json").write_text("{")
        with pytest.raises(UserError, match=r"tok: cannot be loaded: .+") as error:
            TokenizerSpec(folder=str(tmp_path / "tok")).load()
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(("names", "held"), [((), "nothing"), (("config.json", "a.txt"), "a.txt, config.json")])
    def test_a_folder_without_a_tokenizer_is_told_what_it_holds(
        self, tmp_path: Path, names: tuple[str, ...], held: str
    ) -> None:
        for name in names:
            (tmp_path / name).write_text("{}")
        with pytest.raises(UserError) as error:
            TokenizerSpec(folder=str(tmp_path)).load()
        assert str(error.value) == (
            f"--tokenizer {tmp_path}: holds no tokenizer (tokenizer.json, tokenizer.model, vocab.txt, ...), but {held}"
            "; give the folder that does"
        )

    def test_code_in_the_folder_runs_only_when_it_is_trusted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import transformers.dynamic_module_utils

        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        folder = make_tokenizer(
            tmp_path / "tok",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
        )
        (folder / "own_code.py").write_text(
            "from pathlib import Path\n"
            "from transformers import PreTrainedTokenizerFast\n\n"
            f"Path({str(tmp_path / 'ran')!r}).touch()\n\n\n"
            "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
        )
        with pytest.raises(UserError, match="cannot be loaded"):
            TokenizerSpec(folder=str(folder)).load()
        assert not (tmp_path / "ran").exists()
        trusting = TokenizerSpec(folder=str(folder), trust_remote_code=True)
        assert trusting.load().eod == 0
        assert (tmp_path / "ran").exists()
        assert "--trust-remote-code" in trusting.megatron_args()


def test_a_missing_package_is_named_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what makes `import transformers` fail
    with pytest.raises(
        UserError, match=r"needs the package transformers .* pip install 'transformers>="
    ):
        TokenizerSpec(folder=str(tmp_path)).load()


def test_a_name_that_is_not_a_local_folder_is_not_looked_up_anywhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder; give a local folder"):
        TokenizerSpec(folder="gpt2").load()
    with pytest.raises(UserError, match="not a folder; give a local folder"):
        TokenizerSpec(folder=str(tmp_path / "none")).fingerprint()


def test_fingerprint_follows_the_tokenizers_files_and_ignores_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    spec = TokenizerSpec(folder=str(tmp_path))
    before = spec.fingerprint()
    (tmp_path / "model.safetensors").write_text("weights")
    assert spec.fingerprint() == before
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert spec.fingerprint() != before
