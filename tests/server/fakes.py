"""A model without weights: bytes as tokens, and an engine that repeats the prompt.

Choice c begins c tokens further on, so that choices differ.

The checks at submit are the engine's own (engine.admission); time and steps are the test's.
"""

import codecs
import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.configs.engine_config import EngineConfig
from octavo.configs.scheduling_config import SchedulingConfig
from octavo.engine.admission import EngineLimits, admit
from octavo.engine.refusals import InvalidRequest, Overloaded
from octavo.engine.request import FinishReason, Load, Place, Request, RequestOutput, Timings
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.schedule import RequestState
from octavo.server.served_model import EngineClient, ServedModel

EOS = 256
VOCAB_SIZE = 258
MAX_MODEL_LEN = 4096

OnOutputs = Callable[[list[RequestOutput]], None]


class FakeEngine:
    """Each step brings every running request `tokens_per_step` more tokens of its own prompt."""

    def __init__(
        self,
        on_outputs: OnOutputs,
        *,
        max_num_seqs: int = 8,
        max_num_queued: int = 8,
        tokens_per_step: int = 1,
    ) -> None:
        self.submitted: list[Request] = []
        self.aborted: list[tuple[str, FinishReason]] = []
        self.aborted_choices: list[tuple[str, FinishReason, int]] = []
        self.errors: dict[str, str] = {}
        self.num_steps = 0
        self.failed = False
        self.progress_s = 0.0
        self.is_stopped = False
        self._on_outputs = on_outputs
        self._tokens_per_step = tokens_per_step
        self._config = EngineConfig(
            max_num_seqs=max_num_seqs, scheduling=SchedulingConfig(max_num_queued=max_num_queued)
        )
        self._limits = EngineLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_pages=1024,
            eos_token_ids=(EOS,),
        )
        self._live: dict[str, list[RequestState]] = {}  # the choices that have not ended
        self._ending: dict[tuple[str, int], FinishReason] = {}
        self._lock = threading.Lock()
        self.hangs = False  # in a step, so that it never ends
        self.is_paused = False
        self.refusal: Overloaded | None = None  # what `submit` raises

    def submit(self, request: Request) -> Place:
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            state = admit(request, self._config, self._limits)
            self._check_room(request.request_id)
            num_queued = max(0, len(self._live) - self._config.max_num_seqs)
            self._live[request.request_id] = [state, *state.forks]
            self.submitted.append(request)
        return Place(num_queued=num_queued, predicted_wait_s=0.5 * num_queued)

    def _check_room(self, request_id: str) -> None:
        """Stands in for the admission ledger, which needs a pace to go by."""
        if request_id in self._live:
            raise InvalidRequest("request_id", request_id, "another one")
        max_num_queued = self._config.scheduling.max_num_queued
        if len(self._live) >= self._config.max_num_seqs + max_num_queued:
            raise Overloaded(f"{len(self._live)} requests are live", "max_num_queued", 1.0)

    def submit_text(self, text: str, *, arrival_s: float) -> None:
        self.submit(
            Request(
                request_id=text,
                prompt_token_ids=tuple(text.encode()),
                sampling=SamplingParams(),
                arrival_s=arrival_s,
            )
        )

    def abort(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None:
        with self._lock:
            if choice is None:
                self.aborted.append((request_id, reason))
            else:
                self.aborted_choices.append((request_id, reason, choice))
            for state in self._live.get(request_id, []):
                if choice in (None, state.choice):
                    self._ending[request_id, state.choice] = reason

    def abort_all(self, reason: FinishReason) -> None:
        for request_id in list(self._live):
            self.abort(request_id, reason)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def load(self) -> Load:
        num_running = min(len(self._live), self._config.max_num_seqs)
        return Load(
            num_running=num_running,
            num_queued=len(self._live) - num_running,
            num_usable_pages=1023,
            num_free_pages=1023 - len(self._live),
            steps_total=self.num_steps,
            preemptions_total=0,
            prompt_tokens_total=sum(len(request.prompt_token_ids) for request in self.submitted),
            output_tokens_total=0,
            finished_total={FinishReason.STOP: 2},
            num_cached_pages=11,
            num_host_pages=12,
            queued_tokens=13,
            cached_tokens_total=14,
            evicted_pages_total={"capacity": 15},
            evicted_age_s_total={"capacity": 20.5},
            exported_pages_total=16,
            imported_pages_total=17,
            predicted_wait_s=18.5,
            refused_total={"max_num_queued": 19},
            progress_s=self.progress_s,
            is_paused=self.is_paused,
            failed=self.failed,
        )

    def stop(self) -> None:
        self.is_stopped = True

    def join(self, timeout_s: float) -> bool:
        return self.is_stopped and not self.hangs

    def step(self, num_steps: int = 1) -> None:
        """Paused, it only lets go what was aborted."""
        for _ in range(num_steps):
            self.num_steps += 1
            with self._lock:
                requests = list(self._live.values())
                outputs = [
                    self._advance(
                        state, is_running=index < self._config.max_num_seqs and not self.is_paused
                    )
                    for index, states in enumerate(requests)
                    for state in list(states)
                ]
                outputs = [output for output in outputs if output is not None]
            if outputs:
                self._on_outputs(outputs)

    def _advance(self, state: RequestState, *, is_running: bool) -> RequestOutput | None:
        request, sampling = state.request, state.request.sampling
        ending = self._ending.pop((state.reply_to, state.choice), None)
        if ending is not None or self._error(state) is not None:
            return self._end(state, _output(state, 0), ending or FinishReason.ERROR)
        if not is_running:
            return None
        num_new = 0
        reason = None
        is_first = not state.output_token_ids
        while num_new < self._tokens_per_step and reason is None:
            prompt = request.prompt_token_ids
            token_id = prompt[(len(state.output_token_ids) + state.choice) % len(prompt)]
            state.output_token_ids.append(token_id)
            num_new += 1
            if token_id in state.stop_ids:
                reason = FinishReason.STOP
            elif len(state.output_token_ids) >= state.max_tokens:
                reason = FinishReason.LENGTH
        output = _output(state, num_new)
        if sampling.prompt_logprobs and is_first:
            output = output._replace(**_of_the_prompt(state))
        return output if reason is None else self._end(state, output, reason)

    def _error(self, state: RequestState) -> str | None:
        """By the request's id, or that of the engine for one choice."""
        return self.errors.get(state.reply_to) or self.errors.get(state.request.request_id)

    def _end(
        self, state: RequestState, output: RequestOutput, reason: FinishReason
    ) -> RequestOutput:
        states = self._live[state.reply_to]
        states.remove(state)
        if not states:
            del self._live[state.reply_to]
        arrival_s = state.request.arrival_s
        is_stop_id = reason is FinishReason.STOP and output.token_ids
        return output._replace(
            finish_reason=reason,
            stop_token_id=output.token_ids[-1] if is_stop_id else None,
            error=self._error(state),
            num_cached_tokens=2 if state.choice == 0 else 4,
            num_preemptions=3,
            timings=Timings(
                arrival_s=arrival_s,
                admitted_s=arrival_s + 0.25 + state.choice,
                first_token_s=arrival_s + 0.5 + state.choice if state.output_token_ids else None,
                finished_s=arrival_s + 1 + state.choice,
            ),
        )


def _output(state: RequestState, num_new: int) -> RequestOutput:
    """The newest tokens. Log-probabilities are minus the position, so that a lost one shows."""
    sampling, end = state.request.sampling, len(state.output_token_ids)
    positions = range(end - num_new, end)
    tops = [top for position in positions for top in _tops(position, sampling.top_logprobs)]
    return RequestOutput(
        request_id=state.reply_to,
        choice=state.choice,
        token_ids=tuple(state.output_token_ids[end - num_new :]),
        logprobs=tuple(map(_logprob, positions)) if sampling.logprobs else (),
        top_token_ids=tuple(token_id for token_id, _ in tops),
        top_logprobs=tuple(logprob for _, logprob in tops),
    )


def _of_the_prompt(state: RequestState) -> dict[str, tuple[Any, ...]]:
    sampling = state.request.sampling
    positions = range(1, len(state.request.prompt_token_ids))
    tops = [top for position in positions for top in _tops(position, sampling.prompt_top_logprobs)]
    return {
        "prompt_logprobs": tuple(map(_logprob, positions)),
        "prompt_top_token_ids": tuple(token_id for token_id, _ in tops),
        "prompt_top_logprobs": tuple(logprob for _, logprob in tops),
    }


def _logprob(position: int) -> float:
    return -float(position)


def _tops(position: int, num_top: int) -> list[tuple[int, float]]:
    """Ids and numbers that say where they belong."""
    return [((position + rank) % VOCAB_SIZE, -position - rank / 32) for rank in range(num_top)]


class ByteCodec:
    """Ids 0 to 255 are bytes, 256 ends a text, 257 starts one; "<257>" can be no text."""

    has_chat_template = True

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[int]:
        if "<257>" in text:
            raise ValueError("text holds '<257>', which can only be a control token")
        ids = [*([257] if add_special_tokens else [])]
        for part in re.split("(<256>)", text) if parse_special_tokens else [text]:
            ids += [EOS] if parse_special_tokens and part == "<256>" else part.encode()
        return ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        for index, (role, _) in enumerate(messages):
            if role == "tool":
                raise ValueError("chat template: there are no tools")
            if role not in ("system", "user", "assistant"):
                raise ValueError(f"messages[{index}].role is {role!r}; it must be another one")
        return list("".join(f"<{role}>{content}" for role, content in messages).encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        decoder = self.stream_decoder((), skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def stream_decoder(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> "ByteDecoder":
        return ByteDecoder(skip_special_tokens)


@dataclass
class ByteDecoder:
    skip_special_tokens: bool
    utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._one, token_ids))

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)

    def _one(self, token_id: int) -> str:
        if token_id < 256:
            return self.utf8.decode(bytes([token_id]))
        return "" if self.skip_special_tokens else f"<{token_id}>"


def served(engine: EngineClient, **facts: Any) -> ServedModel:
    model = ServedModel(
        name="fake",
        engine=engine,
        codec=ByteCodec(),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        dtype="float32",
        device="cpu",
        max_num_seqs=8,
        num_pages=1024,
        page_size=16,
        num_executables=1,
        compile_s=0.0,
        compile_events_since_ready=lambda: 0,
    )
    return dataclasses.replace(model, **facts)
