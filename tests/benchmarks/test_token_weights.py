# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/token_weights.py`: what peers train on, and its report at toy size."""

import pytest
import torch

from benchmarks import token_weights
from benchmarks.token_weights import BATCHES, CONTEXT, Characters, Samples, of_one_job, texts
from tests.benchmarks.reports import read_cases


def test_peers_have_parts_of_one_length_and_other_samples_with_every_seed():
    parts, held_out = texts(1)
    assert {len(part.text) for part in parts} == {len(held_out)} and len(held_out) > 10_000
    whole = torch.cat([*(part.text for part in parts), held_out])
    assert len(whole) == (len(BATCHES) + 1) * len(held_out)
    drawn = [part.starts() for part in parts]
    assert [len(starts) for starts in drawn] == list(BATCHES)
    assert all(int(starts.max()) + CONTEXT < len(held_out) for starts in drawn)
    others, _ = texts(2)
    assert not any(torch.equal(starts, part.starts()) for starts, part in zip(drawn, others, strict=True))


def test_the_loss_is_of_the_character_that_follows():
    text = torch.arange(CONTEXT + 2)
    model = Characters(1)
    with torch.no_grad():
        model.weights["head"].zero_()
    starts = torch.tensor([0, 1])
    assert model.loss(text, starts).item() == pytest.approx(torch.tensor(128.0).log().item())
    for _ in range(50):
        model.step(text, starts)
    assert model.loss(text, starts).item() < 0.1
    # Another character in that place is not what it has learned.
    text[-1] = 100
    assert model.loss(text, starts).item() > 1


def test_one_job_learns_from_the_samples_of_all_peers():
    assert of_one_job(3, 1) < of_one_job(1, 1) - 0.2
    first = Samples(torch.arange(100), 4, seed=3)
    assert torch.equal(first.starts(), Samples(torch.arange(100), 4, seed=3).starts())


@pytest.mark.slow
def test_every_kind_of_run_is_reported(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert token_weights.main(["--seeds", "1", "--rounds", "2", "--json", str(path)]) == 0
    case = read_cases(path)["by_tokens_over_alike_loss"]
    assert 0.5 < case["value"] < 1.0 and case["goal"] == 1.0
    said = capsys.readouterr().out
    kinds = ("all count alike", "by tokens", "one job")
    losses = {kind: float(said.split(f"\n{kind}")[1].split()[0]) for kind in kinds}
    assert losses["one job"] < losses["by tokens"] < losses["all count alike"]
