"""Reply: a slow reader gets, in fewer and longer deltas, all that one gets who reads at the end."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import grpc
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.request import FinishReason, RequestOutput
from octavo.server import octavo_pb2 as pb
from octavo.server.choice_output import ChoiceEnd, ChoiceOutput
from octavo.server.reply import Reply
from octavo.server.request_stream import Failure, FailureKind, RequestStream

from .choice_cases import Case, Seen, cases, expected, step

PROMPT_LOGPROBS = tuple(-float(i) for i in range(7))
SHUTDOWN = Failure(FailureKind.SHUTTING_DOWN, "bye")


class Reader:
    """A client that takes an event each time that it is told to."""

    def __init__(self) -> None:
        self.events: list[pb.GenerateEvent] = []
        self._num_wanted = 0.0
        self._wants = asyncio.Event()

    def read(self, number: float) -> None:
        self._num_wanted += number
        self._wants.set()

    async def write(self, message: pb.GenerateEvent) -> None:
        while self._num_wanted < 1:
            self._wants.clear()
            await self._wants.wait()
        self._num_wanted -= 1
        self.events.append(message)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise AssertionError(status)

    def time_remaining(self) -> float | None:
        return None


@dataclass
class Answer:
    """All that the events of one reply say, joined."""

    prompt_logprobs: list[float]
    choices: list[Seen]
    end: pb.GenerateEvent  # the terminal one, without its number


def answer(events: list[pb.GenerateEvent], num_choices: int) -> Answer:
    """Raises if events are out of order, or a usage is not that of all deltas so far."""
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[0].HasField("accepted")
    prompt, num_tokens = list[float](), 0
    choices = [Seen([], [], [], [], "", None) for _ in range(num_choices)]
    for event in events[1:-1]:
        match event.WhichOneof("event"):
            case "prompt_delta":
                assert not num_tokens, "output before all of the prompt"
                prompt += event.prompt_delta.logprobs
            case "token_delta":
                delta = event.token_delta
                choice = choices[delta.index]
                assert choice.end is None, "output after the end"
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs
                choice.top_token_ids += [i for top in delta.top_logprobs for i in top.token_ids]
                choice.top_logprobs += [p for top in delta.top_logprobs for p in top.logprobs]
                choice.text += delta.text.decode()  # whole characters only
                num_tokens += len(delta.token_ids)
                assert delta.usage == pb.Usage(prompt_tokens=8, completion_tokens=num_tokens)
            case kind:
                assert kind == "finished"
                end = event.finished
                assert choices[end.index].end is None
                name = pb.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_")
                stop = end.stop if end.WhichOneof("matched") else None
                choices[end.index].end = ChoiceEnd(reason=FinishReason[name], stop=stop)
    end_ = pb.GenerateEvent()
    end_.CopyFrom(events[-1])
    end_.ClearField("seq")
    if end_.HasField("completed"):
        assert end_.completed.usage == pb.Usage(prompt_tokens=8, completion_tokens=num_tokens)
    return Answer(prompt, choices, end_)


def no_abort(reason: FinishReason, choice: int | None) -> None:
    """The engine goes on."""


async def play(
    choices: Sequence[Case],
    schedule: Sequence[tuple[int, int, int]],
    *,
    prompt_comes_at: int,
    fails: bool,
) -> Answer:
    """What a reader gets.

    Args:
      choices: What the engine makes.
      schedule: (choice, tokens that come, events that are read before what comes next).
      prompt_comes_at: In which step of choice 0 the prompt's log-probabilities are.
      fails: The server gives up when all tokens have come.
    """
    reader, stream = Reader(), RequestStream()

    def make_choice(index: int) -> ChoiceOutput:
        return choices[index].output(index)

    stream.begin(len(choices), make_choice, no_abort, num_prompt_logprobs=len(PROMPT_LOGPROBS))
    accepted = pb.Accepted(request_id="a", prompt_tokens=8)
    reply = asyncio.create_task(Reply(reader, stream, accepted, continuous_usage=True).send())
    starts = [0] * len(choices)

    def push(index: int, count: int, reason: FinishReason | None = None) -> None:
        end = min(starts[index] + count, len(choices[index].tokens))
        stream.push(step(starts[index], end, reason, choice=index))
        starts[index] = end

    for number, (choice, count, num_reads) in enumerate([*schedule, (0, 0, 0)]):
        if number == min(prompt_comes_at, len(schedule)):
            stream.push(RequestOutput("a", prompt_logprobs=PROMPT_LOGPROBS))
        push(choice % len(choices), count)
        reader.read(num_reads)
        for _ in range(3 * num_reads):
            await asyncio.sleep(0)
    for index, case in enumerate(choices):
        push(index, len(case.tokens), None if fails else case.reason)
    if fails:
        stream.fail(SHUTDOWN)
    reader.read(math.inf)
    await asyncio.wait_for(reply, 5)
    return answer(reader.events, len(choices))


STEPS = st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 4))
OWN_ENDS = st.sampled_from([FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE])


@given(
    st.lists(st.tuples(cases(), OWN_ENDS), min_size=1, max_size=3),
    st.lists(STEPS, max_size=20),
    st.integers(0, 20),
    st.booleans(),
)
def test_a_slow_reader_gets_what_an_unhurried_one_does(
    ends: list[tuple[Case, FinishReason]],
    schedule: list[tuple[int, int, int]],
    prompt_comes_at: int,
    fails: bool,
) -> None:
    """Cases 2.1, 2.3 and 6.3: text, ids, log-probabilities, ends and usage, all of each.

    Breaks if a merge of deltas loses, repeats or moves anything, if a part of a stop string leaves
    because somebody reads in between, or if held text is lost when the server gives up.
    """
    choices = [replace(case, reason=None if fails else reason) for case, reason in ends]

    async def scenario() -> None:
        unstreamed = await play(choices, [], prompt_comes_at=0, fails=fails)
        assert unstreamed.choices == [expected(case) for case in choices]
        assert unstreamed.prompt_logprobs == list(PROMPT_LOGPROBS)
        slow = await play(choices, schedule, prompt_comes_at=prompt_comes_at, fails=fails)
        assert slow == unstreamed

    asyncio.run(scenario())
