"""The 200 schemas without a model: whatever ids come, if the masks let them, the JSON validates."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from octavo.engine.guides import Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.models.tokenizer import Tokenizer, load_tokenizer

from .json_schemas import CASES

MAX_TOKENS = 256
NUM_WALKS = 2


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


def test_there_are_200_and_all_differ():
    assert len(CASES) == 200
    assert len({json.dumps(case.schema) for case in CASES}) == 200
    assert len({case.prompt for case in CASES}) == 200
    for case in CASES:
        jsonschema.Draft202012Validator.check_schema(case.schema)


@pytest.mark.usefixtures("types_unchecked")
def test_random_outputs_end_and_validate(tokenizer: Tokenizer):
    """Fails if a mask lets through what the schema does not, or if a schema is refused."""
    eos = tokenizer.eos_token_ids
    guides = Guides(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=eos)
    num_ended = 0
    for case in CASES:
        guide = Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(case.schema, ensure_ascii=False))
        for seed in range(NUM_WALKS):
            rng, state = random.Random(seed), guides.start(guide)
            token_ids: list[int] = []
            while len(token_ids) < MAX_TOKENS and not eos.intersection(token_ids[-1:]):
                bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
                token_ids.append(rng.choice(np.flatnonzero(bits).tolist()))
                state.take(token_ids[-1])
            if token_ids[-1] in eos:
                num_ended += 1
                output = tokenizer.decode(token_ids, skip_special_tokens=True)
                jsonschema.Draft202012Validator(case.schema).validate(json.loads(output))
    assert num_ended >= 0.99 * NUM_WALKS * len(CASES)
