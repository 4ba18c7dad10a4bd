"""Admission: what a request may ask of this engine. Pure checks; the same for every front end.

A request that passes can run to its end on an empty engine: ids exist, and prompt and output fit
the context and the pages. What cannot is refused before it is queued, never truncated. No JAX.
"""

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import override

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..configs.scheduling_config import MAX_PRIORITY, MIN_PRIORITY
from .request import Request, SamplingParams
from .schedule import RequestState

MAX_REQUEST_ID_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 256
MAX_TARGET_S = 86_400.0
MIN_TEMPERATURE = 1e-6  # below it, differences of logits overflow float32
MAX_TEMPERATURE = 100.0
MAX_CLOCK_S = 1e12


class InvalidRequest(ValueError):
    """A request that this engine can never run.

    Attributes:
      field: The field of Request or SamplingParams at fault.
      value: What it holds, or the element at `index`, or for a prompt that is too long its length.
      bound: What it must be, as in "in [0, 1]".
      index: Which element of the field, where it is one of many.
    """

    def __init__(self, field: str, value: object, bound: str, index: int | None = None) -> None:
        """See the attributes."""
        super().__init__(field, value, bound, index)  # the arguments, so that it can be pickled
        self.field = field
        self.value = value
        self.bound = bound
        self.index = index

    @override
    def __str__(self) -> str:
        """One sentence that names field, value and bound; long values are shortened."""
        at = "" if self.index is None else f"[{self.index}]"
        return f"{self.field}{at} is {reprlib.repr(self.value)}; it must be {self.bound}"


class Overloaded(RuntimeError):
    """A request that could run later: too much is waiting now.

    Attributes:
      bound: The bound it would exceed, by its name in SchedulingConfig.
      retry_after_s: When there will be room for it, as far as the pace of the engine tells.
    """

    def __init__(self, message: str, bound: str, retry_after_s: float) -> None:
        """The message says how much of what there is, and how much may be."""
        super().__init__(message, bound, retry_after_s)  # all arguments, so that it can be pickled
        self.bound = bound
        self.retry_after_s = retry_after_s

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class EngineUnavailable(RuntimeError):
    """The engine takes no requests any more: it failed, or it is shutting down."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What model and memory allow, known once both are loaded.

    Attributes:
      vocab_size: Valid token ids are [0, vocab_size).
      max_model_len: Most tokens of one request, prompt and output together.
      num_pages: Pages of the KV pool, page 0 included.
      eos_token_ids: The model's end-of-sequence ids.
    """

    vocab_size: int
    max_model_len: int
    num_pages: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def resolve(
        cls,
        config: EngineConfig,
        model: ModelConfig,
        *,
        num_pages: int,
        eos_token_ids: Sequence[int],
    ) -> "EngineLimits":
        """The limits of an engine with this many pages.

        Raises:
          ValueError: max_model_len is more than the model or the pages allow, or the model has
            more end-of-sequence ids than a slot holds.
        """
        # The last token of a request is sampled and never fed back, so it needs no page.
        most = min(model.max_position, (num_pages - 1) * config.page_size + 1)
        if most < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2")
        max_model_len = most if config.max_model_len is None else config.max_model_len
        if max_model_len > most:
            raise ValueError(
                f"max_model_len is {max_model_len}; it must be at most {most}: the model was "
                f"trained for {model.max_position} tokens and the KV pool has {num_pages - 1} "
                f"pages of {config.page_size}"
            )
        if len(eos_token_ids) > config.max_stop_ids:
            raise ValueError(
                f"max_stop_ids is {config.max_stop_ids}; it must be at least "
                f"{len(eos_token_ids)}, the model's end-of-sequence ids"
            )
        return cls(
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            num_pages=num_pages,
            eos_token_ids=tuple(eos_token_ids),
        )


def admit(request: Request, config: EngineConfig, limits: EngineLimits) -> RequestState:
    """Checks a request against everything that does not depend on other requests.

    Pure, so any thread may call it. The engine sets the ordinal, and the seed where the request
    brings none, when it takes the state.

    Raises:
      InvalidRequest: it can never run; names the first field at fault.
    """
    sampling = request.sampling
    _check_identity(request)
    _check_scheduling(request)
    num_prompt_tokens = len(request.prompt_token_ids)
    longest = limits.max_model_len - 1
    if not 1 <= num_prompt_tokens <= longest:
        raise InvalidRequest(
            "prompt_token_ids",
            num_prompt_tokens,
            f"1 to {longest} tokens long: the context limit of {limits.max_model_len} includes "
            "the output",
        )
    _check_token_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    _check_sampling(sampling)
    _check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    eos_token_ids = () if sampling.ignore_eos else limits.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_token_ids)))
    if len(stop_ids) > config.max_stop_ids:
        raise InvalidRequest(
            "stop_token_ids",
            len(sampling.stop_token_ids),
            f"few enough: with the model's end-of-sequence ids they make {len(stop_ids)}, and "
            f"max_stop_ids, {config.max_stop_ids}, is the most",
        )
    return RequestState(
        request=_with_plain_top_k(request),
        max_tokens=_max_tokens(sampling, num_prompt_tokens, limits.max_model_len),
        stop_ids=stop_ids,
        seed=sampling.seed or 0,
    )


def pick_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of a request that brings none: 64 bits that depend on these two numbers only."""
    words = engine_seed.to_bytes(8, "little") + ordinal.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _check_identity(request: Request) -> None:
    request_id = request.request_id
    _require(
        "request_id",
        request_id,
        type(request_id) is str and 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS,
        f"1 to {MAX_REQUEST_ID_CHARACTERS} characters long",
    )
    for name, time_s in (("arrival_s", request.arrival_s), ("deadline_s", request.deadline_s)):
        if time_s is not None:
            _require(name, time_s, _is_number(time_s, -MAX_CLOCK_S, MAX_CLOCK_S), "a finite time")


def _check_scheduling(request: Request) -> None:
    for name in ("tenant", "request_class", "cache_salt"):
        label = getattr(request, name)
        _require(
            name,
            label,
            type(label) is str and len(label) <= MAX_LABEL_CHARACTERS,
            f"at most {MAX_LABEL_CHARACTERS} characters long",
        )
    _require(
        "priority",
        request.priority,
        _is_int(request.priority, MIN_PRIORITY, MAX_PRIORITY),
        f"in [{MIN_PRIORITY}, {MAX_PRIORITY}]",
    )
    for name in ("queue_ttl_s", "ttft_target_s", "tpot_target_s"):
        target_s = getattr(request, name)
        if target_s is not None:
            is_met = _is_number(target_s, 0.0, MAX_TARGET_S) and target_s > 0
            _require(name, target_s, is_met, f"in (0, {MAX_TARGET_S:g}]")
    reads = request.reads_prefix_cache
    _require("reads_prefix_cache", reads, type(reads) is bool, "a bool")


def _check_sampling(sampling: SamplingParams) -> None:
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    _require(
        "temperature",
        temperature,
        _is_number(temperature, 0.0, 0.0)
        or _is_number(temperature, MIN_TEMPERATURE, MAX_TEMPERATURE),
        f"0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]",
    )
    _require("top_k", sampling.top_k, _is_int(sampling.top_k, -1, 2**31 - 1), "in [-1, 2**31)")
    _require("top_p", top_p, _is_number(top_p, 0.0, 1.0) and top_p > 0, "in (0, 1]")
    _require("min_p", min_p, _is_number(min_p, 0.0, 1.0), "in [0, 1]")
    if sampling.seed is not None:
        _require("seed", sampling.seed, _is_int(sampling.seed, 0, 2**64 - 1), "in [0, 2**64)")
    for name in ("ignore_eos", "logprobs", "prompt_logprobs"):
        _require(name, getattr(sampling, name), type(getattr(sampling, name)) is bool, "a bool")


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    # Prompts are long: one pass of each builtin, and the slow loop only to name the culprit.
    if not token_ids or (
        set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    ):
        return
    for index, token_id in enumerate(token_ids):
        if not _is_int(token_id, 0, vocab_size - 1):
            raise InvalidRequest(field, token_id, f"a token id in [0, {vocab_size})", index)


def _max_tokens(sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if sampling.max_tokens is None:
        return room
    _require(
        "max_tokens",
        sampling.max_tokens,
        _is_int(sampling.max_tokens, 1, room),
        f"in [1, {room}]: the prompt takes {num_prompt_tokens} tokens of the context limit of "
        f"{max_model_len}",
    )
    return sampling.max_tokens


def _with_plain_top_k(request: Request) -> Request:
    """The device knows one word for "all tokens", 0; clients also say -1."""
    if request.sampling.top_k != -1:
        return request
    return replace(request, sampling=replace(request.sampling, top_k=0))


def _require(field: str, value: object, is_met: bool, bound: str) -> None:
    if not is_met:
        raise InvalidRequest(field, value, bound)


def _is_int(value: object, low: int, high: int) -> bool:
    """Neither bool, which is an int to Python, nor float."""
    return type(value) is int and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    """The bounds are finite and the comparison is in the positive form, so NaN does not pass."""
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high
