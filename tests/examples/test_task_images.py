from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from examples.tasks import images
from examples.tasks.images import ImageResize
from megatron.fill.worker import checkpoint
from tests.support.drive import begin, drive, finish
from tests.support.extras import needs

needs("sklearn", "tasks")
_sklearn = find_spec("sklearn")
assert _sklearn is not None
PHOTOS = Path((_sklearn.submodule_search_locations or [""])[0]) / "datasets" / "images"


def pixels(image: Image.Image | Path) -> np.ndarray:
    if isinstance(image, Path):
        with Image.open(image) as opened:
            return np.asarray(opened.convert("RGB")).astype(int)
    return np.asarray(image).astype(int)


@pytest.fixture
def photo(tmp_path) -> Path:
    """A folder with one of the photos, without loss."""
    folder = tmp_path / "photos"
    folder.mkdir()
    with Image.open(PHOTOS / "china.jpg") as image:
        image.save(folder / "china.png", compress_level=1)
    return folder


def test_the_sample_photos_are_resized_by_default(tmp_path):
    machine = begin(ImageResize, tmp_path)
    work = finish(machine)
    context = machine.task.context
    assert sum(work) == context.total_work == 2
    assert context.result == {"images": 2, "skipped": 0}
    assert json.loads((tmp_path / "result.json").read_text()) == context.result
    for name in ("china.jpg", "flower.jpg"):
        with Image.open(tmp_path / "images" / name) as image:
            assert image.size == (320, 214)
            assert image.format == "JPEG"
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["china.jpg", "flower.jpg"]


@pytest.mark.parametrize("tile_rows", [None, 1, 7, 64, 10_000])
@pytest.mark.parametrize("size", [100, 333, 900])
def test_the_bands_have_no_seams(tmp_path, photo, size, tile_rows):
    drive(ImageResize, tmp_path, folder=str(photo), size=size, text="", tile_rows=tile_rows)
    result = pixels(tmp_path / "images" / "china.png")
    with Image.open(photo / "china.png") as source:
        height = round(source.height * size / source.width)
        whole = pixels(source.resize((size, height), Image.Resampling.LANCZOS))
    assert result.shape == whole.shape
    assert np.abs(result - whole).max() <= 1


@pytest.mark.parametrize("shape", [(50, 427), (427, 50), (3, 200), (200, 3), (1, 1)])
def test_odd_shapes_have_no_seams(tmp_path, shape):
    folder = tmp_path / "shapes"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (shape[1], shape[0], 3), dtype=np.uint8)
    source = Image.fromarray(noise)
    source.save(folder / "noise.png")
    drive(ImageResize, tmp_path, folder=str(folder), size=70, text="", tile_rows=3)
    result = pixels(tmp_path / "images" / "noise.png")
    height, width, _ = result.shape
    assert max(width, height) == 70
    wide = source.resize((width, source.height), Image.Resampling.LANCZOS)
    assert np.abs(result - pixels(wide.resize((width, height), Image.Resampling.LANCZOS))).max() <= 1


@pytest.mark.parametrize(("tile_rows", "steps"), [(10_000, 3), (54, 6), (1, 216)])
def test_an_image_takes_many_steps(tmp_path, photo, tile_rows, steps):
    work = finish(begin(ImageResize, tmp_path, folder=str(photo), tile_rows=tile_rows))
    assert len(work) == steps  # decode, bands, watermark and encode
    assert work == [0.0] * (steps - 1) + [1.0]


def test_the_watermark_is_in_the_lower_right_corner(tmp_path, photo):
    drive(ImageResize, tmp_path / "plain", folder=str(photo), text="")
    drive(ImageResize, tmp_path / "marked", folder=str(photo), text="PipeFill")
    plain, marked = (pixels(tmp_path / name / "images" / "china.png") for name in ("plain", "marked"))
    rows, columns = np.nonzero((plain != marked).any(axis=2))
    assert len(rows) > 100
    assert rows.min() > 214 - 40
    assert columns.min() > 320 / 2
    assert rows.max() < 214
    assert marked[rows, columns].max() > plain[rows, columns].max() - 1


def test_a_watermark_larger_than_the_image_is_cut(tmp_path, photo):
    drive(ImageResize, tmp_path, folder=str(photo), size=20, text="a long line of text")
    assert pixels(tmp_path / "images" / "china.png").shape == (13, 20, 3)


def test_corrupt_files_are_skipped(tmp_path, photo, caplog):
    whole = (PHOTOS / "flower.jpg").read_bytes()
    (photo / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (photo / "text.png").write_text("not an image")
    (photo / "empty.gif").write_bytes(b"")
    (photo / "notes.txt").write_text("of no concern")
    with caplog.at_level(logging.WARNING, "pipefill.task"):
        machine = begin(ImageResize, tmp_path, folder=str(photo), repeat=2)
        work = finish(machine)
    assert machine.task.context.result == {"images": 2, "skipped": 6}
    assert sum(work) == machine.task.context.total_work == 2
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3  # in the first repetition only
    assert all(any(name in text for text in warned) for name in ("cut.jpg", "text.png", "empty.gif"))
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["china.png"]


def test_all_kinds_of_images(tmp_path):
    folder = tmp_path / "kinds"
    folder.mkdir()
    base = Image.new("RGB", (90, 60), (200, 40, 10))
    base.save(folder / "a.bmp")
    base.convert("P").save(folder / "a.gif")
    base.convert("L").save(folder / "a.png")
    base.convert("CMYK").save(folder / "a.jpeg")
    base.convert("1").save(folder / "a.tif")
    base.save(folder / "wrong.jpg", "PNG")
    clear = Image.new("RGBA", (60, 90), (0, 0, 0, 0))
    ImageDraw.Draw(clear).rectangle((0, 0, 59, 44), fill=(0, 255, 0, 255))
    clear.save(folder / "clear.webp", lossless=True)
    task = drive(ImageResize, tmp_path, folder=str(folder), size=30)
    assert task.context.result == {"images": 7, "skipped": 0}
    names = ["a.bmp.png", "a.gif.png", "a.jpeg", "a.png", "a.tif.png", "clear.webp.png", "wrong.jpg.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == names
    with Image.open(tmp_path / "images" / "clear.webp.png") as image:
        assert image.size == (20, 30)
        assert image.getpixel((2, 2)) == (0, 255, 0, 255)
        assert image.getpixel((2, 28)) == (0, 0, 0, 0)
    assert np.abs(pixels(tmp_path / "images" / "a.bmp.png")[:5, :5] - (200, 40, 10)).max() == 0


def test_a_photo_stands_upright(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    image = Image.new("RGB", (80, 40), "black")
    image.paste("white", (0, 0, 40, 40))
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    image.save(folder / "phone.jpg", exif=exif)
    drive(ImageResize, tmp_path, folder=str(folder), size=40, text="")
    result = pixels(tmp_path / "images" / "phone.jpg")
    assert result.shape == (40, 20, 3)
    assert result[5].min() > 200
    assert result[35].max() < 50


def test_it_repeats_and_resumes(tmp_path, photo):
    (photo / "bad.jpg").write_text("x")
    whole = begin(ImageResize, tmp_path / "whole", folder=str(photo), repeat=3)
    total = sum(finish(whole))
    directory = tmp_path / "parts"
    state, work = None, 0.0
    for steps in (2, 9, 8, 1000):  # the first ends before an image does: that one is begun anew
        machine = begin(ImageResize, directory, state, folder=str(photo), repeat=3)
        try:
            for _ in range(steps):
                work += machine.run_next_step()
        except StopIteration:
            pass
        checkpoint.save(directory, machine.state_dict() or {})
        machine.stop()
        state = checkpoint.load(directory)
    assert work == total == 3
    assert machine.task.context.result == whole.task.context.result == {"images": 3, "skipped": 3}
    assert machine.task.context.total_work == 3
    names = [directory / "images" / "china.png", tmp_path / "whole" / "images" / "china.png"]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_the_host_may_work_ahead_of_the_device(tmp_path, photo, monkeypatch):
    (photo / "bad.jpg").write_text("x")
    drive(ImageResize, tmp_path / "one", folder=str(photo))
    monkeypatch.setitem(images._AHEAD, "cpu", 2)  # as on a GPU
    machine = begin(ImageResize, tmp_path / "ahead", folder=str(photo), repeat=4)
    assert sum(finish(machine)) == machine.task.context.total_work == 4
    assert machine.task.context.result == {"images": 4, "skipped": 4}
    names = [tmp_path / run / "images" / "china.png" for run in ("one", "ahead")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_it_says_which_kind_of_step_comes_next(tmp_path, photo):
    machine = begin(ImageResize, tmp_path, folder=str(photo), tile_rows=100)
    kinds = []
    for _ in range(5):
        kinds.append(machine.task.next_node)
        machine.run_next_step()
    assert kinds == [2, 0, 0, 0, 1]  # decode, three bands, write


def test_repeat_0_goes_on(tmp_path, photo):
    machine = begin(ImageResize, tmp_path, folder=str(photo), repeat=0, size=16)
    assert sum(machine.run_next_step() for _ in range(200)) >= 10
    assert machine.task.context.total_work is None


def test_a_file_is_replaced_in_one_stroke(tmp_path, photo, monkeypatch):
    drive(ImageResize, tmp_path, folder=str(photo))
    before = (tmp_path / "images" / "china.png").read_bytes()

    def fail(self, path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    machine = begin(ImageResize, tmp_path, folder=str(photo))
    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        finish(machine)
    assert (tmp_path / "images" / "china.png").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 0}, "size is 0: expected a whole number of at least 1"),
        ({"size": "big"}, "size is 'big': expected a whole number"),
        ({"repeat": -1}, "repeat is -1: expected a whole number of at least 0"),
        ({"tile_rows": 0}, "tile_rows is 0: expected a whole number of at least 1"),
        ({"text": 5}, "text is 5: expected a string"),
        ({"folder": "/nowhere"}, "folder is '/nowhere': expected a folder of images"),
    ],
)
def test_wrong_arguments(tmp_path, args, message):
    with pytest.raises(ValueError, match=message):
        begin(ImageResize, tmp_path, **args)


def test_a_folder_without_images(tmp_path):
    with pytest.raises(ValueError, match=r"holds no image: expected \.bmp"):
        begin(ImageResize, tmp_path, folder=str(tmp_path))
