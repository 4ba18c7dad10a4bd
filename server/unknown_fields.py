"""Fields of a request that this server does not know: a newer client's, or of another type.

protobuf keeps them aside without a word, so an option that the server has never heard of would
count for nothing, and nobody would know.
"""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from .status import invalid


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises Refusal for the first one in a message, or in a message that is a field of it.

    Lists of messages are left to whoever reads their elements: there may be millions.

    Args:
      message: As it was sent.
      path: Where in the request it lies; empty for the request itself.
    """
    kind = message.DESCRIPTOR
    for unknown in UnknownFieldSet(message):
        known = kind.fields_by_number.get(unknown.field_number)
        name = f"{unknown.field_number}" if known is None else known.name
        path = f"{path}.{name}" if path else name
        why = f"is no field of {kind.name}" if known is None else "has another type"
        raise invalid(path, f"{path} {why} in the interface that this server has")
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
            refuse_unknown_fields(value, f"{path}.{field.name}" if path else field.name)
