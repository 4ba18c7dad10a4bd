"""The committed stubs are what the compiler makes of the committed proto."""

from pathlib import Path

import pytest
from google.protobuf.message import Message
from grpc_tools import protoc

from octavo.server import octavo_pb2 as pb

SERVER = Path(__file__).parents[2] / "server"
STUBS = ("octavo_pb2.py", "octavo_pb2.pyi", "octavo_pb2_grpc.py")


def test_stubs_are_fresh(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    arguments = ["protoc", f"-Ioctavo/server={SERVER}", *outputs, "octavo/server/octavo.proto"]
    assert protoc.main(arguments) == 0
    for name in STUBS:
        fresh = (tmp_path / "octavo" / "server" / name).read_text()
        assert (SERVER / name).read_text() == fresh, f"{name}: run `make proto`"


@pytest.mark.parametrize("enum", pb.DESCRIPTOR.enum_types_by_name.values(), ids=lambda e: e.name)
def test_enums_begin_with_unspecified(enum: "pb.FinishReason") -> None:
    assert enum.values[0].number == 0
    assert enum.values[0].name.endswith("_UNSPECIFIED")


@pytest.mark.parametrize("kind", [pb.Sampling, pb.Scheduling, pb.KvOptions])
def test_scalars_of_options_have_presence(kind: type[Message]) -> None:
    """Or 0 and absent would be the same. The empty string means the same as none."""
    for field in kind.DESCRIPTOR.fields:
        is_text = field.type == field.TYPE_STRING
        assert field.is_repeated or is_text or field.has_presence, field.name
