"""``exact_answer``: the final answer equals the expected one, after normalisation.

What counts as the final answer, in this order:
1. Text up to the last ``</think>`` is passed over.
2. The content of the last ``<answer>…</answer>``;
3. else what follows the last ``Answer:`` on its line (any case; ``Final answer:`` too; markdown stars are
   passed over);
4. else the whole text.

Normalisation of both sides: Unicode NFKC; surrounding white space, quotes, backticks, ``$`` and ``*`` go, so
does one full stop at the end; white space inside becomes one blank; case does not count. When both sides are
decimal numbers (an optional sign, thousands separators allowed) they are compared as numbers: ``1,000.0``
equals ``1000``, ``-0`` equals ``0``. Nothing else is evaluated: ``1/2`` is not ``0.5`` (use ``math_verify``).
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from reward_svc.verifiers.base import Item, Score, expected_answers

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_LABELLED = re.compile(r"(?:^|[\s*_])answer\s*(?:\*\*)?\s*:\s*(?:\*\*)?(.*)$", re.MULTILINE | re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,60})(\.\d{0,60})?")
_AROUND = " \t\r\n\"'`$*"


def score(item: Item) -> Score:
    """1 when the final answer is one of the expected ones, else 0."""
    given = final_answer(item.answer)
    right = any(same(given, expected) for expected in expected_answers(item.row))
    return Score(float(right))


def final_answer(text: str) -> str:
    """The final answer in ``text``, not yet normalised."""
    text = text.rpartition("</think>")[2]
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1])
    labelled = [found for found in _LABELLED.findall(text) if found.strip()]
    return str(labelled[-1]) if labelled else text


def same(left: str, right: str) -> bool:
    """Whether two answers are equal by the rules above."""
    a, b = normalise(left), normalise(right)
    if _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b):
        return Decimal(a.replace(",", "")) == Decimal(b.replace(",", ""))
    return a == b


def normalise(text: str) -> str:
    """``text`` as it is compared."""
    text = unicodedata.normalize("NFKC", text).strip(_AROUND)
    text = text.removesuffix(".").strip(_AROUND)
    return " ".join(text.split()).casefold()
