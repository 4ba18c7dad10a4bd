"""The flags that say what the output must be: the kinds of pb.Guide, of which one may be given."""

from pathlib import Path

from absl import flags

from . import octavo_pb2 as pb
from .command_line import UsageError, check_utf8, is_given

_FROM_FILE = "@FILE reads it from a file."

_TEXTS = {
    "json_schema": f"A JSON schema that the output, as JSON, must follow. {_FROM_FILE}",
    "regex": "A regular expression that the whole output must match.",
    "grammar": f"A grammar that the output must follow, in llguidance's Lark. {_FROM_FILE}",
}
_KINDS = (*_TEXTS, "json_object", "choice")


def define_guide_flags(values: flags.FlagValues) -> None:
    """Defines one for each kind of guide."""
    for name, meaning in _TEXTS.items():
        flags.DEFINE_string(name, None, meaning, flag_values=values)
    flags.DEFINE_bool("json_object", False, "The output must be a JSON object.", flag_values=values)
    flags.DEFINE_multi_string(
        "choice",
        [],
        "A text that the output may be; may be given several times, and it must be one of them.",
        flag_values=values,
    )


def set_guide_flags(values: flags.FlagValues, sampling: pb.Sampling) -> None:
    """Puts what the flags say into a message.

    Raises:
      UsageError: Two kinds are given, a text is not UTF-8, or a file cannot be read.
    """
    given = [name for name in _KINDS if is_given(values, name)]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are given; give one of them")
    if not given:
        return
    (name,) = given
    if name == "json_object":
        sampling.guide.json_object = values.json_object
    elif name == "choice":
        for text in values.choice:
            check_utf8("--choice", text)
        sampling.guide.choice.texts.extend(values.choice)
    else:
        text = getattr(values, name)
        check_utf8(f"--{name}", text)
        if name != "regex" and text.startswith("@"):
            text = _read(name, text[1:])
        setattr(sampling.guide, name, text)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--{name} is @{path}, which cannot be read: {error.strerror}") from error
    except ValueError as error:  # bytes that are no UTF-8, or a path with a zero in it
        raise UsageError(f"--{name} is @{path}, which is no UTF-8: {error}") from error
