"""The image-processing side task (FreeRide, section 6): resize and watermark every image of a folder."""

from __future__ import annotations

import importlib.util
import io
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.checks import check_whole

from .resample import Axis, premultiplied, stamp, straight, to_levels, upright

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_BAND_PIXELS = {"cpu": 40_000, "cuda": 20_000_000}  # source pixels of a step: about 1 ms on a core; GPU: not measured
_AHEAD = {"cpu": 0, "cuda": 8}  # images that the host decodes, and encodes, while the device resizes others
_WAIT_S = 0.001  # wait of a step that has nothing to do until the host is done
_RESIZE, _WRITE, _DECODE = range(3)  # kinds of steps
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True, slots=True)
class _Source:
    """A decoded image.

    Attributes:
        pixels: levels 0 to 255 (rows, columns, channels).
        jpeg: True if the file is a JPEG.
        orientation: EXIF orientation; None without the tag.
    """

    pixels: np.ndarray
    jpeg: bool
    orientation: int | None


class ImageResize(SideTask):
    """Resizing of every image of a folder, with a text written into the lower right corner.

    The results go to ``images`` in the job's folder, under the source's name: JPEG for JPEG, else PNG (with the suffix
    appended if the name has another one).  An opaque image equals Pillow's Lanczos resize of the whole image, width
    first, to within 1 level of 255.  (Pillow 13 itself begins with the height for a few narrow shapes, which gives
    slightly different sharp edges.)  A file that cannot be decoded is skipped with a warning.  After each image the
    task reports ``images`` and ``skipped``.

    Resizing and watermarking are the device's work, decoding and encoding the host's.  On a CPU all of it is done in
    steps: decode, resize in bands, watermark and encode.  Pillow decodes a file in a single call, which makes that the
    longest step: about 9 ns per pixel for JPEG, so 2.4 ms for the sample photos of 640 x 427 pixels.  On a GPU a thread
    decodes and encodes, also outside of bubbles, up to eight images ahead and behind; a step that finds no decoded
    image waits for 1 ms.
    """

    unit: ClassVar[str] = "images"
    _pool: ThreadPoolExecutor | None = None  # the host's work while the device computes

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
            folder: folder of the images; a relative path is relative to the job's folder.  None for the two photos
                that come with scikit-learn.
            size: longer side of the results, in pixels.
            text: watermark; empty for none.
            repeat: number of passes over the folder; 0 to continue until the training ends.
            tile_rows: rows of a result that one step computes; None for as many as take about 1 ms on a CPU.

        Raises:
            ValueError: an argument is out of range, or there are no images.
        """
        check_whole(size=(size, 1), repeat=(repeat, 0), tile_rows=(1 if tile_rows is None else tile_rows, 1))
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r}: expected a string")
        self._files = _list_images(folder)
        self._kind = self.context.device.partition(":")[0]
        self._size, self._repeat, self._tile_rows = size, repeat, tile_rows
        self._mark = _draw(text, max(8, size // 14)) if text.strip() else None
        self._folder = self.context.directory / "images"
        self._folder.mkdir(exist_ok=True)
        self._seen = 0  # files done or skipped, over all repetitions
        self._skipped = 0
        if _AHEAD[self._kind]:
            self._pool = ThreadPoolExecutor(1)
        self._steps = self._run()
        self.next_node = _DECODE
        self._set_total()

    def init(self) -> None:
        """Make Pillow import its plugins, and resize once on the device, since the first use is slow."""
        from PIL import Image

        Image.init()
        for kind in ("JPEG", "PNG"):
            Image.new("RGB", (16, 16)).save(io.BytesIO(), kind)
        if self._mark is not None:
            self._mark = self._mark.to(self.context.device)
        small = _Source(np.zeros((16, 16, 4), np.uint8), False, 6)
        for _ in self._resized(small):
            pass
        self.next_node = _DECODE

    def run_next_step(self) -> float:
        return next(self._steps)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from; an image that is not written yet is started again."""
        return {"seen": self._seen, "skipped": self._skipped, "result": dict(self.context.result)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen, self._skipped = state["seen"], state["skipped"]
        self._set_total()
        self.context.report(**state["result"])

    def _set_total(self) -> None:
        if self._repeat:
            self.context.total_work = float(self._repeat * len(self._files) - self._skipped)

    def _run(self) -> Iterator[float]:
        """Run the task: each ``yield`` ends a step, with the work that the step did."""
        ahead, total = _AHEAD[self._kind], self._repeat * len(self._files)
        begun = self._seen
        loading: deque[tuple[Path, Future[_Source]]] = deque()
        writing: deque[Future[float]] = deque()  # in order; the result is 1 for an image, 0 for a skipped file
        while True:
            while len(loading) <= ahead and (not total or begun < total):
                path = self._files[begun % len(self._files)]
                loading.append((path, self._on_host(_decode, path)))
                begun += 1
            if loading:
                path, loaded = loading.popleft()
                try:
                    source = yield from _awaited(loaded)
                except MemoryError:
                    raise
                except Exception as error:  # Pillow's decoders raise many kinds of errors for a damaged file
                    writing.append(self._on_host(self._skip, path, error))
                else:
                    self.next_node = _RESIZE
                    yield 0.0
                    output = yield from self._resized(source)
                    writing.append(self._on_host(self._write, output, source.jpeg, path))
            while writing and (len(writing) > ahead or not loading):
                work = yield from _awaited(writing.popleft())
                self._seen += 1
                self._skipped += not work
                self._set_total()
                self.context.report(images=self._seen - self._skipped, skipped=self._skipped)
                self.next_node = _DECODE
                yield work
            if not (loading or writing) and begun == total:
                return

    def _on_host[T](self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``work`` in a thread while the device works, or at once if the host is the device."""
        if self._pool is not None:
            return self._pool.submit(work, *args)
        done: Future[T] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _skip(self, path: Path, error: Exception) -> float:
        if self._seen < len(self._files):
            self.context.logger.warning("%s is skipped: %s: %s", path, type(error).__name__, error)
        return 0.0

    def _resized(self, source: _Source) -> Generator[float, None, Any]:
        """Resize one band of rows per step; return the image with its watermark: (channels, rows, columns), uint8."""
        import torch

        device = self.context.device
        rows_in, columns_in, channels = source.pixels.shape
        scale = max(rows_in, columns_in) / self._size
        across, down = (Axis(side, max(1, round(side / scale)), device) for side in (columns_in, rows_in))
        rows = self._tile_rows or max(1, int(_BAND_PIXELS[self._kind] / columns_in * down.target / rows_in))
        pixels = torch.from_numpy(source.pixels).to(device)
        bands = []
        count = math.ceil(down.target / rows)
        for band in range(count):
            top, bottom = band * down.target // count, (band + 1) * down.target // count
            low, high, weights = down.window(top, bottom)
            part = pixels[low:high].permute(2, 0, 1).float().contiguous()
            part = across.along_width(premultiplied(part) if channels == 4 else part)
            part = to_levels(weights @ part)
            bands.append(straight(part) if channels == 4 else part)
            self.next_node = _RESIZE if band + 1 < count else _WRITE
            yield 0.0
        image = upright(torch.cat(bands, 1), source.orientation)
        if self._mark is not None:
            top, left = (image.shape[1 + side] - self._mark.shape[side] - 4 for side in (0, 1))
            stamp(image, self._mark, left + 1, top + 1, 0)
            stamp(image, self._mark, left, top, 255)
        return image.to(torch.uint8)

    def _write(self, output: Any, jpeg: bool, path: Path) -> float:
        """Encode an image, and put the file in place atomically; return 1, its work."""
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(output.permute(1, 2, 0).cpu().numpy()))
        suffixes = (".jpg", ".jpeg") if jpeg else (".png",)
        name = path.name if path.suffix.lower() in suffixes else path.name + suffixes[0]
        scratch = self._folder / f".{name}.part"
        if jpeg:
            image.save(scratch, "JPEG", quality=90)
        else:
            image.save(scratch, "PNG", compress_level=1)
        os.replace(scratch, self._folder / name)
        return 1.0


def _awaited[T](future: Future[T]) -> Generator[float, None, T]:
    while not future.done():
        wait([future], _WAIT_S)
        yield 0.0
    return future.result()


def _decode(path: Path) -> _Source:
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        orientation = image.getexif().get(_ORIENTATION)
        pixels = np.array(image.convert("RGBA" if image.has_transparency_data else "RGB"))
        return _Source(pixels, image.format in ("JPEG", "MPO"), orientation)


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


def _draw(text: str, height: int) -> Any:
    """Draw the text as a mask (rows, columns) from 0 to 255, just large enough for it."""
    import torch
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(height)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    mask = Image.new("L", (max(1, right - left), max(1, bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=170, font=font)
    return torch.from_numpy(np.array(mask, np.float32))
