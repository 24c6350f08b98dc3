"""Rules between hyperparameters: functions of a user's, which are asked whether hyperparameters are allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_MOST_DRAWS = 10_000
_LEAST = 10  # of these must obey the rules: one in a thousand
_ASKED = 200  # draws that rules are asked about at least, so that what is wrong with them shows


@dataclass(frozen=True)
class Rule:
    """A function that returns whether hyperparameters are allowed, what it demands, and all names of the space."""

    function: Callable[[dict[str, Any]], bool]
    text: str
    names: frozenset[str]

    def allows(self, params: Mapping[str, Any]) -> bool:
        """Tell whether hyperparameters are allowed; those for which the function fails are not."""
        try:
            return self.ask(params) is not False
        except ValueError:
            return False

    def ask(self, params: Mapping[str, Any]) -> bool | None:
        """Return the function's answer; None, it demands nothing, where it looks up a parameter that does not exist.

        Raises ValueError where it fails, or returns neither True nor False.
        """
        try:
            answer: Any = self.function(dict(params))
        except Exception as error:
            missing = error.args[0] if isinstance(error, KeyError) and error.args else None
            if isinstance(missing, str) and missing in self.names and missing not in params:
                return None
            name = f"there is no parameter {error}" if isinstance(error, KeyError) else repr(error)
            raise ValueError(f"the rule {self.text!r} cannot be asked about {dict(params)!r}: {name}") from error
        with suppress(Exception):
            answer = answer.item()  # numpy's True
        if type(answer) is not bool:
            raise ValueError(f"the rule {self.text!r} must return True or False, not {answer!r} for {dict(params)!r}")
        return answer


def check_rules(rules: Sequence[Rule], draw: Callable[[], Mapping[str, Any]]) -> None:
    """Raise a ValueError where a rule cannot be asked, or where the rules leave nothing or next to nothing.

    Nor can one be asked that answers the same question in two ways, or that never applies. `draw` returns
    hyperparameters drawn at random.
    """
    obeyed, applied, kept, drawn = [0] * len(rules), [False] * len(rules), 0, 0
    while drawn < _MOST_DRAWS and (drawn < _ASKED or kept < _LEAST or not all(applied)):
        params = draw()
        answers = [rule.ask(params) for rule in rules]
        for rule, answer in zip(rules, answers, strict=True):
            if rule.ask(params) != answer:
                raise ValueError(f"the rule {rule.text!r} does not always answer the same, asked about {params!r}")
        obeyed = [count + (answer is not False) for count, answer in zip(obeyed, answers, strict=True)]
        applied = [before or answer is not None for before, answer in zip(applied, answers, strict=True)]
        kept += False not in answers
        drawn += 1
    for rule, ever in zip(rules, applied, strict=True):
        if not ever:
            raise ValueError(
                f"the rule {rule.text!r} never applies: it looks up parameters that did not exist together in any of "
                f"{drawn} individuals drawn at random"
            )
    if kept < _LEAST:
        shares = ", ".join(f"{rule.text!r} {count}" for rule, count in zip(rules, obeyed, strict=True))
        raise ValueError(
            f"the rules of this space leave {'next to ' if kept else ''}nothing: of {drawn} individuals drawn at "
            f"random {kept} obey all of them ({shares}); give parameters values that fit together more often"
        )
