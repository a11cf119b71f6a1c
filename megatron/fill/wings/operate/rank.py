"""The part of a rank: it notes the spans of the training's own trace, and warns where metrics cannot be served."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import deque
from functools import partial

from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.records.account import Traced
from megatron.fill.types import RankInfo
from megatron.fill.wings.operate.spans import note_span, sample_every
from megatron.fill.wings.operate.spec import OTLP

logger = logging.getLogger("pipefill")


def attend(settings: FillSettings, info: RankInfo, traced: deque[Traced]) -> None:
    """Have spans noted in ``traced`` if the environment asks for them."""
    try:
        every = sample_every(os.environ)
    except ValueError:  # the metrics server says so
        every = 0
    if every:
        attached.spans = partial(note_span, every, traced)
    sends = settings.serves and not info.local_rank and os.environ.get(OTLP)
    if sends and importlib.util.find_spec("prometheus_client") is None:  # with the setting, an error before the start
        logger.warning("no metrics go to %s: expected pip install 'pipefill[metrics]'", OTLP)
