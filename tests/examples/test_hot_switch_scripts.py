# SPDX-License-Identifier: Apache-2.0
"""The LLaMA scripts of hot switching: what they start, what they refuse, and that they train."""

import fcntl
import json
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.examples.command_lines import dry_run, launched, training_arguments, values
from tests.examples.desk import RECORD_ARGUMENTS, TRAIN_UNTIL_TOLD, Desk, validated
from tests.support.corpus import write_without_record
from tests.support.distributed import REPOSITORY, run_ranks
from tests.support.parsers import full_parser
from tests.support.ports import free_port

FOLDER = REPOSITORY / "examples/hot_switch"
HOT = FOLDER / "llama_hot_switch.sh"
PAPER_HOT = FOLDER / "exprs_for_paper/llama_hot_switch.sh"
STATIC = FOLDER / "llama_static_parallel.sh"
A100 = FOLDER / "exprs_for_A100_40G.sh"
DATASET = FOLDER / "create_web_dataset.sh"

CONTEXTS = (4096, 8192, 16384, 32768)
BUCKETS = {
    "c1": ("4096 0", "8192 4096 0", "16384 4096 0", "32768 16384 4096 0"),
    "c2": ("4096 0", "8192 4096 0", "16384 8192 4096 0", "32768 16384 8192 4096 0"),
}
# HotSPa's tables, by model and GPUs, then context.
STRATEGIES = {
    "c1": {
        ("7b", 8): ("8,1,1", "2,2,2 8,1,1", "2,2,2 8,1,1", "1,4,2 8,1,1 2,2,2"),
        ("7b", 16): ("16,1,1", "4,4,1 16,1,1", "4,4,1 16,1,1", "2,4,2 16,1,1 4,4,1"),
        ("13b", 8): ("4,2,1", "1,4,2 4,2,1", "1,4,2 4,2,1", "1,8,1 4,2,1 1,4,2"),
        ("13b", 16): ("8,2,1", "4,4,1 8,2,1", "4,4,1 8,2,1", "2,8,1 8,2,1 4,4,1"),
        ("32b", 32): ("4,2,4", "2,8,2 4,2,4", "2,8,2 4,2,4", "1,16,2 4,2,4 2,8,2"),
    },
    "c2": {
        ("7b", 8): ("8,1,1", "4,2,1 8,1,1", "2,2,2 8,1,1 4,2,1", "1,4,2 8,1,1 4,2,1 2,2,2"),
        ("7b", 16): ("16,1,1", "8,2,1 16,1,1", "4,4,1 16,1,1 8,2,1", "2,4,2 16,1,1 8,2,1 4,4,1"),
        ("13b", 8): ("4,2,1", "2,2,2 4,2,1", "1,4,2 4,2,1 2,2,2", "1,8,1 4,2,1 2,2,2 1,4,2"),
        ("13b", 16): ("8,2,1", "4,2,2 8,2,1", "4,4,1 8,2,1 4,2,2", "2,8,1 8,2,1 4,2,2 4,4,1"),
        ("32b", 32): ("4,2,4", "4,4,2 4,2,4", "2,8,2 4,2,4 4,4,2", "1,16,2 4,2,4 4,4,2 2,8,2"),
    },
}
CASES = [(dataset, *case) for dataset in ("commoncrawl", "github") for case in STRATEGIES["c1"]]


def paper_script(dataset: str, model: str, gpus: int) -> Path:
    return FOLDER / "exprs_for_paper" / dataset / f"{dataset}_{model}_{gpus}gpus.sh"


def hostfile(desk: Desk, *lines: str) -> str:
    path = desk.folder / "hosts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_bash_can_read_and_run_every_script() -> None:
    scripts = set(FOLDER.rglob("*.sh"))
    assert {paper_script(*case) for case in CASES} | {HOT, STATIC, A100, DATASET, PAPER_HOT} <= scripts
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.parent.name == "lib" or os.access(script, os.X_OK), script


# What is started ---------------------------------------------------------------------------------


def test_the_ten_cases_start_what_the_tables_say_and_megatron_accepts_it(desk: Desk) -> None:
    runs = []
    for dataset, model, gpus in CASES:
        hosts = hostfile(desk, *(f"10.0.0.{number} slots=8" for number in range(gpus // 8)))
        lines = dry_run(desk, paper_script(dataset, model, gpus), [hosts], BACKEND="gpu")
        first = [line[-1] for line in lines if "--node_rank 0" in line[-1]]
        assert len(lines) == len(first) * gpus // 8
        started = [training_arguments(shlex.split(line)) for line in first]
        expected = [
            (BUCKETS[combination][number].split(), STRATEGIES[combination][model, gpus][number].split())
            for number, _ in enumerate(CONTEXTS)
            for combination in ("c1", "c2")
            if number or combination == "c1"
        ]
        found = [(values(run, "--hot-switch-bucket-sizes"), values(run, "--hot-switch-strategies")) for run in started]
        assert found == expected, (dataset, model, gpus)
        assert {values(run, "--data-path")[0] for run in started} == {str(REPOSITORY / "outputs/data" / dataset)}
        if dataset == "github":  # the same runs on other data
            runs += [(run, model, gpus) for run in started]
    assert len(runs) == 35
    (problems,) = run_ranks(problems_of, 1, runs)
    # The data are not made here.
    assert [problem for problem in problems if not problem.startswith("--data-path")] == []


def problems_of(runs: list[tuple[list[str], str, int]]) -> list[Any]:
    """What Megatron's parser, hot switching and the presets have against command lines, parsed in a rank."""
    from megatron_ext.features import all_features
    from megatron_ext.hot_switch import PRESETS

    parser = full_parser()
    (hot_switch,) = (feature for feature in all_features() if feature.name == "hot-switch")
    found: list[Any] = []
    for words, model, gpus in runs:
        args = parser.parse_args(words)
        args.world_size = gpus
        found += hot_switch.validate(args)
        shape = PRESETS[f"llama-{model}"]
        names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
        given = {name: getattr(args, name) for name in names} | {"padded_vocab_size": args.vocab_size}
        found += [(name, value) for name, value in given.items() if value != getattr(shape, name)]
        found += [name for name in ("swiglu", "untie_embeddings_and_output_weights") if not getattr(args, name)]
        found += ["bias"] if args.add_bias_linear else []
    return found


def parse(arguments: list[str], world_size: int) -> dict[str, Any]:
    """Return what of a validated command line the tests here look at."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    args = validated(arguments, world_size)
    rows = vocab_size_with_padding(args.vocab_size, args)
    return {"rows": rows, "tp": args.tensor_model_parallel_size, "iterations": args.train_iters}


def test_megatron_takes_a_whole_run_with_the_presets_vocabulary(desk: Desk) -> None:
    hosts = hostfile(desk, *(f"host{number} slots=8" for number in range(4)))
    lines = dry_run(desk, HOT, ["32b", "32768", "512", hosts, "7", "3"])
    (parsed,) = run_ranks(parse, 1, training_arguments(shlex.split(lines[0][-1])), 32)
    assert parsed == {"rows": 30592, "tp": 16, "iterations": 21}


def test_the_small_evaluation_compares_hot_and_static(desk: Desk) -> None:
    runs = [training_arguments(line) for line in dry_run(desk, A100, [])]
    found = [(values(run, "--seq-length")[0], " ".join(values(run, "--hot-switch-strategies"))) for run in runs]
    assert found == [
        ("4096", "8,1,1"),
        *(("8192", "2,2,2 8,1,1"), ("8192", "2,2,2"), ("16384", "2,2,2 8,1,1"), ("16384", "2,2,2")),
        *(("32768", "1,4,2 8,1,1 2,2,2"), ("32768", "1,4,2")),
    ]
    assert all(values(run, "--train-iters") == ["10"] and "--mock-data" in run for run in runs)


def test_arguments_and_environment_reach_the_command_line(desk: Desk) -> None:
    hosts = hostfile(desk, "# two of four", "", "localhost  slots=4 # this one")
    own = {"BUCKET_SIZES": "512 128\n0", "ALL_PARALLEL_STRATEGY": "1,4,1\n4,1,1", "EXTRA_ARGS": "--lr 2e-5\n--seed 7\n"}
    (line,) = dry_run(
        desk, HOT, ["7b", "512", "64", hosts, "5", "2", "a corpus"], **own, TOKENIZER="tok"
    )
    assert launched(line)[:4] == ["torchrun", "--nproc_per_node", "4", "--nnodes"]
    assert {"CUDA_DEVICE_MAX_CONNECTIONS=1", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"} < set(line)
    assert values(line, "--hot-switch-strategies") == ["1,4,1", "4,1,1"]
    assert values(line, "--hot-switch-bucket-sizes") == ["512", "128", "0"]
    assert values(line, "--hot-switch-gpus-per-node") == ["4"]
    assert (values(line, "--train-iters"), values(line, "--global-batch-size")) == (["10"], ["64"])
    assert (values(line, "--data-path"), values(line, "--tokenizer-model")) == (["a corpus"], ["tok"])
    assert line[-4:] == ["--lr", "2e-5", "--seed", "7"]
    assert dry_run(desk, PAPER_HOT, ["7b", "512", "64", hosts, "5", "2", "a corpus"], **own, TOKENIZER="tok") == [line]
    static = {"ALL_PARALLEL_STRATEGY": "2,1,2"}
    (line,) = dry_run(desk, STATIC, ["13b", "4096", "256", "2", hosts, "5"], **static)
    assert values(line, "--hot-switch-strategies") == ["2,1,2"]
    assert values(line, "--hot-switch-bucket-sizes") == ["4096", "0"]
    assert (values(line, "--micro-batch-size"), values(line, "--num-layers")) == (["2"], ["40"])


def test_a_line_of_a_dry_run_starts_the_job_wherever_it_is_pasted(desk: Desk) -> None:
    desk.command("torchrun", RECORD_ARGUMENTS)
    (line,) = dry_run(desk, HOT, [])
    recorded = desk.folder / "arguments"
    bare = {"PATH": "/usr/bin:/bin", "RECORDED_ARGUMENTS": str(recorded)}
    output = subprocess.run(line, env=bare, capture_output=True, text=True, check=True).stdout
    assert output == "1\n"  # connections
    assert recorded.read_text().splitlines() == launched(line)[1:]


# Several hosts -----------------------------------------------------------------------------------

# Starts what it is given here, as ssh would there.
FAKE_SSH = """host=${@: -2:1}; printf '%s\\n' "$@" >"$RECORDS/$host.ssh"; exec bash -c "${@: -1}" """
RECORDING_TORCHRUN = (
    """printf '%s\\n' "$@" >"$RECORDS/$6.torchrun"; echo "${NCCL_IB_HCA:-unset} $PWD" >"$RECORDS/$6.env" """
)


def test_every_host_gets_its_torchrun_over_ssh(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("ssh", FAKE_SSH)
    desk.command("torchrun", RECORDING_TORCHRUN)
    hosts = hostfile(desk, "alpha slots=8", "user@beta slots=8")
    environment = {"RECORDS": str(desk.folder), "NCCL_IB_HCA": "mlx5_0 it's", "MASTER_PORT": "1234"}
    code, output = desk.run(HOT, ["7b", "8192", "512", hosts], OUTPUT=str(desk.folder), **environment)
    assert code == 0, output
    for rank, host in enumerate(("alpha", "user@beta")):
        launched = (desk.folder / f"{rank}.torchrun").read_text().splitlines()
        assert launched[:10] == [
            *("--nproc_per_node", "8", "--nnodes", "2", "--node_rank", str(rank)),
            *("--master_addr", "alpha", "--master_port", "1234"),
        ]
        assert "4,4,1" in launched and "16,1,1" in launched
        assert (desk.folder / f"{rank}.env").read_text() == f"mlx5_0 it's {desk.folder}\n"
        assert (desk.folder / f"{host}.ssh").exists()


def test_a_host_that_fails_ends_the_others(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    waits = "trap 'touch ended; exit 1' TERM; touch started; for _ in {1..600}; do sleep 0.1; done"
    desk.command("ssh", f"if [[ ${{@: -2:1}} == alpha ]]; then {waits}; fi; until [[ -e started ]]; do :; done; exit 3")
    desk.command("torchrun", "exit 9")
    hosts = hostfile(desk, "alpha slots=8", "beta slots=8")
    code, output = desk.run(HOT, ["7b", "8192", "512", hosts], OUTPUT=str(desk.folder))
    assert code == 3
    assert "a host's job ended with exit code 3; ending the others" in output
    assert (desk.folder / "ended").exists()


def test_logs_are_quiet_and_whole_in_a_file_of_each_host_unless_they_are_to_be_verbose(desk: Desk) -> None:
    desk.command("nvidia-smi", "exit 0")
    desk.command("ssh", FAKE_SSH)
    desk.command("torchrun", "echo '> initialized it'; echo \"trained $6\"; exit 0")
    settings = {"OUTPUT": str(desk.folder / "out"), "RECORDS": str(desk.folder)}
    both, one = ["alpha slots=8", "beta slots=8"], ["localhost slots=8"]
    for lines, names in ((both, ["_node0.log", "_node1.log"]), (one, [".log"])):
        arguments = ["7b", "8192", "512", hostfile(desk, *lines)]
        code, output = desk.run(HOT, arguments, **settings)
        assert code == 0 and sorted(output.splitlines()) == [f"trained {rank}" for rank in range(len(names))]
        for rank, name in enumerate(names):
            log = desk.folder / f"out/logs/llama_hot_switch_7b_8192{name}"
            assert log.read_text() == f"> initialized it\ntrained {rank}\n"
            log.unlink()
        code, output = desk.run(HOT, arguments, **settings, VERBOSE="1")
        assert code == 0 and output.count("> initialized it") == len(names)
        assert list((desk.folder / "out/logs").iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a slots=8", "b"], "line 2: 'b' is not of the form 'HOST slots=N'"),
        (["# hosts", "a slots=0"], "line 2: 'a slots=0' is not of the form"),
        (["a slots=eight"], "line 1: 'a slots=eight' is not of the form"),
        (["a slots=8 max_slots=8"], "line 1: 'a slots=8 max_slots=8' is not"),
        (["-oProxyCommand=x slots=8"], "line 1: '-oProxyCommand=x slots=8' is not"),
        (["a slots=8", "", "a slots=8"], "line 3: a is there already"),
        (["", "a slots=8", "b slots=4"], "line 3: slots=4, but line 2 has 8"),
        (["a slots=8", "localhost slots=8"], "localhost is one of several hosts"),
        (["# nobody"], "has no host"),
    ],
)
def test_a_bad_hostfile_is_refused_with_its_line(desk: Desk, lines: list[str], message: str) -> None:
    code, output = desk.run(HOT, ["--print", "7b", "4096", "512", hostfile(desk, *lines)])
    assert code == 1 and message in output and len(output.splitlines()) == 1, output


def own(buckets: str, strategies: str) -> dict[str, str]:
    """Return the environment of somebody with strategies of their own."""
    return {"BUCKET_SIZES": buckets, "ALL_PARALLEL_STRATEGY": strategies}


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        (HOT, ["70b"], {}, "the model '70b' is not known; use one of 3b 7b 13b 32b"),
        (HOT, ["7b", "32k"], {}, "CONTEXT is '32k'; give an integer"),
        (HOT, ["7b", "5000"], {}, "with a context of 5000 (only of: 4096 8192 16384 32768)"),
        (HOT, ["32b"], {}, "has no strategies (c1) for 32b on 8 GPUs with a context of 32768 (only of: none)"),
        (HOT, ["7b", "4096", "512", "nowhere"], {}, "hostfile: there is no file nowhere"),
        (HOT, ["7b", "4096", "512", "", "1", "1", "no/such"], {}, "DATA_PATH: there is no no/such.idx; make it with"),
        (HOT, ["7b", "4096", "512", "", "1", "1", "", "c3"], {}, "COMBINATION is 'c3'; use c1 or c2"),
        (HOT, ["7b", "4096", "512", "", "1", "1", "", "c1", "more"], {}, "takes 8 arguments, but 9 were given"),
        (HOT, ["--dryrun"], {}, "does not know the option --dryrun"),
        (HOT, [], {"ALL_PARALLEL_STRATEGY": "8,1,1"}, "set both BUCKET_SIZES and ALL_PARALLEL_STRATEGY"),
        (HOT, [], own("32768 a 0", "8,1,1 4,2,1"), "BUCKET_SIZES has 'a', which is not a number of tokens"),
        (HOT, [], own("32768 0", "8,1,1 4,2,1"), "BUCKET_SIZES has 2 sizes; 2 strategies need one more"),
        (HOT, [], own("32768 40000 0", "8,1,1 4,2,1"), "BUCKET_SIZES do not descend: 40000 comes after 32768"),
        (HOT, [], own("4096 0", "8,1,1"), "BUCKET_SIZES begins with 4096, but the context is 32768"),
        (HOT, [], own("32768 8", "8,1,1"), "BUCKET_SIZES ends with 8; end it with 0"),
        (HOT, [], own("32768 0", "8,1"), "ALL_PARALLEL_STRATEGY has '8,1'; give DP,TP,PP such as 1,4,2"),
        (HOT, [], own("32768 0", "1,4,4"), "1,4,4, which is for 16 GPUs, but there are 8"),
        (HOT, [], {"BACKEND": "tpu"}, "BACKEND=tpu is unknown; use gpu or cpu"),
        (HOT, [], {}, "no NVIDIA GPU here"),
        (HOT, ["7b", "4096", "12"], {}, "GLOBAL_BATCH is 12, which is not a multiple of 8, the DP 8 of home (8,1,1)"),
        (STATIC, ["7b", "4096", "512", "3"], {}, "GLOBAL_BATCH is 512, which is not a multiple of 24, the DP 8"),
        (STATIC, ["7b", "4096", "512", "0"], {}, "MICRO_BATCH is '0'"),
        (STATIC, [], {"ALL_PARALLEL_STRATEGY": "1,4,4"}, "1,4,4, which is for 16 GPUs, but there are 8"),
        (A100, ["nope"], {}, "nope"),
        (A100, [], {"BUCKET_SIZES": "32768 0"}, "BUCKET_SIZES is for llama_hot_switch.sh; unset it"),
        (paper_script("github", "7b", 8), [], own("4096 0", "8,1,1"), "BUCKET_SIZES is for llama_hot_switch.sh"),
        (paper_script("github", "7b", 16), [], {}, "this experiment needs 16 GPUs, and"),
        (DATASET, ["corpus"], {}, "takes PREFIX PARQUET..."),
        (DATASET, [".", "a.parquet"], {}, "PREFIX '.' names a folder"),
        (DATASET, ["corpus/", "a.parquet"], {}, "PREFIX 'corpus/' names a folder"),
        (DATASET, ["/proc/corpus", "a.parquet"], {}, "PREFIX '/proc/corpus': there can be no files"),
        (DATASET, ["corpus", "a.parquet"], {"TOKENIZER": "./x"}, "TOKENIZER: there is no folder ./x; give that of a"),
        (DATASET, ["corpus", "a.parquet"], {"WORKERS": "0"}, "WORKERS is '0'; give an integer of at least 1"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    desk: Desk,
    script: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    message: str,
) -> None:
    desk.command("torchrun", "echo started")
    desk.command("nvidia-smi", "exit 9")
    code, output = desk.run(script, arguments, **environment)
    assert code == 1 and message in output and len(output.splitlines()) == 1, output


@pytest.mark.slow
def test_a_corpus_of_other_tokens_needs_its_tokenizer(desk: Desk) -> None:
    desk.command("torchrun", "exit 0")
    write_without_record(desk.folder / "corpus", [[1, 2]])
    record = desk.folder / "corpus.json"
    record.write_text('{"megatron_args": ["--tokenizer-type", "HuggingFaceTokenizer"]}')
    arguments = ["7b", "4096", "512", "", "1", "1", "corpus"]
    code, output = desk.run(HOT, arguments, BACKEND="cpu")
    assert code == 1 and "set TOKENIZER to its folder" in output
    code, output = desk.run(HOT, arguments, BACKEND="cpu", TOKENIZER="org/gpt2")
    assert code == 1 and "corpus.json: format is not 'megatron-ext corpus 1'" in output
    record.unlink()
    code, output = desk.run(HOT, arguments, BACKEND="cpu", TOKENIZER="org/gpt2")
    assert code == 0 and "whether the ids of corpus are its own is not checked" in output


# Data, training and the table of speeds ----------------------------------------------------------


def test_web_pages_become_a_corpus_once(desk: Desk) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    from pyarrow import parquet

    texts = ["a page", None, "another\npage"]
    table = pyarrow.table({"content": texts, "url": ["x", "y", "z"]})
    parquet.write_table(table, desk.folder / "web.parquet")
    arguments = ["data/web", "web.parquet"]
    code, output = desk.run(DATASET, arguments)
    assert code == 0, output
    lines = (desk.folder / "data/web.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"content": "a page"}, {"content": "another\npage"}]
    assert json.loads((desk.folder / "data/web.json").read_text())["documents"] == 2
    assert (desk.folder / "data/web.bin").stat().st_size == 2 * (len("a page") + len("another\npage") + 2)
    code, output = desk.run(DATASET, arguments)
    assert code == 0 and output.count("up to date, nothing done") == 2, output
    code, output = desk.run(DATASET, arguments, COLUMN="text")
    assert code == 2 and "web.parquet: no column 'text'; columns are content, url (COLUMN, or --column)" in output
    # What failed has cost nothing that was there.
    assert not (desk.folder / "data/web.jsonl.partial").exists()
    code, output = desk.run(DATASET, arguments)
    assert code == 0 and output.count("up to date, nothing done") == 2, output


def test_two_corpora_cannot_be_made_in_one_place_at_once(desk: Desk) -> None:
    with (desk.folder / "web.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, output = desk.run(DATASET, ["web", "web.parquet"])
    assert code != 0 and "web is being made by another process; wait for it, or give another PREFIX" in output
    assert not (desk.folder / "web.jsonl.partial").exists()


def test_lines_that_were_damaged_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    from pyarrow import parquet

    convert = runpy.run_path(str(REPOSITORY / "examples/hot_switch/create_web_dataset.py"))["convert"]
    parquet.write_table(pyarrow.table({"content": ["a page", "another"]}), tmp_path / "web.parquet")
    lines = tmp_path / "web.jsonl"
    for damage in (
        lambda: None,
        lambda: lines.with_name("web.jsonl.made_from.json").write_text("{"),
        lambda: lines.write_text(lines.read_text()[:-9]),
    ):
        damage()
        convert([tmp_path / "web.parquet"], lines, "content")
        assert "web.jsonl: 2 documents from 1 files" in capsys.readouterr().out
        assert [json.loads(line)["content"] for line in lines.read_text().splitlines()] == ["a page", "another"]
    convert([tmp_path / "web.parquet"], lines, "content")
    assert "up to date, nothing done" in capsys.readouterr().out


def test_pages_that_cannot_be_read_or_written_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    from pyarrow import parquet

    main = runpy.run_path(str(REPOSITORY / "examples/hot_switch/create_web_dataset.py"))["main"]
    web, damaged, bytes_of = tmp_path / "web.parquet", tmp_path / "damaged.parquet", tmp_path / "bytes.parquet"
    parquet.write_table(pyarrow.table({"content": ["a page"] * 9}), web, compression="none", use_dictionary=False)
    damaged.write_bytes(web.read_bytes().replace(b"a page", b"\xff page"))
    bytes_of.write_bytes(web.read_bytes()[:-9])
    empty = tmp_path / "empty.parquet"
    empty.touch()
    lines = tmp_path / "web.jsonl"
    for files, output, said in (
        ([damaged], lines, f"{damaged} (row 1): not valid UTF-8 at byte 0"),
        ([web, bytes_of], lines, f"{bytes_of}: not a readable Parquet file"),
        ([web, tmp_path / "none"], lines, f"input {tmp_path / 'none'}: No such file or directory"),
        ([web, web], lines, f"input {web} is given twice"),
        ([tmp_path], lines, f"{tmp_path}: is not a file"),
        ([web, empty], lines, f"{empty}: has no bytes"),
        ([web], web / "web.jsonl", f"{web / 'web.jsonl'}: cannot be written: File exists"),
        ([web], tmp_path, f"{tmp_path}: cannot be written: Is a directory"),
    ):
        assert main([*map(str, files), "--output", str(output)]) == 2
        assert f"create_web_dataset: error: {said}" in capsys.readouterr().err
        assert not lines.exists() and not list(tmp_path.glob("*.partial"))


def test_an_evaluation_for_eight_gpus_begins_nothing_on_others(desk: Desk) -> None:
    hosts = hostfile(desk, "one slots=8", "two slots=8")
    code, output = desk.run(A100, [hosts], OUTPUT=str(desk.folder / "logs"))
    assert code != 0 and f"this experiment needs 8 GPUs, and {hosts} has 16" in output
    assert not (desk.folder / "logs").exists()


def test_toy_runs_have_as_many_strategies_as_the_real_ones(desk: Desk) -> None:
    lines = [launched(line) for line in dry_run(desk, paper_script("github", "32b", 32), [], BACKEND="cpu")]
    runs = [training_arguments(line) for line in lines]
    assert [len(values(run, "--hot-switch-strategies")) for run in runs] == [1, 2, 2, 2, 3, 3, 4]
    assert all(line[:3] == ["torchrun", "--nproc_per_node", "4"] for line in lines)
    static = training_arguments(dry_run(desk, STATIC, [], BACKEND="cpu")[0])
    assert values(static, "--hot-switch-strategies") == ["1,2,2"]
    mine = own("32768 16384 8192 4096 2048 1024 0", "1,4,2 8,1,1 2,2,2 4,2,1 2,4,1 1,8,1")
    six = training_arguments(dry_run(desk, HOT, [], BACKEND="cpu", **mine)[0])
    assert values(six, "--hot-switch-bucket-sizes") == ["128", "64", "32", "16", "8", "4", "0"]
    mine = own("32768 16384 8192 4096 2048 1024 512 0", "1,4,2 8,1,1 2,2,2 4,2,1 2,4,1 1,8,1 4,1,2")
    code, output = desk.run(HOT, [], BACKEND="cpu", **mine)
    assert code == 1 and "7 strategies are more than the 6 of a toy run (BACKEND=cpu); give fewer" in output


LOG = """
 iteration        1/       4 | elapsed time per iteration (ms): 900.0 | tokens: 100 | switching (ms): 90.0 |
 iteration        2/       4 | elapsed time per iteration (ms): 500.0 | tokens: 100 | switching (ms): 10.0 |
 iteration        3/       4 | elapsed time per iteration (ms): 100.0 | tokens: 100 | switching (ms): 10.0 |
 iteration        4/       4 | elapsed time per iteration (ms): 300.0 | tokens: 500 | switching (ms): 20.0 |
"""


def test_experiments_are_compared_by_what_their_logs_say(desk: Desk) -> None:
    desk.command("torchrun", f"echo '> initialized it'; cat <<'END'\n{LOG}\nEND")
    code, output = desk.run(A100, [], BACKEND="cpu", OUTPUT=str(desk.folder))
    assert code == 0 and "initialized it" not in output, output
    assert (desk.folder / "A100_40G/8192_hot.log").read_text().startswith("> initialized it\n")
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +(\d+)$", output, re.MULTILINE)
    assert len(rows) == 7
    assert rows[1] == ("8192_hot", "200.0", "15.0", "1500")  # without the first two iterations
    assert (desk.folder / "A100_40G/32768_static.log").exists()


def test_an_experiment_ends_with_the_script_that_started_it(desk: Desk) -> None:
    desk.command("torchrun", TRAIN_UNTIL_TOLD)
    with desk.start(A100, BACKEND="cpu", OUTPUT=str(desk.folder)) as started:
        code, output = started.end_alone()
    assert code != 0 and output.splitlines().count("training") == 1, output
    assert "told to end" in (desk.folder / "A100_40G/4096_static.log").read_text()


def test_an_experiment_that_fails_is_the_last_one(desk: Desk) -> None:
    desk.command("torchrun", "echo the reason; exit 7")
    code, output = desk.run(paper_script("github", "7b", 8), BACKEND="cpu", OUTPUT=str(desk.folder))
    assert code == 7 and output.splitlines().count("the reason") == 1, output


@pytest.mark.slow
def test_a_toy_trains_on_cpu(desk: Desk) -> None:
    environment = {"BACKEND": "cpu", "MASTER_PORT": str(free_port()), "OUTPUT": str(desk.folder)}
    code, output = desk.run(HOT, ["7b", "32768", "512", "", "1"], **environment)
    assert code == 0, output[-6000:]
    (last,) = re.findall(r"iteration +1/ +1 .*", output)
    assert "lm loss: " in last and "switching (ms): " in last
    assert "home 1,2,2 for 64 < positions <= 128, guests 4,1,1" in output
