"""LoRA adapters, merged into a model's own weights when it is loaded: so they cost nothing where it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError

_CONFIG = "adapter_config.json"


def merge_adapter(model: Any, path: Path) -> Any:
    """The model with an adapter's changes in its weights.

    Args:
        path: the adapter's folder, as ``peft`` saves it.

    Raises:
        TaskError: it is no adapter of this model, it lacks tensors, or a package is missing.
    """
    if not (path / _CONFIG).is_file():
        raise TaskError(f"adapter is {path}: expected a folder with {_CONFIG}, as peft saves it")
    if not os.access(path / _CONFIG, os.R_OK):
        raise TaskError(f"adapter {path}: this user may not read {_CONFIG}")
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise TaskError(f"{error}: adapters need pip install 'pipefill[lora]'") from error
    try:
        config = PeftConfig.from_pretrained(str(path))
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise TaskError(f"adapter {path} is of the kind {kind}: expected LORA")
        config.inference_mode = True
        adapted = PeftModel(model, config)
        # What an adapter lacks would be left as if it had been trained to nothing, and what the model lacks left out.
        found = adapted.load_adapter(str(path), "default", torch_device="cpu")
        for names, where in ((found.missing_keys, "its files lack"), (found.unexpected_keys, "the model lacks")):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise TaskError(f"adapter {path} does not fit the model: {where} {', '.join(sorted(names)[:3])}{more}")
        return adapted.merge_and_unload(safe_merge=True)
    except TaskError:
        raise
    except Exception as error:  # peft and safetensors raise whatever their parts do
        said = " ".join(str(error).split())
        raise TaskError(f"adapter {path} does not fit the model: {type(error).__name__}: {said[:500]}") from error
