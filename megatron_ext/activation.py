# SPDX-License-Identifier: Apache-2.0
"""Switching the package on and off in this process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_ext.backends.cpu import CpuBackend
    from megatron_ext.patching import Patch, PatchRegistry

__all__ = ["Backend", "known_patches", "patch_megatron", "patch_to_explain", "registry", "unpatch_megatron"]

Backend = Literal["auto", "cpu", "cuda"]

_registry: PatchRegistry | None = None
_cpu: CpuBackend | None = None


def registry() -> PatchRegistry:
    """Return the registry of this process's patches."""
    global _registry
    if _registry is None:
        from megatron_ext.patching import PatchRegistry

        _registry = PatchRegistry()
    return _registry


def patch_megatron(backend: Backend = "auto") -> None:
    """Let Megatron parse this package's arguments and run the features they ask for.

    Call it before Megatron's arguments are parsed, before or after Megatron is imported; calling it again does
    nothing. With none of the features asked for, the run is stock Megatron.

    Args:
        backend: 'auto' runs on CPU and gloo when there is no CUDA device; 'cpu' forces that; 'cuda' forbids it.

    Raises:
        PatchError: a patch does not fit the installed Megatron.
        UserError: the installed Megatron is of a release that was not tested; `backend` is none of the three, or not
            the one that is in force; another package's feature cannot be used.
    """
    from megatron_ext.errors import UserError, in_one_line

    try:
        _patch_megatron(backend)
    except UserError:
        # It ends the script that does not catch it, and the patch that shows such errors is not there, or gone again.
        sys.excepthook = in_one_line(sys.excepthook)
        raise


def _patch_megatron(backend: Backend) -> None:
    from megatron_ext.errors import UserError
    from megatron_ext.hooks import hooks

    if backend not in ("auto", "cpu", "cuda"):
        raise UserError(f"backend is {backend!r}; use 'auto', 'cpu' or 'cuda'")
    if hooks.features:
        if backend != "auto" and (backend == "cpu") != (_cpu is not None):
            raise UserError(
                f"patch_megatron(backend={backend!r}) after the other backend was chosen; call unpatch_megatron() first"
            )
        return
    import torch

    use_cpu = backend == "cpu" or (backend == "auto" and not torch.cuda.is_available())
    _activate(on_cpu=use_cpu, as_on_cpu=use_cpu)


def patch_to_explain(backend: Literal["cpu", "cuda"]) -> None:
    """Let this process, whether it has a GPU or not, look at runs on `backend` that others make.

    Megatron runs on CPU here; the arguments have the defaults and are held to the rules of the other place.

    Raises:
        PatchError, UserError: as `patch_megatron`.
    """
    _activate(on_cpu=True, as_on_cpu=backend == "cpu")


def _activate(*, on_cpu: bool, as_on_cpu: bool) -> None:
    """Apply the patches of the backend and of the arguments, and register the features.

    Args:
        on_cpu: whether Megatron runs on CPU here.
        as_on_cpu: whether the arguments are of a run on CPU.
    """
    global _cpu
    from megatron_ext.errors import UserError
    from megatron_ext.hooks import hooks
    from megatron_ext.patching.gates import version_problem
    from megatron_ext.patching.patch import MEGATRON_VERSIONS

    problem = version_problem("megatron-core", MEGATRON_VERSIONS)
    if problem:
        raise UserError(f"{problem}; install one of these: pip install 'megatron-core{MEGATRON_VERSIONS}'")
    _refuse_early_resiliency()
    from megatron_ext import async_save
    from megatron_ext.backends import cpu
    from megatron_ext.backends.cpu.feature import CpuFeature
    from megatron_ext.features import all_features
    from megatron_ext.seams import arguments, datasets, writers_queue

    patches = registry()
    try:
        if on_cpu:
            _cpu = cpu.CpuBackend()
            _cpu.activate(patches)
        patches.apply([cpu.compile_helpers_patch()])
        loops = cpu.checkpoint_writer.LOOPS if on_cpu else async_save.LOOPS
        patches.apply(arguments.patches(patches, cpu.set_argument_defaults if as_on_cpu else None, loops))
        patches.apply(datasets.patches())
        patches.apply(writers_queue.patches())
        hooks.register((*((CpuFeature(),) if as_on_cpu else ()), *all_features()))
    except BaseException:  # Ctrl-C too: all patches are there, or none
        unpatch_megatron()
        raise


def _refuse_early_resiliency() -> None:
    """Check what Megatron finds beside itself, before it is imported and fails there without naming it.

    Raises:
        UserError: a release of nvidia-resiliency-ext is installed that Megatron does not take.
    """
    from megatron_ext.errors import UserError
    from megatron_ext.extras import EXTRAS, pip_install_extra
    from megatron_ext.patching.gates import installed_version, version_problem

    (requirement,) = EXTRAS["async"]
    package, _, version = requirement.partition(">=")
    if installed_version(package) is not None and version_problem(package, f">={version}"):
        raise UserError(
            f"{package} {installed_version(package)} is installed, beside which Megatron cannot be imported: it takes "
            f"{version} or later; {pip_install_extra('async')}, or pip uninstall {package}"
        )


def unpatch_megatron() -> None:
    """Undo everything that `patch_megatron` and the enabled features did to Megatron and torch."""
    global _cpu
    from megatron_ext.backends import cpu
    from megatron_ext.hooks import hooks

    patches = registry()
    of_backend = {patch.name for patch in cpu.patches()} if _cpu is not None else set()
    patches.revert([patch.name for patch in patches.applied if patch.name not in of_backend])
    if _cpu is not None:
        _cpu.deactivate(patches)
        _cpu = None
    hooks.reset()


def known_patches() -> list[Patch]:
    """Return every patch that any backend or feature may apply."""
    from megatron_ext import async_save
    from megatron_ext.backends import cpu
    from megatron_ext.features import all_features
    from megatron_ext.seams import arguments, datasets, writers_queue

    loops = async_save.LOOPS
    found = [*arguments.patches(registry(), None, loops), *datasets.patches(), *writers_queue.patches()]
    found += async_save.patches(loops)
    found += [cpu.compile_helpers_patch(), *cpu.patches()]
    for feature in all_features():
        found += feature.required_patches()
    unique = {patch.name: patch for patch in found}
    return list(unique.values())
