"""The image-processing side task (FreeRide, section 6): resize and watermark every image of a folder."""

from __future__ import annotations

import importlib.util
import io
import math
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_whole

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_BAND_PIXELS = 95_000  # source pixels that one step reads: about 1.1 ms
_SUPPORT = 3  # of the Lanczos filter, in pixels of the coarser image
_ORIENTATION = 0x0112  # the EXIF tag


class ImageResize(SideTask):
    """Resizes every image of a folder and writes a text into its lower right corner.

    The results go to ``images`` in the job's folder, under the source's name: JPEG for JPEG, else PNG (with the suffix
    appended if the name has another one).  An opaque image equals Pillow's Lanczos resize of the whole, width
    first, to within 1 level of 255.  (Pillow 13 itself begins with the height for a few narrow shapes, which gives
    slightly other sharp edges.)  A file that cannot be decoded is skipped with a warning.  After each image the task
    reports ``images`` and ``skipped``.

    An image takes several steps: decode, resize in bands, watermark and encode.  Pillow decodes a file in one go,
    which makes that the longest step: about 9 ns a pixel for JPEG, so 2.4 ms for the sample photos of 640 x 427 pixels.
    """

    unit: ClassVar[str] = "images"

    def create(
        self,
        folder: str | None = None,
        size: int = 320,
        text: str = "PipeFill",
        repeat: int = 1,
        tile_rows: int | None = None,
    ) -> None:
        """List the images and draw the watermark.

        Args:
            folder: where the images are; a relative path is relative to the job's folder.  None for the two photos
                that come with scikit-learn.
            size: the longer side of the results, in pixels.
            text: the watermark; empty for none.
            repeat: how often to go over the folder; 0 to go on until the main job ends.
            tile_rows: rows of a result that one step computes; None for as many as take about 1 ms.

        Raises:
            ValueError: an argument is out of range, or there are no images.
        """
        check_whole(size=(size, 1), repeat=(repeat, 0), tile_rows=(1 if tile_rows is None else tile_rows, 1))
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r}: expected a string")
        self._files = _list_images(folder)
        self._size, self._repeat, self._tile_rows = size, repeat, tile_rows
        self._mark = _draw(text, max(8, size // 14)) if text.strip() else None
        self._folder = self.context.directory / "images"
        self._folder.mkdir(exist_ok=True)
        self._seen = 0  # files done or skipped, over all repetitions
        self._skipped = 0
        self._steps = self._run()
        self._set_total()

    def init(self) -> None:
        """Have Pillow import its plugins: the first use is slow."""
        from PIL import Image, ImageOps

        Image.init()
        for kind in ("JPEG", "PNG"):
            ImageOps.exif_transpose(Image.new("RGB", (16, 16))).save(io.BytesIO(), kind)

    def run_next_step(self) -> float:
        return next(self._steps)

    def state_dict(self) -> dict[str, Any]:
        """An image that is not finished is begun anew."""
        return {"seen": self._seen, "skipped": self._skipped, "result": dict(self.context.result)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._skipped = state["seen"], state["skipped"]
        self._set_total()
        self.context.report(**state["result"])

    def _set_total(self) -> None:
        if self._repeat:
            self.context.total_work = float(self._repeat * len(self._files) - self._skipped)

    def _run(self) -> Iterator[float]:
        """All steps of the task: each value is the work that the step before it did."""
        while not self._repeat or self._seen < self._repeat * len(self._files):
            path = self._files[self._seen % len(self._files)]
            source = self._decode(path)
            if source is not None:
                yield 0.0
                output = yield from self._resize(source)
                self._finish(source, output, path)
            self._seen += 1
            self.context.report(images=self._seen - self._skipped, skipped=self._skipped)
            yield 0.0 if source is None else 1.0

    def _decode(self, path: Path) -> Image | None:
        from PIL import Image

        try:
            with Image.open(path) as image:
                image.load()
                image.getexif()
                return image
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise about anything at a damaged file
            if self._seen < len(self._files):
                self.context.logger.warning("%s is skipped: %s: %s", path, type(error).__name__, error)
            self._skipped += 1
            self._set_total()
            return None

    def _resize(self, source: Image) -> Generator[float, None, Image]:
        """One band of rows a step; returns the whole."""
        from PIL import Image

        scale = max(source.size) / self._size
        width, height = (max(1, round(side / scale)) for side in source.size)
        rows_per_row = source.height / height
        rows = self._tile_rows or max(1, int(_BAND_PIXELS / source.width / rows_per_row))
        mode = "RGBA" if source.has_transparency_data else "RGB"
        output = Image.new(mode, (width, height))
        bands = math.ceil(height / rows)
        for band in range(bands):
            top, bottom = band * height // bands, (band + 1) * height // bands
            first, last = top * rows_per_row, bottom * rows_per_row
            # The filter reads beyond the band, on both sides: without these rows there would be seams.
            margin = _SUPPORT * max(1.0, rows_per_row) + 1
            begin, end = max(0, math.floor(first - margin)), min(source.height, math.ceil(last + margin))
            part = source.crop((0, begin, source.width, end)).convert(mode)
            if mode == "RGBA":
                part = part.convert("RGBa")  # what is transparent has no colour to spread
            # Pillow picks the order of the two passes by the shape, which a band does not share with its image.
            part = part.resize((width, part.height), Image.Resampling.LANCZOS)
            box = (0, first - begin, width, last - begin)
            part = part.resize((width, bottom - top), Image.Resampling.LANCZOS, box=box)
            output.paste(part.convert(mode), (0, top))
            yield 0.0
        return output

    def _finish(self, source: Image, output: Image, path: Path) -> None:
        """Watermark, encode, and put the file in place in one stroke."""
        from PIL import ImageOps

        orientation = source.getexif().get(_ORIENTATION)
        if orientation is not None:
            output.getexif()[_ORIENTATION] = orientation
            ImageOps.exif_transpose(output, in_place=True)
        if self._mark is not None:
            x, y = output.width - self._mark.width - 4, output.height - self._mark.height - 4
            output.paste((0, 0, 0), (x + 1, y + 1), self._mark)
            output.paste((255, 255, 255), (x, y), self._mark)
        jpeg = source.format in ("JPEG", "MPO")
        suffixes = (".jpg", ".jpeg") if jpeg else (".png",)
        name = path.name if path.suffix.lower() in suffixes else path.name + suffixes[0]
        scratch = self._folder / f".{name}.part"
        if jpeg:
            output.save(scratch, "JPEG", quality=90)
        else:
            output.save(scratch, "PNG", compress_level=1)
        os.replace(scratch, self._folder / name)


def _list_images(folder: str | None) -> list[Path]:
    if folder is None:
        found = importlib.util.find_spec("sklearn")  # not imported: that would take a second
        if found is None or not found.submodule_search_locations:
            raise ValueError("folder is None, but scikit-learn, whose photos are the default, is not installed")
        folder = str(Path(found.submodule_search_locations[0]) / "datasets" / "images")
    if not isinstance(folder, str) or not Path(folder).expanduser().is_dir():
        raise ValueError(f"folder is {folder!r}: expected a folder of images")
    files = sorted(path for path in Path(folder).expanduser().resolve().iterdir() if path.suffix.lower() in _SUFFIXES)
    if not files:
        raise ValueError(f"folder is {folder!r}, and holds no image: expected {', '.join(sorted(_SUFFIXES))} files")
    return files


def _draw(text: str, height: int) -> Image:
    """The text as a mask, just large enough to hold it."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(height)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    mask = Image.new("L", (max(1, right - left), max(1, bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=170, font=font)
    return mask
