"""What the services know of a loaded model: facts, an engine to submit to, and its text side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..engine.request import FinishReason, Load, Place, Request
from ..engine.sampling_params import Guide


@runtime_checkable
class EngineClient(Protocol):
    """The engine as front ends see it: plain records in; results arrive at `on_outputs`.

    All methods may be called from any thread; all but `join` return at once.
    """

    def submit(self, request: Request) -> Place:
        """Queues a request, and says where in the queue.

        Raises:
          InvalidRequest: It can never run.
          Overloaded: It cannot run now.
          EngineUnavailable: The engine failed or is shutting down.
        """

    def abort(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, in the next step; nothing happens if it is gone."""

    def abort_all(self, reason: FinishReason) -> None:
        """Ends every live request in the next step."""

    def pause(self) -> None:
        """No step runs until `resume`; requests are taken and wait, and aborts take effect."""

    def resume(self) -> None:
        """Goes on after `pause`."""

    def load(self) -> Load:
        """How busy it is now."""

    def stop(self) -> None:
        """Begins to end the engine and whatever it still runs."""

    def join(self, timeout_s: float) -> bool:
        """Waits until it has ended; False if it has not by then."""


@runtime_checkable
class StreamDecoder(Protocol):
    """Output ids to text, piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; a character still in the making is held back."""

    def flush(self) -> str:
        """What was held back, at the end."""


@runtime_checkable
class TextCodec(Protocol):
    """Text to token ids and back, for one model."""

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[int]:
        """The ids of a text; with parse_special_tokens, spelled control tokens become ids.

        Raises:
          ValueError: The vocabulary has no ids for it that are ordinary text.
        """

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a prompt for the next answer to a conversation of (role, content) turns.

        Raises:
          ValueError: The template refuses the conversation.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""

    def stream_decoder(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> StreamDecoder:
        """A decoder for the output that follows this prompt."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One loaded model.

    Attributes:
      name: What clients call it.
      engine: Runs its requests.
      codec: Its tokenizer and chat template.
      vocab_size: Valid token ids are [0, vocab_size).
      max_model_len: Most tokens of one request, prompt and output together.
      eos_token_ids: Ids that end an output by themselves.
      dtype: Of weights and KV pages.
      device: What it runs on: cpu, gpu or tpu.
      max_num_seqs: Requests that run at once.
      num_pages: Pages of the KV pool.
      page_size: Tokens per page.
      num_executables: Compiled step shapes, and the two transfers of pages where there are any.
      compile_s: Seconds that compiling took.
      compile_events_since_ready: Counts compilations from then on; anything but 0 is a fault.
      check_guide: Raises ValueError with the reason if the engine cannot hold outputs to a guide.
        Blocks for as long as it takes to compile one. None: the engine takes no guides.
      fingerprint: Of a deterministic engine; equal ones give equal tokens. Else empty.
      tensor_parallel_size: Devices that share each layer.
      attention: What attends over the KV pages: reference, tpu or gpu.
      attention_reason: Why it is not the platform's kernels; empty where it is, or there are none.
    """

    name: str
    engine: EngineClient
    codec: TextCodec
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    max_num_seqs: int
    num_pages: int
    page_size: int
    num_executables: int
    compile_s: float
    compile_events_since_ready: Callable[[], int]
    check_guide: Callable[[Guide], None] | None = None
    fingerprint: str = ""
    tensor_parallel_size: int = 1
    attention: str = "reference"
    attention_reason: str = ""
