# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext local-sgd report` on a run that was really made."""

import json
import re
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from tests.local_sgd.runs import local_run

GUARD = {
    "local_sgd_skip_anomaly": True,
    "local_sgd_ewma_warmup_steps": 2,
    "local_sgd_ewma_alpha": 0.5,
    "local_sgd_ewma_threshold": 0.1,
    "local_sgd_pseudo_gradnorm_reduce": True,
    "local_sgd_clip_pseudo_grad": 0.01,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the --save folder of a run of 6 rounds, the last two of which were made again by a resume."""
    folder = tmp_path_factory.mktemp("run")
    options = {"local_sgd_sync_interval": 2, "train_iters": 12, "save": str(folder), **GUARD}
    local_run("single", "fp32", workers=2, save_interval=8, **options)
    local_run("single", "fp32", workers=2, save_interval=100, load=str(folder), ckpt_step=8, **options)
    return folder


def test_the_table_shows_every_round_once_and_the_picture_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["local-sgd", "report", str(run)]) == 0
    head, *rows, summary, picture = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["round", "iteration", "norm"]
    assert [row.split()[:2] for row in rows] == [[str(number), str(2 * number)] for number in range(1, 7)]
    assert "weights" in head.split() and "skipped" in head.split()
    assert all(re.search(r" 0\.\d{3} \.\. (0|1)\.\d{3} ", row) for row in rows)
    assert "6 rounds, " in summary and "worker" in summary
    assert Path(picture.removeprefix("picture: ")).read_bytes().startswith(b"\x89PNG")


def test_every_round_says_what_was_decided(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["local-sgd", "report", str(run), "--json"]) == 0
    first, *later = json.loads(capsys.readouterr().out)
    assert len(first["unit_norms"]) == 4
    assert all(sum(weights) == pytest.approx(1) and min(weights) > 0 for weights in first["weights"].values())
    assert all(0 < coefficient < 1 for coefficient in first["clipped"].values()) and first["clipped"]
    # There is no momentum before the first round; Nesterov's holds all earlier ones afterwards.
    assert first["cosine"] == 0.0 or first["cosine"] is None
    assert all(-1 <= entry["cosine"] <= 1 and entry["cosine"] != 0 for entry in later)
    assert any(entry["rejected"] for entry in later)
    for entry in (first, *later):
        everyone = [unit for unit, workers in entry["rejected"].items() if len(workers) == 2]
        assert entry["skipped_units"] == everyone
        parts = [entry[f"{part}_seconds"] for part in ("waiting", "sending", "applying")]
        assert sum(parts) == pytest.approx(entry["seconds"])
        assert 0 <= entry["waiting_seconds"] + entry["applying_seconds"] <= entry["seconds"]
        for unit, left_out in entry["rejected"].items():
            assert [entry["weights"][unit][worker] for worker in left_out] == [0.0] * len(left_out)


def test_the_table_can_be_cut(run: Path, capsys: pytest.CaptureFixture[str]):
    main(["local-sgd", "report", str(run), "--last", "2", "--png", str(run / "other.png")])
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:3]] == ["5", "6"]
    assert (run / "other.png").exists()


def entry_of(number: int, norms: list[float], **others: object) -> dict[str, object]:
    return {
        **{"round": number, "iteration": 2 * number, "pseudo_gradient_norm": 1.0, "worker_norms": norms},
        **{"weights": {}, "rejected": {}, "cosine": None, "bytes_sent": 10},
        **{"seconds": 0.2, "waiting_seconds": 0.1, "applying_seconds": 0.0},
        **others,
    }


@pytest.mark.parametrize("damage", [{"seconds": None}, {"weights": {"unit": ["x"]}}, {"worker_norms": []}])
def test_a_damaged_line_is_named(damage: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rounds.jsonl"
    file.write_text(json.dumps(entry_of(1, [1.0])) + "\n" + json.dumps({**entry_of(2, [1.0]), **damage}) + "\n")
    assert main(["local-sgd", "report", str(file)]) == 2
    assert "the line of round 2 is damaged" in capsys.readouterr().err


def test_a_picture_of_a_kind_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rounds.jsonl"
    file.write_text(json.dumps(entry_of(1, [1.0])) + "\n")
    assert main(["local-sgd", "report", str(file), "--png", str(tmp_path / "x.txt")]) == 2
    assert "x.txt cannot be drawn: Format 'txt' is not supported" in capsys.readouterr().err


def test_rounds_of_other_numbers_of_workers_are_drawn_together(tmp_path: Path):
    norms = ([1.0, 2.0, 3.0], [1.0, 2.0])
    entries = [entry_of(number, of_workers) for number, of_workers in enumerate(norms, 1)]
    file = tmp_path / "local_sgd_rounds.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert main(["local-sgd", "report", str(file)]) == 0
    assert (tmp_path / "local_sgd_rounds.png").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "/nowhere: no such file; give the --save folder"),
        ([".", "--last", "-1"], "--last is -1"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["local-sgd", "report", *arguments]) == 2
    assert complaint in capsys.readouterr().err
