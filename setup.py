# SPDX-License-Identifier: Apache-2.0
"""Package metadata of megatron-ext.

Ranges live here; the exact versions that the tests ran with are in ``constraints.txt``.
"""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# Megatron 0.19.2 imports (its training loop too) with nothing more than these.
REQUIRES = [
    "torch>=2.6",
    "numpy",
    "packaging>=24.2",
    # docs/versions.md says what ran on which release; others are refused at run time until they are tested.
    "megatron-core>=0.18,<0.21",
    # Megatron writes torch_dist checkpoints through it and does not declare it.
    "psutil>=5.9",
]

# What users choose, by extra: the package's own messages name it, too.
EXTRAS = {extra: list(found) for extra, found in runpy.run_path(str(HERE / "megatron_ext/extras.py"))["EXTRAS"].items()}

DOCS = [
    "sphinx>=8",
    "myst-parser>=4",
    "furo",
]

TESTS = [
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.9",
    "mypy>=1.15",
    *EXTRAS["hot-switch"],
    "tensorboard>=2.16",  # Megatron's TensorBoard writer, which the logging tests read back
    *EXTRAS["convert"],  # reads the sync service's snapshots back, too
    "trustme>=1.2",  # certificates for the sync service's tests
]

DEV = [*TESTS, *DOCS, "build>=1.2"]
DEV += [requirement for extra in ("plots", "data", "sync", "muon", "instances") for requirement in EXTRAS[extra]]


def read_version() -> str:
    """Return the version without importing the package (its dependencies are not there yet)."""
    text = (HERE / "megatron_ext" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_ext/version.py: no line of the form __version__ = "..."')
    return match.group(1)


def read_readme() -> str:
    """Return the README, which the package index shows; a source tree without one still builds."""
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="megatron-ext",
    version=read_version(),
    description="Local SGD (DiLoCo, EDiT) for stock Megatron-LM: workers train apart and meet now and then",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="The megatron_ext authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_ext", "megatron_ext.*"]),
    # tests/packaging checks that every file of the package is in the wheel.
    package_data={
        "megatron_ext": [
            "py.typed",
            "**/*.yaml",
            "**/*.json",
            "**/*.txt",
            "**/*.md",
            "**/*.html",
            "**/*.proto",
        ]
    },
    install_requires=REQUIRES,
    extras_require={**EXTRAS, "docs": DOCS, "tests": TESTS, "dev": DEV},
    entry_points={"console_scripts": ["megatron-ext = megatron_ext.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
