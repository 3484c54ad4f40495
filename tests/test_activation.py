# SPDX-License-Identifier: Apache-2.0
"""Invariants 1 and 2: without our flags the run is stock Megatron, and unpatching restores every attribute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local_sgd.runs import arguments, same_state
from tests.support.distributed import run_ranks
from tests.support.presets import LAYOUTS
from tests.support.pretrain import run_pretrain


def applied_patches(model, optimizer, args):
    """Probe: names of the patches in force that are not the CPU backend's."""
    from megatron_ext.activation import registry
    from megatron_ext.backends import cpu

    backend = {patch.name for patch in cpu.patches()}
    return [patch.name for patch in registry().applied if patch.name not in backend]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp2", "bf16-distopt-overlap"), ("tp2-sp", "fp32"), ("pp2", "bf16"), ("moe-ep2", "bf16-distopt")],
)
def test_without_flags_losses_and_weights_are_those_of_stock_megatron(layout, precision):
    run = arguments(layout, precision, workers=None)
    world = LAYOUTS[layout].world_size(1)
    ours = run_pretrain(run, world, probe=applied_patches)
    stock = run_pretrain(run, world, patch="backend-only")
    assert same_state(ours, stock)
    assert [rank.losses for rank in ours] == [rank.losses for rank in stock]
    # None of these changes what a run does.
    assert set(ours[0].probe) <= {
        "arguments/add",
        "arguments/validate",
        "arguments/load",
        "arguments/yaml",
        "arguments/errors",
        "arguments/empty-split",
        "wheel/compile-helpers",
        "wheel/helpers-missing",
        "repairs/fp32-shards",
        "repairs/fp32-gathered-shards",
        "repairs/sgd-state",
        "repairs/empty-states",
        "repairs/fsdp2-parameters",
        "repairs/fsdp2-steps",
        "repairs/writers-queue",
    }


def test_without_flags_a_run_on_cpu_resumes_from_its_checkpoint_in_fp32(tmp_path):
    saves = {"train_iters": 4, "save": str(tmp_path), "save_interval": 2}
    through = run_pretrain(arguments("dp2", "fp32-distopt", workers=None, **saves), 2)
    loads = {"train_iters": 4, "load": str(tmp_path), "ckpt_step": 2}
    resumed = run_pretrain(arguments("dp2", "fp32-distopt", workers=None, **loads), 2)
    assert same_state(resumed, through)
    assert [rank.losses for rank in resumed] == [rank.losses[2:] for rank in through]


def attributes():
    """Return every attribute of Megatron's and torch's modules and their classes, by place."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if not (name.startswith(("megatron.", "torch.cuda", "torch.distributed.distributed_c10d"))):
            continue
        for key, value in tuple(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, item in tuple(vars(value).items()):
                    found[name, key, inner] = item
    return found


def patch_and_unpatch():
    """Apply every known patch and undo it; return the places that are not what they were."""
    import importlib

    from megatron_ext import patch_megatron, unpatch_megatron
    from megatron_ext.activation import known_patches, registry

    for patch in known_patches():
        importlib.import_module(patch.module)
    excepthook = sys.excepthook
    before = attributes()
    patch_megatron()
    registry().apply(known_patches_but_arguments())
    changed = sum(1 for place, value in attributes().items() if before.get(place) is not value)
    unpatch_megatron()
    after = attributes()
    different = [str(place) for place, value in before.items() if after.get(place) is not value]
    caches = ("__warningregistry__", "__annotations_cache__", "__annotations__")
    return (
        changed,
        [place for place in different if not any(cache in place for cache in caches)],
        (sys.excepthook is excepthook),
    )


def known_patches_but_arguments():
    """Return the features' patches."""
    from megatron_ext.features import all_features

    return [patch for feature in all_features() for patch in feature.required_patches()]


def test_unpatching_restores_every_attribute_by_identity():
    ((changed, different, excepthook),) = run_ranks(patch_and_unpatch, 1)
    assert changed > 50
    assert different == []
    assert excepthook


def patch_twice():
    """Patch twice; return whether the second call changed anything."""
    from megatron_ext import patch_megatron
    from megatron_ext.activation import registry

    patch_megatron()
    first = registry().applied
    patch_megatron()
    return first == registry().applied, len(first)


def test_patching_is_idempotent():
    ((same, count),) = run_ranks(patch_twice, 1)
    assert same
    assert count > 3


def patch_for_two_backends():
    """Ask for a second backend; return what was said, with an excepthook of someone else's in between."""
    from megatron_ext import patch_megatron, unpatch_megatron
    from megatron_ext.activation import registry
    from megatron_ext.errors import UserError

    patch_megatron(backend="cpu")
    patch_megatron(backend="cpu")
    with pytest.raises(UserError, match="call unpatch_megatron"):
        patch_megatron(backend="cuda")
    sys.excepthook = lambda *args: None
    unpatch_megatron()
    return len(registry().applied)


def test_another_backend_is_refused_and_a_foreign_excepthook_does_not_keep_the_patches():
    assert run_ranks(patch_for_two_backends, 1) == [0]


def unpatch_twice():
    """Let somebody else replace a target, so that unpatching fails; return what is in force after the next try."""
    import torch

    from megatron_ext import patch_megatron, unpatch_megatron
    from megatron_ext.activation import registry
    from megatron_ext.patching import PatchError

    original = torch.tensor
    patch_megatron("cpu")
    ours = torch.tensor
    torch.tensor = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(PatchError, match="undo the other replacement first"):
        unpatch_megatron()
    torch.tensor = ours
    unpatch_megatron()
    return len(registry().applied), torch.tensor is original


def test_unpatching_that_failed_can_be_tried_again():
    assert run_ranks(unpatch_twice, 1) == [(0, True)]


PATCHING = "from megatron_ext import patch_megatron; patch_megatron('cpu')"
IMPORTING = "from megatron.training.arguments import parse_args"
BEFORE = f"{PATCHING}; {IMPORTING}"
AFTER = f"{IMPORTING}; {PATCHING}"


@pytest.mark.slow
@pytest.mark.parametrize("order", [BEFORE, AFTER], ids=["before", "after"])
def test_help_lists_our_groups_without_gpu_and_without_torchrun(order):
    # Megatron's decorators import the compiler, seconds of it, unless they meet a backend that compiles nothing.
    imported = "torch._inductor.compile_fx"
    code = f"import sys; {order}; assert ({imported!r} in sys.modules) == {order == AFTER}; parse_args()"
    finished = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    for part in (
        "local SGD:",
        "--local-sgd-sync-interval",
        "outer optimizer:",
        "--no-outer-optimizer-nesterov",
    ):
        assert part in finished.stdout


@pytest.mark.parametrize(
    ("flags", "keys", "named"),
    [
        (["--use-local-sgd", "--local-sgd-sync-interval=5"], "", "--local-sgd-sync-interval, --use-local-sgd"),
        ([], "use_local_sgd: true", "--use-local-sgd"),
        ([], "", None),
    ],
    ids=["flags", "keys", "stock"],
)
def test_features_beside_a_yaml_of_arguments_are_refused_by_name(tmp_path, flags, keys, named):
    file = tmp_path / "run.yaml"
    file.write_text(f"disable_msc_deprecated: false\nenable_msc: false\n{keys}\n")
    found = run_ranks(parse, 1, ["--yaml-cfg", str(file), *flags], "cuda")
    problem = f"--yaml-cfg {file}: with it Megatron ignores the command line, so {named} would do nothing; "
    expected = None if named is None else f"{problem}give all arguments as flags, without --yaml-cfg"
    assert found == [expected]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "FileNotFoundError: [Errno 2] No such file"), ("- a list", "AttributeError"), ("a: [", "ParserError")],
    ids=["missing", "no mapping", "no YAML"],
)
def test_a_yaml_of_arguments_that_cannot_be_read_is_refused_in_one_line(tmp_path, content, said):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    (found,) = run_ranks(parse, 1, ["--yaml-cfg", str(file)], "cuda")
    assert found.startswith(f"--yaml-cfg {file}: Megatron refuses it: {said}") and "\n" not in found


def test_a_yaml_of_arguments_is_refused_on_cpu_where_it_would_pass_by_all_checks(tmp_path):
    (found,) = run_ranks(parse, 1, ["--yaml-cfg", str(tmp_path / "run.yaml")], "cpu")
    assert "run.yaml is not supported on CPU: with it Megatron ignores the command line" in found


def parse(arguments, backend):
    """Return the error of Megatron's parser for the command line of a run on `backend`, or None."""
    from megatron_ext.activation import patch_to_explain
    from megatron_ext.errors import UserError

    patch_to_explain(backend)
    from megatron.training.arguments import parse_args

    sys.argv[1:] = arguments
    try:
        parse_args()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_importing_the_package_touches_nothing():
    code = "import sys, megatron_ext; print([m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.stdout.strip() == "[]", finished.stderr


def test_features_are_known_before_megatron_is_imported():
    """Else the commands would wait for it, and what is patched while it is imported would come too late."""
    code = (
        "import sys, megatron_ext.seams.arguments; from megatron_ext.features import all_features; all_features(); "
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stdout) == (0, "[]\n"), finished.stderr


def test_the_module_form_runs_an_unchanged_script():
    run = arguments("single", "fp32", workers=2, local_sgd_sync_interval=2)
    assert same_state(run_pretrain(run, 2, patch="module"), run_pretrain(run, 2))


def test_only_the_script_is_asked_for(capsys):
    from megatron_ext.__main__ import main

    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "the following arguments are required: SCRIPT\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "before_the_patches"),
    [(["-m", "megatron_ext"], 2, ""), ([], 1, "import megatron_ext; megatron_ext.patch_megatron()")],
    ids=["by the package", "by a script"],
)
def test_an_early_resiliency_extension_is_refused_before_megatron_fails_at_it(
    tmp_path, command, code, before_the_patches
):
    package = tmp_path / "nvidia_resiliency_ext-0.4.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: 0.4.1\n")
    script = tmp_path / "script.py"
    script.write_text(before_the_patches)
    run = subprocess.run(
        [sys.executable, *command, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1])))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code and "Traceback" not in run.stderr
    assert "nvidia-resiliency-ext 0.4.1 is installed, beside which Megatron cannot be imported" in run.stderr
    assert "pip uninstall nvidia-resiliency-ext" in run.stderr
