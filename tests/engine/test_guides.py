"""Guides through llguidance: what is refused, what may come, where it ends, for any tokenizer."""

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.engine.guide_failures import MAX_REASON_CHARACTERS
from octavo.engine.guide_state import LLGuideState
from octavo.engine.guided_masks import GuideError
from octavo.engine.guides import MAX_KEPT, Guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.engine.token_masks import Mask, num_words
from octavo.models.tokenizer import Tokenizer, load_tokenizer

EOS_IDS = frozenset({0, 2})  # the real tokenizer's, and another control token


@pytest.fixture(scope="module")
def tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    """Of a model with more ids than the tokenizer has."""
    return Guides(tokenizer, vocab_size=tokenizer.vocab_size + 77, eos_token_ids=EOS_IDS)


def schema(value: Any) -> Guide:
    return Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(value))


def ids_of(mask: Mask) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(guides: Guides, guide: Guide, seed: int, most: int = 400) -> tuple[list[int], bool]:
    """A random output that the guide lets through, and whether it ended."""
    rng, state = random.Random(seed), guides.start(guide)
    token_ids: list[int] = []
    for _ in range(most):
        token_id = rng.choice(ids_of(state.mask()))
        if token_id in EOS_IDS:
            return token_ids, True
        state.take(token_id)
        token_ids.append(token_id)
    return token_ids, False


def take_all(state: LLGuideState, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        state.take(token_id)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "größe": {"enum": ["klein", "groß", "größer", "日本"]},
        "tags": {
            "type": "array",
            "items": {"type": "integer", "minimum": 3, "maximum": 40},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "größe", "tags"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    jsonschema.Draft202012Validator(PERSON).validate(json.loads(text))
    return True


CODE = r"[a-c]{2,5}-\d\d"

CASES: list[tuple[Guide, Callable[[str], Any]]] = [
    (schema(PERSON), is_person),
    (Guide(kind=GuideKind.REGEX, text=CODE), re.compile(CODE).fullmatch),
    (
        Guide(kind=GuideKind.CHOICE, text=json.dumps(["yes", "no", 'per"haps\n', "日本語", "ye"])),
        ["yes", "no", 'per"haps\n', "日本語", "ye"].__contains__,
    ),
    (
        Guide(kind=GuideKind.GRAMMAR, text='start: "(" start ")" | "x"{1,3}'),
        lambda text: re.fullmatch(r"(\(*)x{1,3}(\)*)", text) and text.count("(") == text.count(")"),
    ),
]


@pytest.mark.parametrize(
    ("guide", "is_right"), CASES, ids=lambda case: str(getattr(case, "kind", ""))
)
def test_what_comes_through_is_what_was_asked_for(
    guides: Guides, tokenizer: Tokenizer, guide: Guide, is_right: Callable[[str], Any]
):
    """Fails if a mask lets an id through that breaks the guide, or if an output ends too early."""
    num_ended = 0
    for seed in range(12):
        token_ids, has_ended = walk(guides, guide, seed)
        if has_ended:
            num_ended += 1
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
            assert is_right(text), text
    assert num_ended >= 10


def test_any_json_object(guides: Guides, tokenizer: Tokenizer):
    """Not one that ends at random: what has come so far can always be ended."""
    guide, found = Guide(kind=GuideKind.JSON_OBJECT), 0
    for seed in range(10):
        token_ids, has_ended = walk(guides, guide, seed, most=60)
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        assert text.startswith("{")
        if has_ended:
            assert isinstance(json.loads(text), dict)
            found += 1
    assert found


def test_json_is_written_in_one_way(guides: Guides, tokenizer: Tokenizer):
    """Else a model could go on with white space for ever."""
    text = '{"name": "a", "größe": "klein", "tags": [3, 4]}'
    take_all(guides.start(schema(PERSON)), tokenizer.encode(text, add_special_tokens=False))
    for text in ('{ "name": "a"', '{"name" : "a"', '{"name":  "a"', '{\n"name"'):
        state = guides.start(schema(PERSON))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        with pytest.raises(GuideError, match="does not follow"):
            take_all(state, token_ids)


def test_an_output_ends_with_any_of_the_models_end_ids_and_only_where_it_may(guides: Guides):
    state = guides.start(Guide(kind=GuideKind.CHOICE, text='["a", "ab"]'))
    assert not EOS_IDS & set(ids_of(state.mask()))
    (a,) = [i for i in ids_of(state.mask()) if guides._tokenizer.token_bytes(i) == b"a"]
    state.take(a)
    assert set(ids_of(state.mask())) > EOS_IDS
    state = guides.start(Guide(kind=GuideKind.CHOICE, text='["a"]'))
    state.take(a)
    assert set(ids_of(state.mask())) == EOS_IDS, "nothing but an end may come"


def test_text_never_becomes_a_control_token(guides: Guides, tokenizer: Tokenizer):
    """A guide that lets any characters through lets none of their spellings through as one id."""
    state = guides.start(Guide(kind=GuideKind.REGEX, text=r"(.|\n){0,60}"))
    special = tokenizer.special_token_ids
    assert set(ids_of(state.mask())) & special == EOS_IDS
    for token_id in tokenizer.encode("<|im_start|>", add_special_tokens=False):
        assert token_id not in special
        state.take(token_id)  # as characters they are text like any other
    assert set(ids_of(state.mask())) & special == EOS_IDS


def test_ids_that_the_tokenizer_does_not_have_never_come(guides: Guides, tokenizer: Tokenizer):
    mask = guides.start(Guide(kind=GuideKind.REGEX, text=r"(.|\n)*")).mask()
    assert mask.shape == (num_words(tokenizer.vocab_size + 77),)
    assert max(ids_of(mask)) < tokenizer.vocab_size


def test_outputs_do_not_share_a_state(guides: Guides):
    guide = Guide(kind=GuideKind.REGEX, text="ab|cd")
    one, other = guides.start(guide), guides.start(guide)
    before = other.mask()
    one.take(next(i for i in ids_of(one.mask()) if guides._tokenizer.token_bytes(i) == b"a"))
    np.testing.assert_array_equal(other.mask(), before)
    assert (one.mask() != before).any()
    np.testing.assert_array_equal(guides.start(guide).mask(), before)


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(kind=GuideKind.JSON_SCHEMA, text="{"), "cannot be read as JSON"),
        (Guide(kind=GuideKind.JSON_SCHEMA, text="[" * 50_000), "cannot be read as JSON"),
        (Guide(kind=GuideKind.JSON_SCHEMA, text="[]"), "must be a JSON object"),
        (
            Guide(kind=GuideKind.JSON_SCHEMA, text='{"items":' * 800 + "{}" + "}" * 800),
            "in one another",
        ),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "string", "format": "zodiac"}), "zodiac"),
        (schema({"$ref": "#/nowhere"}), "nowhere"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (schema({"type": "object", "x-guidance": {"lenient": True}, "not": {}}), "x-guidance"),
        (schema({"type": "string", "format": "unknown"}), "unknown"),  # llguidance takes it as any
        (schema({"type": "string", "nullable": True}), "nullable"),  # llguidance ignores it
        (schema({"type": "integer", "maximum": 1e999}), "Infinity"),
        (Guide(kind=GuideKind.JSON_SCHEMA, text='{"maximum": 1e999}'), "beyond 2**53"),
        (schema({"oneOf": [{"type": "string"}, {"maxLength": 2}]}), "oneOf"),
        (schema({"$ref": "#"}), "what # requires never ends"),
        (schema({"const": "a\x01"}), "control character"),
        (Guide(kind=GuideKind.REGEX, text="("), "unclosed group"),
        (Guide(kind=GuideKind.REGEX, text="(?=x)y"), "look-around"),
        (Guide(kind=GuideKind.GRAMMAR, text="start: nowhere"), "nowhere"),
        (Guide(kind=GuideKind.GRAMMAR, text=""), "Empty grammar"),
        (Guide(kind=GuideKind.GRAMMAR, text='start: <|im_end|> "a"'), "no token"),
        (
            Guide(kind=GuideKind.GRAMMAR, text='{"grammars": [{"json_schema": {}}]}'),
            "expecting rule",
        ),
        (Guide(kind=GuideKind.GRAMMAR, text='start: %json {"not": {}}'), "'not'"),
        (Guide(kind=GuideKind.CHOICE, text='["\\ud800"]'), "lone surrogate"),
        (Guide(kind=GuideKind.CHOICE, text="[]"), "0 texts; they must be 1 to 1000"),
        (Guide(kind=GuideKind.CHOICE, text="[1]"), "must be a text"),
        (Guide(kind=GuideKind.CHOICE, text='{"a": 1}'), "must be an array"),
        (
            Guide(kind=GuideKind.CHOICE, text=json.dumps(["a"] * 1001)),
            "1001 texts; they must be 1 to 1000",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_its_reason(
    guides: Guides, guide: Guide, reason: str
):
    """And nothing is ignored in silence."""
    for _ in range(2):  # not kept either
        with pytest.raises(ValueError, match=re.escape(reason)) as refused:
            guides.check(guide)
        assert len(str(refused.value)) <= MAX_REASON_CHARACTERS + 100


def test_a_long_text_that_alone_may_come_is_cut_as_by_the_tokenizer(
    guides: Guides, tokenizer: Tokenizer
):
    """Though guides only look at its start each time."""
    text = "Lorem ipsum dolor sit amet, 20 größere Dinge. 日本語のテキスト。 " * 40
    token_ids, has_ended = walk(
        guides, Guide(kind=GuideKind.CHOICE, text=json.dumps([text])), seed=0, most=3000
    )
    assert has_ended
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("vocab_size", "eos"), [(10, []), (10, [10]), (10, [-1])])
def test_a_model_whose_outputs_cannot_end_has_no_guides(
    tokenizer: Tokenizer, vocab_size: int, eos: list[int]
):
    with pytest.raises(ValueError, match="at least one"):
        Guides(tokenizer, vocab_size=vocab_size, eos_token_ids=frozenset(eos))


def test_a_model_may_have_fewer_ids_than_its_tokenizer(tokenizer: Tokenizer):
    guides = Guides(tokenizer, vocab_size=1000, eos_token_ids=frozenset({2}))
    token_ids, has_ended = walk(guides, Guide(kind=GuideKind.REGEX, text="[a-z]{30}"), seed=0)
    assert has_ended
    assert max(token_ids) < 1000
    assert max(ids_of(guides.start(Guide(kind=GuideKind.REGEX, text=".*")).mask())) < 1000


def test_a_name_that_is_taken_cannot_come_spelled_in_another_way(
    guides: Guides, tokenizer: Tokenizer
):
    """Else the last of two, which need not be what the schema says, is what a reader gets."""
    guide = schema({"properties": {"a": {"type": "null"}}, "type": "object"})
    for text in ('{"\\u0061": 1}', '{"a": 1}', '{"a": null, "a": 1}'):
        state = guides.start(guide)
        with pytest.raises(GuideError, match="does not follow"):
            take_all(state, tokenizer.encode(text, add_special_tokens=False))


def test_an_output_may_not_end_early_nor_go_on_after_its_end(guides: Guides):
    guide = Guide(kind=GuideKind.CHOICE, text='["a"]')
    (a,) = ids_of(guides.start(guide).mask())
    state = guides.start(guide)
    with pytest.raises(GuideError, match="does not follow"):
        state.take(2)
    state = guides.start(guide)
    assert not state.is_finished
    state.take(a)
    assert state.is_finished
    state.take(2)
    assert state.is_finished
    with pytest.raises(GuideError, match="does not follow"):
        state.take(a)


@pytest.mark.parametrize("token_id", [-1, 10**6, 10**12])
def test_what_is_no_id_does_not_follow(guides: Guides, token_id: int):
    with pytest.raises(GuideError, match="does not follow"):
        guides.start(Guide(kind=GuideKind.REGEX, text=".*")).take(token_id)


def test_a_guide_that_grew_to_its_limit_is_compiled_anew(guides: Guides):
    """Copies share what is found out about a guide: fails if the next request meets its limit."""
    guide = Guide(kind=GuideKind.REGEX, text="(?s:.*)a(?s:.{60})c(?s:.*)")
    seeds = itertools.count()
    with pytest.raises(GuideError, match="too many"):
        all(walk(guides, guide, seed) for seed in seeds)
    assert next(seeds) < 100
    assert (guide.kind, guide.text) not in guides._compiled
    assert guides.start(guide).mask().any()


def test_guides_are_made_in_several_threads_at_once(tokenizer: Tokenizer):
    guides = Guides(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=EOS_IDS)
    with ThreadPoolExecutor(4) as threads:
        outputs = [threads.submit(walk, guides, schema(PERSON), seed) for seed in range(12)]
    for seed, output in enumerate(outputs):
        assert output.result() == walk(guides, schema(PERSON), seed)


DEEP: dict[str, Any] = {"type": "object", "properties": {}}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


@pytest.mark.parametrize(
    "guide",
    [
        Guide(kind=GuideKind.REGEX, text="(a{1,1000}){1,1000}b"),
        Guide(kind=GuideKind.REGEX, text="(.*a){60}"),
        Guide(kind=GuideKind.REGEX, text="(a|b|ab)*" * 200),
        Guide(kind=GuideKind.REGEX, text="|".join(f"x{i}y*" for i in range(20_000))),
        Guide(kind=GuideKind.GRAMMAR, text='start: a\na: a a | a a a | "x"'),
        schema({"enum": [f"value {i}" for i in range(10_000)]}),
        schema(DEEP),
        # What follows ended the process, or took minutes.
        schema(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5_000)}
                | {"d5000": {"type": "null"}},
            }
        ),
        Guide(
            kind=GuideKind.GRAMMAR,
            text="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9_000)) + 'r9000: "a"',
        ),
        Guide(
            kind=GuideKind.GRAMMAR,
            text="start: A\nA: "
            + " & ".join(f"/(?s:.*){a}(?s:.{{20}}){a}(?s:.*)/" for a in "abcdefgh"),
        ),
        schema(
            {"type": "array", "maxItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}
        ),
    ],
    ids=range(11),
)
def test_a_monstrous_guide_costs_little(guides: Guides, guide: Guide):
    """It is refused, or fails as it goes on, or works: in seconds, and the process lives on."""
    started_s = time.monotonic()
    with suppress(ValueError, GuideError):
        guides.check(guide)
        walk(guides, guide, seed=1, most=30)
    assert time.monotonic() - started_s < 20


ENDLESS = [
    "start: /a+/ /a+/",
    "start: /a+/ /a+/  // a comment",
    'start: "a" r\nr: /(ab)+/ /(ab)+/ "c"',
    'start: /é+/ /é+/ %json {"const": 1}',
    '%llguidance {"no_forcing": false}\nstart: /a+/{2}',
]


def test_a_grammar_that_nothing_ends_holds_nobody_up():
    """Where a lexeme takes what the next one needs, outputs go on and never end.

    In a process of its own: what would break it holds the GIL for good.
    """
    code = f"""
from tests.engine.byte_guides import END_ID, byte_guides
from octavo.engine.sampling_params import Guide, GuideKind
from octavo.engine.token_masks import has_id
for text in {ENDLESS!r}:
    state = byte_guides().start(Guide(kind=GuideKind.GRAMMAR, text=text))
    for token_id in "éé".encode() if "é" in text else b"aabab" if "b" in text else b"aaaa":
        assert has_id(state.mask(), token_id)
        state.take(token_id)
    assert not has_id(state.mask(), END_ID)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compiled_guides_are_kept_and_not_for_ever(guides: Guides):
    first = Guide(kind=GuideKind.REGEX, text="first")
    guides.check(first)
    kept = guides._compiled[first.kind, first.text]
    guides.check(first)
    assert guides._compiled[first.kind, first.text] is kept
    for number in range(MAX_KEPT):
        guides.check(Guide(kind=GuideKind.REGEX, text=f"n{number}"))
    assert len(guides._compiled) == MAX_KEPT
    assert (first.kind, first.text) not in guides._compiled


def test_an_id_that_does_not_follow_is_an_error_and_stays_one(guides: Guides):
    state = guides.start(Guide(kind=GuideKind.REGEX, text="a"))
    with pytest.raises(GuideError, match="does not follow"):
        state.take(7)
    with pytest.raises(GuideError):
        state.mask()
