"""200 JSON schemas with the real model at temperature 1: they end, and what ends validates.

What would break this: a mask that comes to the wrong row or a token late, a guide that lets the
wrong ids through, a schema under which a small model goes on for ever.
"""

import datetime
import json
import time
from collections import Counter

import jsonschema
import pytest

from octavo.configs.engine_config import EngineConfig
from octavo.engine.compilation import compile_events
from octavo.engine.guides import Guides
from octavo.engine.request import FinishReason
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.chat_template import render_chat
from octavo.models.tokenizer import load_tokenizer

from .conftest import Model
from .fakes import add_request, finish, request
from .json_schemas import CASES

LEAST_STOPPED = 190
SCHEMA_CHARACTERS = 300
"""Of the schema, in the prompt: most prompts take several prefill chunks then."""
NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)


@pytest.mark.full
@pytest.mark.usefixtures("types_unchecked")
def test_outputs_end_and_validate(default_model: Model):
    checkpoint = default_model.checkpoint
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    eos = checkpoint.eos_token_ids
    assert tokenizer.eos_token_ids <= eos
    guides = Guides(tokenizer, vocab_size=checkpoint.config.vocab_size, eos_token_ids=eos)
    config = EngineConfig(
        dtype="bfloat16", max_num_seqs=32, prefill_chunk_tokens=64, num_pages=1200
    )
    engine = default_model.build(config, guides)
    template = tokenizer.chat_template
    assert template is not None
    events = compile_events()
    for number, case in enumerate(CASES):
        schema = json.dumps(case.schema, ensure_ascii=False)
        message = {
            "role": "user",
            "content": f"{case.prompt} Answer with JSON and nothing else. "
            f"The JSON schema begins: {schema[:SCHEMA_CHARACTERS]}",
        }
        add_request(
            engine,
            request(
                str(number),
                render_chat(
                    template, [message], tokenizer=tokenizer, add_generation_prompt=True, now=NOW
                ),
                arrival_s=time.monotonic(),
                max_tokens=512,
                temperature=1.0,
                seed=number,
                ignore_eos=False,
                guide=Guide(kind=GuideKind.JSON_SCHEMA, text=schema),
            ),
        )
    answers = finish(engine)
    assert compile_events() == events
    unended: list[str] = []
    for number, case in enumerate(CASES):
        answer = answers[str(number)]
        output = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        if answer.finish_reason is not FinishReason.STOP:
            unended.append(f"{case.prompt} {answer.finish_reason}, {answer.error}: {output[-80:]}")
            continue
        assert answer.stop_token_id in eos
        jsonschema.Draft202012Validator(case.schema).validate(json.loads(output))
    print(Counter(str(answer.finish_reason) for answer in answers.values()))
    print(f"{sum(len(answer.token_ids) for answer in answers.values())} tokens")
    print(*unended, sep="\n")
    assert len(CASES) - len(unended) >= LEAST_STOPPED, "\n".join(unended)
