# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext doctor`: what is installed, what will work here, what will not, and why."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import textwrap
import traceback
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from megatron_ext.patching.gates import installed_version, version_problem
from megatron_ext.patching.patch import MEGATRON_VERSIONS
from megatron_ext.quietly import quietly

__all__ = ["Check", "DoctorReport", "add_parser", "examine", "run"]

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "numpy",
    "psutil",
    "pyarrow",
    "transformers",
    "grpcio",
    "matplotlib",
)
"""Distributions whose versions are shown; a missing one matters only where a check says so."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that works here, or does not."""

    name: str
    """What it is."""

    works: bool
    """Whether it works."""

    detail: str
    """How, or why not and what to do."""


@dataclass(kw_only=True)
class DoctorReport:
    """Everything that the command shows."""

    python: str
    """Version of the interpreter."""

    platform: str
    """Operating system and processor."""

    packages: dict[str, str | None]
    """Version by distribution, None when it is not installed."""

    cuda: dict[str, Any] = field(default_factory=dict)
    """`build` (the CUDA that torch was built for), `devices` (their names) and `nccl` (its version)."""

    gloo: bool = False
    """Whether torch was built with gloo."""

    backend: str | None = None
    """What a run uses here unless told otherwise: `cuda` or `cpu`; None when nothing can run."""

    checks: list[Check] = field(default_factory=list)
    """What works and what does not."""

    tested: list[dict[str, str]] = field(default_factory=list)
    """`option`, `ability` and `test` of the Megatron options of the table of options that work here."""

    refused: list[dict[str, str]] = field(default_factory=list)
    """`option`, `ability`, `reason` and `way_out` of the Megatron options that are refused here."""

    @property
    def exit_code(self) -> int:
        """0, or 1 when Megatron is missing or is a release that the patches were not written for."""
        return 0 if all(check.works for check in self.checks if check.name == "Megatron") else 1


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="show versions, and what will work on this machine",
        description="Show versions, what will work on this machine, what will not, and why. "
        "The exit status is 1 when Megatron is missing or is a release that is not supported.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Examine the machine, print the report, and return its exit code."""
    with quietly():  # what Megatron says about missing kernels while it is imported is part of the report
        report = examine()
    if args.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return report.exit_code


def examine() -> DoctorReport:
    """Look at this interpreter's packages and this machine's devices."""
    report = DoctorReport(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
    )
    if report.packages["torch"] is None:
        report.checks.append(Check(name="Megatron", works=False, detail="torch is not installed"))
        return report
    problem = version_problem("megatron-core", MEGATRON_VERSIONS)
    if report.packages["megatron-core"] is None:
        problem = f"not installed; pip install 'megatron-core{MEGATRON_VERSIONS}'"
    report.checks.append(Check(name="Megatron", works=problem is None, detail=problem or f"inside {MEGATRON_VERSIONS}"))
    _examine_torch(report)
    if problem is None:
        _examine_megatron(report)
    return report


def _version(distribution: str) -> str | None:
    if distribution == "megatron-core":
        # Whichever comes first on the path counts, and a Megatron-LM checkout has no metadata.
        found = installed_version(distribution)
        return None if found is None else str(found)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _examine_torch(report: DoctorReport) -> None:
    import torch
    import torch.distributed as dist

    available = torch.cuda.is_available()
    nccl = None
    if dist.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        nccl = ".".join(map(str, version))
    count = torch.cuda.device_count() if available else 0
    devices = [torch.cuda.get_device_name(index) for index in range(count)]
    report.cuda = {"build": torch.version.cuda, "devices": devices, "nccl": nccl}
    report.gloo = dist.is_gloo_available()
    if available:
        detail = f"{len(devices)} device(s)" if nccl else "torch was built without NCCL"
    else:
        detail = "torch sees no CUDA device; runs use the CPU"
    report.checks.append(Check(name="GPU + NCCL", works=available and bool(nccl), detail=detail))


def _examine_megatron(report: DoctorReport) -> None:
    from megatron_ext.activation import known_patches, registry
    from megatron_ext.backends import cpu
    from megatron_ext.features import all_features

    try:
        fused = importlib.import_module("megatron.core.optimizer.distrib_optimizer").HAVE_APEX_OR_TE
    except Exception as error:  # whatever is wrong with what Megatron imports is what the report is for
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        detail = f"cannot be imported: {type(error).__name__}: {error} ({place}); repair or uninstall that package"
        report.checks = [
            Check(name=check.name, works=False, detail=detail) if check.name == "Megatron" else check
            for check in report.checks
        ]
        return
    torch_problem = version_problem("torch", cpu.TORCH_VERSIONS)
    why_not_cpu = (
        torch_problem
        or (None if report.gloo else "torch was built without gloo")
        or ("Transformer Engine or Apex is installed: Megatron would call their CUDA kernels" if fused else None)
    )
    on_gpu = cpu.available_device_is_cuda()
    report.backend = "cuda" if on_gpu else "cpu" if why_not_cpu is None else None
    report.checks += [
        Check(name="CPU + gloo", works=why_not_cpu is None, detail=why_not_cpu or "dense and MoE GPT, toy sizes"),
        _transformer_engine(report),
        _importable("checkpoints", "psutil", "torch_dist can be written and read", "Megatron's writer needs psutil"),
        _dataset_helpers(),
    ]
    statuses = registry().explain(known_patches())
    misfits = [status for status in statuses if status.status == "broken"]
    missing = [status for status in statuses if status.status == "unavailable"]
    detail = ", ".join(status.patch.name for status in misfits)
    report.checks.append(
        Check(
            name="patches",
            works=not misfits,
            detail=f"{len(misfits)} of {len(statuses)} do not fit: {detail}; see `megatron-ext patches`"
            if misfits
            else f"all {len(statuses) - len(missing)} fit",
        )
    )
    for feature in all_features():
        for status in missing:
            if status.patch.name in {patch.name for patch in feature.required_patches()}:
                report.checks.append(Check(name=feature.name, works=False, detail=str(status.problem)))
    _examine_options(report)


def _examine_options(report: DoctorReport) -> None:
    from megatron_ext.options import FEATURES, ROWS

    for feature in FEATURES:
        if feature == "cpu" and report.backend != "cpu":
            continue
        for row in ROWS:
            verdict = row.verdicts[feature]
            if verdict.tested_by:
                report.tested.append({"option": row.option, "ability": feature, "test": verdict.tested_by})
            elif verdict.refuses:
                report.refused.append(_refusal(row.option, feature, verdict.reason, verdict.way_out))


def _refusal(option: str, feature: str, reason: str, way_out: str) -> dict[str, str]:
    return {"option": option, "ability": feature, "reason": reason, "way_out": way_out}


def _transformer_engine(report: DoctorReport) -> Check:
    name = "Transformer Engine"
    if report.packages["transformer-engine"] is None:
        return Check(name=name, works=False, detail="not installed; --transformer-impl local runs without it")
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        return Check(name=name, works=False, detail=f"installed, but its import fails: {first_line}")
    return Check(name=name, works=True, detail="imports")


def _importable(name: str, module: str, detail: str, why_not: str) -> Check:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Check(name=name, works=False, detail=f"{why_not} ({error})")
    return Check(name=name, works=True, detail=detail)


def _dataset_helpers() -> Check:
    return _importable(
        "datasets",
        "megatron.core.datasets.helpers_cpp",
        "Megatron's index helpers are compiled",
        "Megatron's index helpers are compiled at the first run, which needs make, g++ and pybind11",
    )


def _print(report: DoctorReport) -> None:
    print(f"python {report.python} on {report.platform}")
    for name, version in report.packages.items():
        print(f"  {name:<20} {version or 'not installed'}")
    if report.cuda:
        devices = ", ".join(report.cuda["devices"]) or "no device"
        print(f"  {'CUDA':<20} torch built for {report.cuda['build'] or 'none'}, {devices}")
        print(f"  {'NCCL':<20} {report.cuda['nccl'] or 'not there'}")
        print(f"  {'gloo':<20} {'available' if report.gloo else 'not available'}")
    print(f"backend of a run here: {report.backend or 'none'}")
    for check in report.checks:
        print(f"  {'works' if check.works else 'no':<6} {check.name}: {check.detail}")
    _print_options(report)


def _print_options(report: DoctorReport) -> None:
    """Print the options by feature, refused ones by reason: hundreds of single lines would hide the rest."""
    from megatron_ext.options import FEATURES

    for feature, where in FEATURES.items():
        tested = [entry["option"] for entry in report.tested if entry["ability"] == feature]
        refused = [entry for entry in report.refused if entry["ability"] == feature]
        if tested:
            print(f"Megatron options tested {where}:")
            print(_wrapped(", ".join(tested)))
        if refused:
            print(f"Megatron options refused {where} (what to write instead: --json):")
        for reason in dict.fromkeys(entry["reason"] for entry in refused):
            options = ", ".join(entry["option"] for entry in refused if entry["reason"] == reason)
            print(_wrapped(f"{options}: {reason}"))


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        width=110,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
