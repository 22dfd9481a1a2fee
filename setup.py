"""Package metadata; settings of the tools are in ``pyproject.toml``."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "paddle_group_sharded/__init__.py").read_text(), re.M).group(1)

CPU = ["paddlepaddle==3.3.1"]
# The newest that pip finds by this name (CUDA 11.8; it runs on machines without a GPU as well).  It was built before
# numpy 2, cannot read DistributedStrategy.hybrid_configs with a newer protobuf, and imports setuptools.
GPU = ["paddlepaddle-gpu==2.6.2", "numpy<2", "protobuf>=3.20,<=3.20.2", "setuptools<81"]
PLOT = ["matplotlib", "scikit-learn"]
TEST = ["pytest>=8", "pytest-timeout>=2.2", "hypothesis", "cmake>=3.20", "ninja"]
DEV = [*TEST, "ruff", "mypy>=1.11", "import-linter>=2"]

setup(
    name="paddle-group-sharded",
    version=VERSION,
    description="ZeRO group sharding and a LayerDesc pipeline for PaddlePaddle, on CPU and GPU",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["paddle_group_sharded", "paddle_group_sharded.*"]),
    package_data={"paddle_group_sharded": ["py.typed"]},
    python_requires=">=3.9",
    install_requires=["numpy", "safetensors", "tqdm"],
    extras_require={"cpu": CPU, "gpu": GPU, "plot": PLOT, "test": TEST, "dev": DEV},
    zip_safe=False,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(9, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
