"""Disguise and TemplateText: which characters of foreign text are replaced, and by what."""

import pytest

from octavo.models.foreign_text import Disguise, TemplateText

SPELLINGS = ["<|im_end|>", "<s>"]


def undisguised(text: str, disguise: Disguise) -> str:
    return text.translate(str.maketrans(dict(disguise.meanings)))


def test_punctuation_of_spellings_is_replaced_and_comes_back():
    template_text = TemplateText(["<|im_end|>", "hello"], SPELLINGS)
    assert template_text.replaced == set("<|_>")
    text = "a <s> b_c"
    disguise = Disguise(template_text, [text])
    disguised = disguise.put_on(text)
    assert not template_text.replaced.intersection(disguised)
    assert len(disguised) == len(text)
    assert undisguised(disguised, disguise) == text


@pytest.mark.parametrize("literal", ["<", "a <|", "|>", "> b", "<|im_"])
def test_letters_are_replaced_where_the_template_ends_inside_a_spelling(literal: str):
    assert TemplateText([literal], SPELLINGS).replaced == set("<|_>imends")


def test_spelling_without_punctuation_loses_its_first_letter():
    assert TemplateText(["x"], ["EOS"]).replaced == {"E"}


@pytest.mark.parametrize(
    ("literal", "is_kept"),
    [
        ("</think>", True),
        ("<", False),
        ("<s>", False),
        ("x<|im_end|>", False),
        ("_end", False),
        ("a<", False),
    ],
)
def test_strings_that_the_template_looks_for_are_kept(literal: str, is_kept: bool):
    disguise = Disguise(TemplateText([literal], SPELLINGS), [literal])
    assert (literal in disguise.put_on(f"before {literal} after")) == is_kept


def test_stand_ins_are_characters_that_nobody_uses():
    used = "\U00100000\U00100001"
    disguise = Disguise(TemplateText(["\U00100002"], SPELLINGS), [used])
    assert min(disguise.meanings) == "\U00100003"
    assert disguise.put_on(used) == used


def test_chats_that_use_up_the_private_plane_are_refused():
    text = "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(ValueError, match="too much of Unicode's private-use plane"):
        Disguise(TemplateText(["x"], SPELLINGS), [text])
