"""Admission: what a request may ask of this engine. Pure checks; the same for every front end.

A request that passes can run to its end on an empty engine: ids exist, and prompt and output fit
the context and the pages. What cannot is refused before it is queued, never truncated. No JAX.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..configs.engine_config import EngineConfig
from ..configs.model_config import ModelConfig
from ..configs.scheduling_config import MAX_PRIORITY, MIN_PRIORITY
from .checks import check_token_ids, is_int, is_number, require
from .kv_budget import longest_context
from .refusals import InvalidRequest
from .request import Request
from .sampling_checks import check_sampling
from .sampling_params import SamplingParams
from .schedule import RequestState
from .token_masks import has_id, ids_mask, without_ids

MAX_REQUEST_ID_CHARACTERS = 256
MAX_LABEL_CHARACTERS = 256
MAX_TARGET_S = 86_400.0
MAX_CLOCK_S = 1e12


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
        longest = longest_context(config, model)
        # The last token of a request is sampled and never fed back, so it needs no page.
        most = (num_pages - 1) * config.page_size + 1
        if most < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2")
        if config.max_model_len is not None and longest > most:
            raise ValueError(
                f"max_model_len is {longest}; it must be at most {most}: the KV pool has "
                f"{num_pages - 1} pages of {config.page_size}"
            )
        if len(eos_token_ids) > config.max_stop_ids:
            raise ValueError(
                f"max_stop_ids is {config.max_stop_ids}; it must be at least "
                f"{len(eos_token_ids)}, the model's end-of-sequence ids"
            )
        return cls(
            vocab_size=model.vocab_size,
            max_model_len=min(longest, most),
            num_pages=num_pages,
            eos_token_ids=tuple(eos_token_ids),
        )


def admit(request: Request, config: EngineConfig, limits: EngineLimits) -> RequestState:
    """Checks a request against everything that does not depend on other requests.

    Pure, so any thread may call it. The engine sets the ordinal, and the seed where the request
    brings none, when it takes the state. Choices beyond the first are its `forks`.

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
    check_token_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)
    check_sampling(sampling, limits.vocab_size)
    eos_token_ids = () if sampling.ignore_eos else limits.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *eos_token_ids)))
    if len(stop_ids) > config.max_stop_ids:
        raise InvalidRequest(
            "stop_token_ids",
            len(sampling.stop_token_ids),
            f"few enough: with the model's end-of-sequence ids they make {len(stop_ids)}, and "
            f"max_stop_ids, {config.max_stop_ids}, is the most",
        )
    max_tokens = _max_tokens(sampling, num_prompt_tokens, limits.max_model_len)
    require(
        "min_tokens",
        sampling.min_tokens,
        is_int(sampling.min_tokens, 0, max_tokens),
        f"in [0, {max_tokens}], the most output tokens",
    )
    mask = ids_mask(sampling, limits.vocab_size)
    if mask is not None and sampling.min_tokens and not without_ids(mask, stop_ids).any():
        raise InvalidRequest(
            "min_tokens", sampling.min_tokens, "0: only stop ids are among the ids that may come"
        )
    if sampling.guide is not None and mask is not None:
        ids = "banned_token_ids" if sampling.allowed_token_ids is None else "allowed_token_ids"
        require(
            ids,
            len(getattr(sampling, ids)),
            any(has_id(mask, token_id) for token_id in limits.eos_token_ids),
            "such that an end-of-sequence id may come: a guided output ends by one",
        )
    make_state = partial(
        RequestState,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        seed=sampling.seed or 0,
        ids_mask=mask,
    )
    leader = make_state(request=_with_plain_top_k(request))
    leader.forks += [
        make_state(request=_fork(leader.request, choice), choice=choice, leader=leader)
        for choice in range(1, sampling.n)
    ]
    return leader


def choice_id(request_id: str, choice: int) -> str:
    """What the engine calls one choice of a request. Ids of clients hold no control characters."""
    return f"{request_id}\x1f{choice}" if choice else request_id


def split_choice_id(live_id: str) -> tuple[str, int]:
    """The request and the choice that `choice_id` named."""
    request_id, _, choice = live_id.partition("\x1f")
    return request_id, int(choice or 0)


def pick_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of a request that brings none: 64 bits that depend on these two numbers only."""
    words = engine_seed.to_bytes(8, "little") + ordinal.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def _check_identity(request: Request) -> None:
    request_id = request.request_id
    require(
        "request_id",
        request_id,
        type(request_id) is str
        and 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS
        and request_id.isprintable(),
        f"1 to {MAX_REQUEST_ID_CHARACTERS} characters long, all printable",
    )
    for name, time_s in (("arrival_s", request.arrival_s), ("deadline_s", request.deadline_s)):
        if time_s is not None:
            require(name, time_s, is_number(time_s, -MAX_CLOCK_S, MAX_CLOCK_S), "a finite time")


def _check_scheduling(request: Request) -> None:
    for name in ("tenant", "request_class", "cache_salt"):
        label = getattr(request, name)
        require(
            name,
            label,
            type(label) is str and len(label) <= MAX_LABEL_CHARACTERS,
            f"at most {MAX_LABEL_CHARACTERS} characters long",
        )
    require(
        "priority",
        request.priority,
        is_int(request.priority, MIN_PRIORITY, MAX_PRIORITY),
        f"in [{MIN_PRIORITY}, {MAX_PRIORITY}]",
    )
    for name in ("queue_ttl_s", "ttft_target_s", "tpot_target_s"):
        target_s = getattr(request, name)
        if target_s is not None:
            is_met = is_number(target_s, 0.0, MAX_TARGET_S) and target_s > 0
            require(name, target_s, is_met, f"in (0, {MAX_TARGET_S:g}]")
    reads = request.reads_prefix_cache
    require("reads_prefix_cache", reads, type(reads) is bool, "a bool")


def _max_tokens(sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    room = max_model_len - num_prompt_tokens
    if sampling.max_tokens is None:
        return room
    require(
        "max_tokens",
        sampling.max_tokens,
        is_int(sampling.max_tokens, 1, room),
        f"in [1, {room}]: the prompt takes {num_prompt_tokens} tokens of the context limit of "
        f"{max_model_len}",
    )
    return sampling.max_tokens


def _fork(request: Request, choice: int) -> Request:
    """A further choice. It reports nothing of the prompt, and finds its pages computed."""
    return replace(
        request,
        request_id=choice_id(request.request_id, choice),
        sampling=replace(request.sampling, prompt_logprobs=False, prompt_top_logprobs=0),
        reads_prefix_cache=True,
    )


def _with_plain_top_k(request: Request) -> Request:
    """The device knows one word for "all tokens", 0; clients also say -1."""
    if request.sampling.top_k != -1:
        return request
    return replace(request, sampling=replace(request.sampling, top_k=0))
