"""Structured output on the wire: a Guide message to the engine's record."""

import json

from ..engine.sampling_params import Guide, GuideKind
from . import octavo_pb2 as pb
from .status import invalid


def engine_guide(message: pb.Guide) -> Guide:
    """The engine's record.

    Raises:
      Refusal: None of the kinds is set, or json_object is false.
    """
    match message.WhichOneof("kind"):
        case "json_schema":
            return Guide(kind=GuideKind.JSON_SCHEMA, text=message.json_schema)
        case "json_object":
            if not message.json_object:
                raise invalid("sampling.guide.json_object", "json_object is false; it must be true")
            return Guide(kind=GuideKind.JSON_OBJECT)
        case "regex":
            return Guide(kind=GuideKind.REGEX, text=message.regex)
        case "choice":
            texts = json.dumps(list(message.choice.texts), ensure_ascii=False)
            return Guide(kind=GuideKind.CHOICE, text=texts)
        case "grammar":
            return Guide(kind=GuideKind.GRAMMAR, text=message.grammar)
        case _:
            kinds = ", ".join(field.name for field in message.DESCRIPTOR.fields)
            raise invalid("sampling.guide", f"guide is empty; it must have one of {kinds}")
