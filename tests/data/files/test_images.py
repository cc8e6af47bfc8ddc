"""Folders of images, one per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from user_files import (
    EXPECTED,
    GOOD_ROWS,
    TEST,
    client_names_of,
    error_of,
    lines,
    load,
    message_of,
    splits_of,
    write,
    write_image,
)

import gpfl


def test_class_folders_without_clients(tmp_path: Path) -> None:
    names = ["cat/2.png", "cat/10.PNG", "dog/a.bmp", "dog/b.png"]
    expected = [write_image(tmp_path / "p" / name, k) for k, name in enumerate(names)]
    write(tmp_path / "p/cat/notes.txt", "x")
    write(tmp_path / "p/.cache/x.png", "x")
    (tmp_path / "p/empty").mkdir()
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack(expected))
    assert (table.x.dtype, table.input_spec.kind, table.input_spec.pixel_max) == (torch.uint8, "pixels", 255)
    assert table.y.tolist() == [0, 0, 1, 1]
    assert table.metadata == {"classes": ["cat", "dog"], "image_size": 0}
    assert (table.client_ids, table.splits) == (None, None)
    assert "2 classes of 'class': cat, dog. Inputs: colour images of 5×4.\n" in table.description
    assert table.description.endswith("\nNot read: cat/notes.txt.")


@pytest.mark.parametrize("form", ["{client}/{split}/{kind}", "{split}/{client}/{kind}", "{client}/{kind}", "{split}/{kind}"])
def test_class_folders_with_clients_and_splits(form: str, tmp_path: Path) -> None:
    expected = {}
    for number, client in enumerate(("north", "south")):
        for k, split in enumerate(("train", "test")):
            for m, kind in enumerate(("dog", "cat")):
                seed = 100 * number + 10 * k + m
                name = tmp_path / "p" / form.format(client=client, split=split, kind=kind) / f"{seed}.png"
                expected[write_image(name, seed).tobytes()] = (client, k * TEST, kind)
    table = load(tmp_path / "p")
    assert len(table) == 8
    for row in range(8):
        client, split, kind = expected[table.x[row].numpy().tobytes()]
        assert ["cat", "dog"][table.y[row]] == kind
        if "client" in form:
            assert client_names_of(table)[row] == client
        else:
            assert table.client_ids is None
        if "split" in form:
            assert splits_of(table)[row] == split
        else:
            assert table.splits is None


def test_grey_images_have_one_channel_or_three_next_to_colour_images(tmp_path: Path) -> None:
    grey = [write_image(tmp_path / f"p/{kind}/1.png", k, mode="L") for k, kind in enumerate("ab")]
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack(grey))
    assert "grey images of 5×4" in table.description
    colour = write_image(tmp_path / "p/b/2.png", 7, mode="RGBA")
    table = load(tmp_path / "p")
    assert np.array_equal(table.x.numpy(), np.stack([grey[0].repeat(3, 0), grey[1].repeat(3, 0), colour[:3]]))


def test_images_are_resized_if_a_size_is_given(tmp_path: Path) -> None:
    first = write_image(tmp_path / "p/a/1.png", 0, size=(3, 3))
    write_image(tmp_path / "p/b/1.png", 1, size=(8, 5))
    Image.new("RGB", (7, 9), (10, 20, 30)).save(tmp_path / "p/b/2.png")
    assert error_of(tmp_path / "p") == (
        f"{tmp_path}/p/b/1.png is 8×5, 1.png is 3×3: give all images the same size, or resize them with --image-size 64"
    )
    table = load(tmp_path / "p", image_size=3)
    assert table.x.shape == (3, 3, 3, 3)
    assert np.array_equal(table.x[0].numpy(), first), "one that has the size stays as it is"
    assert (table.x[2].flatten(1).numpy() == np.array([[10], [20], [30]])).all(), "one colour stays one colour"
    assert table.description.endswith("colour images of 3×3, resized.")


def test_bad_images_are_errors(tmp_path: Path) -> None:
    write_image(tmp_path / "p/a/1.png", 0, size=(40, 40))
    bad = tmp_path / "p/b/1.png"
    write_image(bad, 1, size=(40, 40))
    content = bad.read_bytes()
    bad.write_bytes(content[:400])
    assert error_of(tmp_path / "p").startswith(f"{bad} is damaged (")
    assert error_of(tmp_path / "p").endswith("): remove or replace it")
    bad.write_bytes(b"GIF89a")
    assert error_of(tmp_path / "p") == f"{bad} is not an image (cannot identify image file {str(bad)!r}): remove or replace it"
    Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40)).save(bad)
    assert error_of(tmp_path / "p") == f"{bad} has pixels of mode I;16, deeper than 8 bits: save it with 8 bits per channel"
    bad.write_bytes(content)
    assert len(load(tmp_path / "p")) == 2


def test_images_are_rotated_by_their_orientation(tmp_path: Path) -> None:
    wide = Image.new("RGB", (8, 4), (200, 0, 0))
    wide.paste((0, 0, 200), (0, 0, 4, 4))  # blue on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by a quarter turn to the right
    for kind in "ab":
        (tmp_path / "p" / kind).mkdir(parents=True)
        wide.save(tmp_path / f"p/{kind}/1.jpg", exif=exif, quality=95)
    table = load(tmp_path / "p")
    assert table.shape == (3, 8, 4), "a portrait"
    red, _, blue = table.x[0].numpy().astype(int)
    assert (blue[:3] > 150).all()
    assert (red[5:] > 150).all()


def test_an_image_too_large_to_decode_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in "ab":
        write_image(tmp_path / f"p/{kind}/1.png", 0, size=(20, 20))
    for pixels in (300, 150):  # over the limit Pillow warns, over twice the limit it refuses
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
        assert error_of(tmp_path / "p") == (
            f"{tmp_path}/p/a/1.png has over {pixels} pixels, more than is safe to decode: shrink it"
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("label", "a"), ("client", "a"), ("split_column", "a"), ("ignore", ["a"]), ("scale", "none"), ("missing", "mean")],
)
def test_options_for_columns_are_errors_with_images(option: str, value: object, tmp_path: Path) -> None:
    for kind in "ab":
        write_image(tmp_path / f"p/{kind}/1.png", 0)
    shown = "a" if option == "ignore" else value
    assert error_of(tmp_path / "p", **{option: value}) == (
        f"data.{option} is {shown!r}, but p holds images, not columns: leave it out"
    )


def test_images_of_which_only_some_are_divided_are_an_error(tmp_path: Path) -> None:
    for name in ("a/train/x", "a/test/y", "b/x", "b/y"):
        write_image(tmp_path / "p" / name / "1.png", 0)
    assert error_of(tmp_path / "p") == (
        f"{tmp_path}/p/a/test is a test split, but {tmp_path}/p/b is not divided: divide all clients or none"
    )
    for name in ("q/test/x", "q/test/y"):
        write_image(tmp_path / name / "1.png", 0)
    assert error_of(tmp_path / "q") == "there are test rows, but none for training"


def test_images_without_a_test_split_are_not_tested_on_training_images(tmp_path: Path) -> None:
    for name in ("n/train/x", "n/train/y", "n/val/x"):
        write_image(tmp_path / "p" / name / "1.png", 0)
    message = message_of(lambda: gpfl.federate(tmp_path / "p"))
    assert message.startswith("client n has no test samples (2 training, 0 test): ")


def test_images_next_to_other_inputs_are_an_error(tmp_path: Path) -> None:
    write_image(tmp_path / "d/a/cat/1.png", 0)
    write(tmp_path / "d/b/all.csv", lines(("a", "label"), *GOOD_ROWS))
    assert error_of(tmp_path / "d") == (
        f"{tmp_path}/d/b/all.csv holds no class folders of images, but others do: give all clients the same layout"
    )
    write_image(tmp_path / "e/cat/1.png", 0)
    write_image(tmp_path / "e/north/dog/1.png", 0)
    assert error_of(tmp_path / "e") == f"{tmp_path}/e holds folders of images, and north, which holds folders: {EXPECTED}"
