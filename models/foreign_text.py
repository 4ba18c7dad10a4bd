"""Foreign text in a chat template: it must never become part of a control token's spelling.

A template mixes its own markup with text from outside. Before rendering, the characters that
control tokens are spelled with are replaced in all foreign text by stand-ins: private-use
characters that occur nowhere in the chat. Control tokens are looked for while the stand-ins are
still there, so none is found that foreign text had a hand in. Then the characters come back and
ordinary text is encoded. Filters and methods (trim, split) treat a stand-in like any character.

Which characters: the punctuation in the spellings. Letters stay, for templates compare text and
change its case. They go too if the template's own text ends or begins inside a spelling (Phi's
writes "<|" + role + "|>"): only then could foreign letters come to lie inside one.

Some templates look for markup such as </think> in messages. Such a string keeps its characters
where it occurs, unless it could itself be part of a control token's spelling.
"""

import re
from collections.abc import Collection, Iterable, Mapping

_PRIVATE_USE = range(0x100000, 0x10FFFE)

# Quoting (tojson) treats these specially, and no control token is spelled with them alone.
_LEFT_ALONE = frozenset('"\\')


class TemplateText:
    """What a template's own text means for foreign text in it.

    Attributes:
      replaced: Characters that foreign text must not bring in.
      kept: Finds the strings that foreign text may bring in all the same; None if there are none.
      used: Characters of the template's own text, which are no stand-ins.
    """

    def __init__(self, literals: Collection[str], spellings: Collection[str]) -> None:
        """Compares the template's strings with the spellings of control tokens.

        Args:
          literals: Every string that the template can put out or compare with.
          spellings: Of the control tokens.
        """
        reaches_inside = any(_ends_inside(text, s) for text in literals for s in spellings)
        replaced = set[str]()
        for spelling in spellings:
            characters = {c for c in spelling if not c.isspace()} - _LEFT_ALONE
            punctuation = {c for c in characters if not c.isalnum()}
            replaced |= characters if reaches_inside else punctuation or {spelling[0]}
        kept = [
            text
            for text in sorted(set(literals), key=lambda text: (-len(text), text))
            if not replaced.isdisjoint(text)
            and not any(s in text or text in s or _ends_inside(text, s) for s in spellings)
        ]
        self.replaced = frozenset(replaced)
        self.kept = re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None
        self.used = frozenset[str]().union(*literals)


class Disguise:
    """The stand-ins of one chat."""

    def __init__(self, template_text: TemplateText, foreign: Iterable[str]) -> None:
        """Finds stand-ins.

        Args:
          template_text: Of the template.
          foreign: All text from outside.

        Raises:
          ValueError: The chat uses so many private-use characters that too few are left.
        """
        used = template_text.used.union(*foreign)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        characters = sorted(template_text.replaced)
        self._meanings = dict(zip(free, characters, strict=False))
        if len(self._meanings) < len(characters):
            raise ValueError("messages use too much of Unicode's private-use plane 16")
        self._table = str.maketrans({c: stand_in for stand_in, c in self._meanings.items()})
        self._kept = template_text.kept

    @property
    def meanings(self) -> Mapping[str, str]:
        """The character that each stand-in stands for."""
        return self._meanings

    def put_on(self, text: str) -> str:
        """Foreign text with stand-ins."""
        if self._kept is None:
            return text.translate(self._table)
        parts = self._kept.split(text)  # every other part is a kept string
        parts[::2] = [part.translate(self._table) for part in parts[::2]]
        return "".join(parts)


def _ends_inside(text: str, spelling: str) -> bool:
    """Whether the text's end begins the spelling, or its beginning ends it, and more is missing.

    Example: "a <|" and "|>" end inside "<|user|>"; "<|user|>" and "a" do not.
    """
    return any(
        text.endswith(spelling[:n]) or text.startswith(spelling[-n:])
        for n in range(1, min(len(text) + 1, len(spelling)))
    )
