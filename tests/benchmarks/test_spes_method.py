# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/spes_method`: plain replicas against real peers at a real server, and the studies at toy size."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.spes_method.__main__ import main
from benchmarks.spes_method.model import Sizes, initial, is_of_experts
from benchmarks.spes_method.outcomes import Outcome
from benchmarks.spes_method.price_study import METHODS as PRICE
from benchmarks.spes_method.price_study import best_of_rates, study_price
from benchmarks.spes_method.real_peers import Comparison, compare_with_peers
from benchmarks.spes_method.released_study import METHODS as RELEASED
from benchmarks.spes_method.released_study import SPES, study_released
from benchmarks.spes_method.runs import Runs, equivalent
from benchmarks.spes_method.training import Adam, Merging, Method, block_owners, everyone, merged, train
from megatron_ext.spes import merge_experts
from tests.support.corpus import make, write_json_lines

TOY = Sizes(hidden=16, experts=4, width=8, context=16)
ADAM = Adam(rate=1e-2, least=1e-3, warmup=1, steps=9, clip=0.5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(f"{number} times {number} is {number**2}" for number in range(at, at + 10)) for at in range(200)]
    make(write_json_lines(folder / "texts.jsonl", texts), folder / "tokens")
    return folder / "tokens"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def samples(step: int) -> torch.Tensor:
    """Return the tokens of four replicas."""
    random = torch.Generator().manual_seed(step)
    return torch.randint(TOY.vocabulary, (4, 2, TOY.context + 1), generator=random)


@pytest.mark.parametrize(
    ("peers", "owners"),
    [pytest.param(2, 1, id="two-peers"), pytest.param(4, 2, id="two-owners", marks=pytest.mark.slow)],
)
def test_peers_at_a_server_train_as_plain_replicas_with_masks_and_means_do(corpus: Path, peers: int, owners: int):
    compared = compare_with_peers(
        Comparison(
            sizes=TOY, adam=ADAM, interval=3, corpus=corpus, peers=peers, owners=owners, sequences=2, validated=8
        )
    )
    assert len(compared.peers) == len(compared.replicas) == ADAM.steps
    assert all(len(set(losses)) == peers for losses in compared.peers)  # every one reads its own samples
    assert compared.differences(2) <= 1e-5
    assert compared.validation_difference <= 3e-3


def test_a_replica_changes_what_is_shared_and_its_own_experts_alone():
    start = initial(TOY, 1)
    owners = block_owners(4, TOY.experts)
    trained = train(start, TOY, Method(owners=owners, interval=100), ADAM, samples)
    for name, value in trained.weights.items():
        changed = (value != start[name]).flatten(2 if is_of_experts(name) else 1).any(dim=-1)
        assert changed.equal(owners if is_of_experts(name) else torch.ones(4, dtype=torch.bool)), name


def test_after_a_round_replicas_are_equal_and_experts_are_their_owners():
    apart, after = (
        train(initial(TOY, 1), TOY, Method(owners=block_owners(4, TOY.experts), interval=interval), ADAM, samples)
        for interval in (100, ADAM.steps)
    )
    for name, value in after.weights.items():
        assert all(replica.equal(value[0]) for replica in value), name
        if is_of_experts(name):
            assert all(value[0, expert].equal(apart.weights[name][expert, expert]) for expert in range(4))
        else:
            torch.testing.assert_close(value[0], apart.weights[name].mean(dim=0))


def test_common_gradients_of_all_train_as_one_replica_with_all_samples_does():
    sizes = dataclasses.replace(TOY, balance=0.0)
    together = train(
        initial(sizes, 1), sizes, Method(owners=everyone(4, 4), interval=1, common_gradients=True), ADAM, samples
    )
    alone = train(
        initial(sizes, 1),
        sizes,
        Method(owners=everyone(1, 4), interval=1),
        ADAM,
        lambda step: samples(step).flatten(0, 1)[None],
    )
    means = torch.tensor(together.losses).mean(dim=1)
    torch.testing.assert_close(means, torch.tensor(alone.losses)[:, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [6, 4], ids=["others_than_donors", "no_more_than_donors"])
def test_merging_is_the_products_own(count: int):
    random = torch.Generator().manual_seed(3)
    experts = {"fc1": torch.randn(count, 8, 5, generator=random), "fc2": torch.randn(count, 5, 4, generator=random)}
    names = {
        f"decoder.layers.0.mlp.experts.{expert}.linear_{name}.weight": value[expert]
        for name, value in experts.items()
        for expert in range(count)
    }
    wanted = merge_experts(names, alpha=0.3)
    found = merged(experts, 0.3, 4)
    for name in names:
        expert, tensor = name.split(".")[5:7]
        torch.testing.assert_close(found[tensor.removeprefix("linear_")][int(expert)], wanted[name])
    assert [Merging(every=5, alpha=0.05, until=20).alpha_after(step) for step in (4, 5, 10, 20, 25)] == pytest.approx(
        [0, 0.0375, 0.025, 0, 0]
    )


def test_a_loss_is_worth_the_tokens_with_which_the_reference_reaches_it():
    curve = [(0.5, 2.2), (1.0, 2.0), (2.0, 1.9)]
    assert equivalent(2.1, curve) == pytest.approx(0.5**0.5)
    assert [equivalent(loss, curve) for loss in (2.2, 2.0, 1.9, 3.0, 1.0)] == pytest.approx([0.5, 1, 2, 0.5, 2])


@pytest.mark.parametrize(
    ("worth", "said"),
    [
        ([0.5, 0.7, 0.5], "at most 0.50"),
        ([0.5, 0.7, 0.9], "0.70"),
        ([0.5, 0.7], "at most 0.60"),
        ([0.9, 1.4, 1.4, 0.8], "at least 1.15"),
        ([0.9, 1.4, 1.2, 0.8], "1.05"),
    ],
    ids=["most_at_an_end", "between", "one_of_two_at_an_end", "one_of_the_middle_two", "middle_two_between"],
)
def test_what_lies_beyond_the_reference_runs_is_told(worth: list[float], said: str):
    outcome = Outcome(name="a", title="a", rate=1e-3, losses=[2.0], percent=[0.0], worth=worth, shares=(0.5, 1.0, 1.4))
    assert outcome.row()[-1] == said


def test_a_rate_that_diverges_is_not_chosen(corpus: Path, tmp_path: Path):
    runs = Runs(tmp_path, corpus)
    run = dataclasses.replace(
        RELEASED["centralized"][1], steps=2, warmup=1, sequences=1, validations=1, sizes=TOY, seed=1
    )
    diverging, trained = 0.9, 1e-3
    runs.make_missing([dataclasses.replace(run, rate=rate) for rate in (diverging, trained)])
    file = tmp_path / f"{dataclasses.replace(run, rate=diverging).name}.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "validation": {"2": math.nan}}))
    assert best_of_rates(runs, run, [1], (diverging, trained)).rate == trained


def test_the_rate_with_the_lowest_mean_of_the_choosing_seeds_is_chosen(corpus: Path, tmp_path: Path):
    runs = Runs(tmp_path, corpus)
    run = dataclasses.replace(RELEASED["centralized"][1], steps=2, warmup=1, sequences=1, validations=1, sizes=TOY)
    losses = {(1e-3, 1): 1.0, (1e-3, 2): 4.0, (2e-3, 1): 2.0, (2e-3, 2): 2.0}
    trials = {key: dataclasses.replace(run, rate=key[0], seed=key[1]) for key in losses}
    runs.make_missing(list(trials.values()))
    for key, trial in trials.items():
        file = tmp_path / f"{trial.name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "validation": {"2": losses[key]}}))
    assert best_of_rates(runs, run, [1, 2], (1e-3, 2e-3)).rate == 2e-3
    assert best_of_rates(runs, run, [1], (1e-3, 2e-3)).rate == 1e-3


def test_a_run_of_other_code_is_made_again_and_a_missing_one_has_no_loss(corpus: Path, tmp_path: Path):
    run = dataclasses.replace(
        RELEASED["centralized"][1], steps=2, warmup=1, sequences=1, validations=1, sizes=TOY, seed=1
    )
    runs = Runs(tmp_path, corpus)
    with pytest.raises(RuntimeError, match=r"seed1\.json is missing, or of another run"):
        runs.final(run)
    runs.make_missing([run])
    file = tmp_path / f"{run.name}.json"
    file.write_text(file.read_text().replace(json.loads(file.read_text())["code"], "another"))
    assert runs.finished(run) is None
    runs.make_missing([run])
    assert runs.final(run) == runs.finished(run).final


def test_the_released_comparison_gives_every_peer_the_batch_of_the_centralized_job():
    central = RELEASED["centralized"][1]
    assert SPES.tokens == 4 * central.tokens and SPES.sequences == central.sequences
    rounds = SPES.steps // SPES.interval
    assert rounds >= 200 and SPES.warmup >= 20 * SPES.interval
    assert SPES.merge_alpha == 0.05 and SPES.merge_every == 5 * SPES.interval
    assert SPES.steps // SPES.validations % SPES.interval == 0


def test_the_price_is_of_every_interval_and_number_of_owners_after_the_same_tokens():
    runs = [run for _, run in PRICE.values()]
    assert len({run.tokens for run in runs}) == 1
    apart = {(run.interval, run.owners) for run in runs if not run.common_gradients}
    assert apart == {(interval, owners) for interval in (1, 10, 50) for owners in (1, 2, 4)}
    assert {run.owners for run in runs if run.common_gradients} == {1, 2, 4}
    assert all(run.steps % run.interval == 0 for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("study", ["released", "price"])
def test_a_study_reports_on_every_method_and_makes_no_finished_run_again(
    study: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole, make_study = {"released": (RELEASED, study_released), "price": (PRICE, study_price)}[study]
    toy = {
        name: (title, dataclasses.replace(run, steps=10, warmup=2, sequences=1, validations=1, sizes=TOY))
        for name, (title, run) in whole.items()
    }
    cases = make_study(tmp_path, corpus, [4, 5], tmp_path / "picture.png", toy)
    assert [case.case for case in cases] == [f"{name}_loss_ratio" for name in toy if name != "centralized"]
    assert all(0.5 < case.value < 2 for case in cases)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [one["name"] for one in json.loads((tmp_path / f"{study}.json").read_text())] == list(toy)
    assert (tmp_path / f"{study}.md").read_text().count("\n") == 2 + len(toy)
    capsys.readouterr()
    make_study(tmp_path, corpus, [4, 5], tmp_path / "picture.png", toy)
    assert all(" 0 of them still to make" in line for line in capsys.readouterr().out.splitlines() if "runs," in line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("price --seeds 1 7", "--seeds: 1 chooses between learning rates; measure with others (--choosing-seeds)"),
        ("released --choosing-seeds 1", "no effect"),
        ("peers --seeds 1 2", "one"),
        ("released --rates 1e-3", "no effect"),
        ("price --rates 2", "between 0 and 1"),
        ("price --rates fast", "argument --rates: fast: a learning rate is a number between 0 and 1"),
        ("price --seeds 1 1", "argument --seeds: 1 is given more than once; give each once"),
        ("price --rates 3e-3 0.003", "argument --rates: 0.003 is given more than once"),
        ("released --plot nowhere/picture.png", "argument --plot: nowhere/picture.png cannot be written"),
    ],
)
def test_what_a_study_cannot_use_is_refused(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([*words.split(), "--output", str(tmp_path)])
    assert said in capsys.readouterr().err
