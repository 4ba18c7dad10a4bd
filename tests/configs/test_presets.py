"""Presets: the shipped ones load, and a wrong .toml is refused by the name of the wrong key."""

import re

import pytest

from octavo.configs.presets import (
    DEFAULT_PRESET,
    HubSource,
    PypiSource,
    load_preset,
    parse_preset,
    preset_names,
)

LEGAL = f"""
name = "tiny"
description = "a model for tests"
license = "Apache-2.0"

[file]
name = "tiny.gguf"
size_bytes = 3
sha256 = "{"0" * 64}"

[[source]]
kind = "pypi"
package = "tiny-model"
version = "1.0"
member = "tiny_model/tiny.gguf"

[[source]]
kind = "hub"
repo = "owner/tiny"
revision = "main"
file = "tiny.gguf"
"""


@pytest.mark.parametrize("name", preset_names())
def test_shipped_presets_load(name: str) -> None:
    assert load_preset(name).name == name


def test_the_default_is_shipped() -> None:
    assert DEFAULT_PRESET in preset_names()


def test_sources_keep_their_order() -> None:
    """They are tried in the order of the file."""
    assert parse_preset("tiny", LEGAL).sources == (
        PypiSource(package="tiny-model", version="1.0", member="tiny_model/tiny.gguf"),
        HubSource(repo="owner/tiny", revision="main", file="tiny.gguf"),
    )


@pytest.mark.parametrize("name", ["gpt-9", "", "../presets", "smollm2-135m-instruct.toml"])
def test_an_unknown_preset_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"preset is {name!r}; ")) as caught:
        load_preset(name)
    assert all(known in str(caught.value) for known in preset_names())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('license = "Apache', 'licence = "Apache', "unknown key 'licence'"),
        ('license = "Apache-2.0"', "", "license is missing"),
        ('license = "Apache-2.0"', 'license = ""', "license is ''"),
        ('license = "Apache-2.0"', "license = 2", "license is 2; it must be a string"),
        ('name = "tiny"', 'name = "other"', "name is 'other'; it must equal"),
        ("size_bytes = 3", "size = 3", "file: unknown key 'size'"),
        ("size_bytes = 3", "size_bytes = 3.0", "size_bytes is 3.0; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = nan", "size_bytes is nan; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = true", "size_bytes is True; it must be a whole number"),
        ("size_bytes = 3", "size_bytes = 0", "size_bytes is 0; it must be at least 1"),
        ("0" * 64, "0" * 63, "it must be 64 lower-case hex digits"),
        ("0" * 64, "A" * 64, "it must be 64 lower-case hex digits"),
        ('name = "tiny.gguf"', 'name = "../tiny.gguf"', "name is '../tiny.gguf'; it must be"),
        ('name = "tiny.gguf"', 'name = ".."', "name is '..'; it must be"),
        ('kind = "hub"', 'kind = "ftp"', "source 1: kind is 'ftp'; it must be 'pypi' or 'hub'"),
        ('kind = "hub"', "", "source 1: kind is None"),
        ('version = "1.0"', "", "source 0: version is missing"),
        ('revision = "main"', 'branch = "main"', "source 1: unknown key 'branch'"),
        ("[file]", "[file", "is not TOML"),
    ],
)
def test_a_wrong_key_is_named(old: str, new: str, message: str) -> None:
    assert old in LEGAL
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_preset("tiny", LEGAL.replace(old, new, 1))
    assert str(caught.value).startswith("preset tiny")


@pytest.mark.parametrize("sources", ["source = []", "source = [1]", 'source = "pypi"'])
def test_sources_are_a_list_of_tables(sources: str) -> None:
    top = LEGAL.partition("[file]")[0] + sources + "\n"
    file = "[file]" + LEGAL.partition("[file]")[2].partition("[[source]]")[0]
    with pytest.raises(ValueError, match=r"^preset tiny.*source"):
        parse_preset("tiny", top + file)
