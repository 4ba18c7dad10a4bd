"""`octavo chat`: a conversation on the terminal."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

import grpc
from absl import flags

from . import octavo_pb2 as pb
from . import octavo_pb2_grpc
from .client import GenerationFailed, generate
from .command_line import Command, UsageError, check_utf8
from .generation_flags import check, command_error, connected, define_generation_flags, sampling
from .request_flags import define_request_flags, set_request_flags

with suppress(ImportError):
    import readline  # noqa: F401  gives `input` its line editing, where the platform has it

EXIT_WORD = "/exit"


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `octavo chat`."""
    flags.DEFINE_string(
        "system", None, "What the model is told before the conversation.", flag_values=values
    )
    define_request_flags(values)
    define_generation_flags(values)


def run(values: flags.FlagValues, positionals: Sequence[str]) -> int:
    """Reads, answers, remembers, until the user has had enough."""
    if isinstance(sys.stdin, TextIOWrapper):
        # Bytes that are no text are refused line by line, not by an end of the chat.
        sys.stdin.reconfigure(errors="surrogateescape")
    history: list[pb.ChatMessage] = []
    if values.system is not None:
        check_utf8("--system", values.system)
        history.append(pb.ChatMessage(role="system", content=values.system))
    common = pb.GenerateRequest(sampling=sampling(values))
    set_request_flags(values, common)
    check(common, values)
    with connected(values) as channel:
        try:  # before anybody types: is there a server, and has it loaded its model
            octavo_pb2_grpc.ControlStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        except grpc.RpcError as error:
            raise command_error(error, values) from error
        print(f"Ctrl-C ends an answer, Ctrl-D or {EXIT_WORD} ends the chat.", file=sys.stderr)
        while (said := _read()) is not None:
            try:
                check_utf8("your message", said)
            except UsageError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            if said.strip():
                _answer(channel, common, history, said, values)
    return 0


def _read() -> str | None:
    """The user's next line; None if there is none."""
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            print()  # an unfinished line is dropped, like a shell does
            continue
        except EOFError:
            print()
            return None
        return None if line.strip() == EXIT_WORD else line


def _answer(
    channel: grpc.Channel,
    common: pb.GenerateRequest,
    history: list[pb.ChatMessage],
    said: str,
    values: flags.FlagValues,
) -> None:
    """Streams the answer and adds both turns to the history, or neither if there is no answer.

    Args:
      channel: To the server.
      common: What all requests of the chat have in common.
      history: The turns so far, oldest first.
      said: The user's turn.
      values: The command's flags.
    """
    question = pb.ChatMessage(role="user", content=said)
    request = pb.GenerateRequest(chat=pb.ChatMessages(messages=[*history, question]))
    request.MergeFrom(common)
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        print(text, end="", flush=True)

    try:
        reason = generate(channel, request, show).choices[0].finish_reason
        if reason == "length":
            print(" [cut at --max_tokens or the context limit]", end="")
        elif reason != "stop":
            print(f" [ended by {reason}]", end="")
    except KeyboardInterrupt:
        print(" [cancelled]", end="")
    except (grpc.RpcError, GenerationFailed) as error:
        # Said and survived: the next message may well fit, or the server be back.
        print(f"error: {command_error(error, values)}", file=sys.stderr)
    print(flush=True)
    if pieces:
        history += [question, pb.ChatMessage(role="assistant", content="".join(pieces))]


COMMAND = Command(name="chat", summary="Talks to a model.", define_flags=define_flags, run=run)
