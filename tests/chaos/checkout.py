"""The checkout that a chaos run belongs to: its jobs import their tasks from there, wherever the run is started."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain_gpt.py"
