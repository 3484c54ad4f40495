# SPDX-License-Identifier: Apache-2.0
"""The packages that only some uses need, by extra, and how to install them.

No index has this package, so a message cannot say `megatron-ext[sync]`: it names what is missing instead, which works
beside a checkout and beside an installed wheel. setup.py reads this file by itself; it imports nothing of the package.
"""

__all__ = ["EXTRAS", "pip_install", "pip_install_extra"]

_SYNC = (
    "grpcio>=1.74",
    "protobuf>=6.31.1",  # the generated code of the protocol asks for no less
    "grpcio-health-checking>=1.74",
    "isal>=1.7",  # checksums
    "prometheus-client>=0.20",  # metrics
    "PyYAML>=6",  # configuration files of the server
)

_BY_USE: dict[str, tuple[str, ...]] = {
    "sync": _SYNC,
    "spes": _SYNC,
    "hot-switch": ("PyYAML>=6",),  # strategy files
    "plots": ("matplotlib>=3.8",),
    "data": (
        "pyarrow>=16",  # Parquet, Arrow and zstd
        "transformers>=4.50",  # tokenizer directories in Hugging Face's format
    ),
    "convert": ("safetensors>=0.5",),  # Hugging Face's weights
    # Evaluation of Hugging Face models; the harness brings some fifty packages.
    "eval": ("lm-eval[hf]>=0.4.9", "transformers>=4.50", "safetensors>=0.5", "matplotlib>=3.8"),
    # Muon and its family; an entry of the same name with version 999 stands in another index.
    "muon": ("emerging-optimizers==0.3.0",),
    "instances": ("einops>=0.7",),  # Megatron makes the groups of optimizer instances with it
}

EXTRAS: dict[str, tuple[str, ...]] = {
    **_BY_USE,
    "all": tuple(dict.fromkeys(requirement for packages in _BY_USE.values() for requirement in packages)),
    # Transformer Engine compiles against the installed torch and CUDA; it is of no use without a GPU.
    "te": ("transformer-engine[pytorch]>=2.0",),
    # The writer of Megatron's own default, --async-strategy nvrx; Megatron 0.19 refuses earlier ones.
    "async": ("nvidia-resiliency-ext>=0.6",),
}
"""The requirements of each extra. `all` has what installs on any machine."""


def pip_install_extra(extra: str) -> str:
    """Return the command that installs what an extra needs."""
    return " ".join(("pip install", *(f"'{requirement}'" for requirement in EXTRAS[extra])))


def pip_install(package: str) -> str:
    """Return the command that installs one package of the extras.

    Args:
        package: its name, as the requirement has it.
    """
    for requirement in EXTRAS["all"]:
        if requirement.startswith(package) and requirement[len(package)] in "[><=":
            return f"pip install '{requirement}'"
    raise KeyError(package)
