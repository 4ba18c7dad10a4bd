"""A GenerateRequest made ready: for the engine, and for the reply to it."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..engine.refusals import InvalidRequest
from ..engine.request import Place, Request
from ..engine.sampling_checks import check_sampling
from ..models.stop_strings import StopMatcher, StopStrings
from . import octavo_pb2 as pb
from .choice_output import ChoiceOutput
from .conversion import engine_request, invalid_field, sampling_params, stop_strings
from .events import echo_deltas
from .guide_checks import GuideChecks
from .prompts import prompt_token_ids
from .request_sizes import check_sizes
from .served_model import ServedModel, StreamDecoder
from .truncation import truncated


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A request that passed every check but the engine's own.

    Attributes:
      request: What the engine gets.
      stop_strings: What ends its text; None for nothing.
      num_truncated: Prompt tokens that were cut off.
      sent: As it came.
      model: What it is for.
    """

    request: Request
    stop_strings: StopStrings | None
    num_truncated: int
    sent: pb.GenerateRequest
    model: ServedModel

    @property
    def num_prompt_logprobs(self) -> int:
        """How many the engine will bring: one for each prompt token but the first."""
        request = self.request
        return len(request.prompt_token_ids) - 1 if request.sampling.prompt_logprobs else 0

    def choice_output(self, choice: int) -> ChoiceOutput:
        """Where the output of one choice arrives."""
        sampling, matcher = self.request.sampling, None
        if self.stop_strings is not None:
            include_stop = self.sent.sampling.include_stop
            matcher = StopMatcher(self.stop_strings, include_stop=include_stop)
        return ChoiceOutput(
            choice,
            self._decoder(self.request.prompt_token_ids),
            matcher,
            min_tokens=sampling.min_tokens,
            num_top=sampling.top_logprobs,
        )

    def accepted(self, place: Place) -> pb.Accepted:
        """The first event, once the engine has taken the request."""
        return pb.Accepted(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_token_ids),
            num_queued=place.num_queued,
            predicted_wait_s=place.predicted_wait_s,
            truncated_tokens=self.num_truncated,
            fingerprint=self.model.fingerprint,
        )

    def echo(self) -> Iterable[pb.PromptDelta]:
        """The prompt, for those who want it back."""
        if not self.sent.response.echo:
            return ()
        return echo_deltas(self.request.prompt_token_ids, self._decoder(()))

    def _decoder(self, before: tuple[int, ...]) -> StreamDecoder:
        """Of what follows these ids."""
        return self.model.codec.stream_decoder(
            before, skip_special_tokens=skips_special_tokens(self.sent.response)
        )


async def prepare(
    sent: pb.GenerateRequest,
    model: ServedModel,
    guide_checks: GuideChecks,
    *,
    request_id: str,
    arrival_s: float,
    deadline_s: float | None,
) -> PreparedRequest:
    """Checks how to sample, then tokenises and truncates, and compiles the guide last.

    In the order of what they may cost: a text of a MiB takes seconds to tokenise.

    Args:
      sent: As it came.
      model: What it is for.
      guide_checks: Compile its guide.
      request_id: Its id, which may be one that the server made up.
      arrival_s: When it came, on the engine's clock.
      deadline_s: The deadline of its call, on the same clock.

    Raises:
      Refusal: It can never run, or its guide cannot be compiled now.
    """
    check_sizes(sent.sampling, model.vocab_size)
    stops = stop_strings(sent.sampling)
    sampling = sampling_params(sent.sampling, sent.response)
    try:
        check_sampling(sampling, model.vocab_size)
    except InvalidRequest as error:
        raise invalid_field(error, sent) from error
    token_ids = await prompt_token_ids(sent, model)
    kept = truncated(token_ids, sent, model.max_model_len)
    if sampling.guide is not None:
        await guide_checks.check(sampling.guide, model)
    request = engine_request(
        sent,
        request_id=request_id,
        prompt_token_ids=tuple(kept),
        sampling=sampling,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )
    return PreparedRequest(
        request=request,
        stop_strings=stops,
        num_truncated=len(token_ids) - len(kept),
        sent=sent,
        model=model,
    )


def skips_special_tokens(message: pb.ResponseOptions | pb.DetokenizeRequest) -> bool:
    """Whether control tokens are left out of the text; absence means that they are."""
    return message.skip_special_tokens if message.HasField("skip_special_tokens") else True
