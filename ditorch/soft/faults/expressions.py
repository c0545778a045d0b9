"""Conditions on shapes and arguments, as in ``s[-2] % 32 == 1 and bias is not None``: parsed here, never run as Python.

There are whole and decimal numbers, ``True``, ``False``, ``None``, quoted words, names, a place in a list
(``s[-1]``), ``+ - * // %``, comparisons, ``is None``, ``is not None``, ``and``, ``or``, ``not`` and parentheses.
Nothing can be called. A list compares with a number by its elements: ``==`` needs all of them, every other comparison
any.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Expression", "ExpressionError", "UnknownName", "read"]

MAX_LENGTH = 400
MAX_DEPTH = 30

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<word>[A-Za-z_]\w*)|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<sign>==|!=|<=|>=|//|[-+*%<>()\[\]]))"
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SUM: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub}
_PRODUCT: dict[str, Callable[[Any, Any], Any]] = {"*": operator.mul, "//": operator.floordiv, "%": operator.mod}
_CONSTANTS = {"True": True, "False": False, "None": None}
_KEYWORDS = {"and", "or", "not", "is"}

Names = Mapping[str, Any]
Node = Callable[[Names], Any]


class ExpressionError(ValueError):
    """An expression that cannot be read; the message has the position."""


class UnknownName(Exception):
    """A name that this call does not have: the condition does not hold for it."""


@dataclass(frozen=True)
class Expression:
    """A condition that was read. Equal if the text is."""

    source: str
    names: frozenset[str] = field(compare=False)
    _value: Node = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.source

    def holds(self, names: Names) -> bool:
        """Whether it is true of these names. What cannot be compared or computed is not true."""
        try:
            return bool(self._value(names))
        except (UnknownName, TypeError, IndexError, ZeroDivisionError, OverflowError):
            return False


def read(text: str) -> Expression:
    """Read one expression.

    >>> expression = read("s[-2] % 32 == 1 and n > 64")
    >>> expression.holds({"s": [33, 4], "n": 132}), sorted(expression.names)
    (True, ['n', 's'])
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"has {len(text)} characters; {MAX_LENGTH} are allowed: it goes on at position {MAX_LENGTH + 1}"
        )
    return _Parser(text).expression()


class _Parser:
    """Recursive descent, from ``or`` down to numbers and names."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        self.names: set[str] = set()
        self.next = 0
        self.depth = 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                raise ExpressionError(f"cannot read {text[start]!r} at position {start + 1}")
            kind = str(match.lastgroup)
            self.tokens.append((kind, match[kind], match.start(kind)))
            position = match.end()

    def expression(self) -> Expression:
        value = self._or()
        if self.next < len(self.tokens):
            raise self._wrong("an operator such as ==, and, or")
        return Expression(self.text.strip(), frozenset(self.names), value)

    # --- tokens ---------------------------------------------------------------

    def _peek(self) -> str:
        return self.tokens[self.next][1] if self.next < len(self.tokens) else ""

    def _take(self, *wanted: str) -> str | None:
        """The next token if it is one of these."""
        if self.next < len(self.tokens) and self.tokens[self.next][0] != "text" and self._peek() in wanted:
            self.next += 1
            return self.tokens[self.next - 1][1]
        return None

    def _need(self, wanted: str) -> None:
        if self._take(wanted) is None:
            raise self._wrong(repr(wanted))

    def _wrong(self, expected: str) -> ExpressionError:
        if self.next < len(self.tokens):
            _, token, start = self.tokens[self.next]
            return ExpressionError(f"expected {expected} at position {start + 1}, found {token!r}")
        return ExpressionError(f"ends at position {len(self.text) + 1}, where {expected} is expected")

    # --- from loose to tight ---------------------------------------------------

    def _or(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(f"is nested more than {MAX_DEPTH} deep at position {self._position()}")
        value = self._and()
        while self._take("or"):
            value = _either(value, self._and())
        self.depth -= 1
        return value

    def _position(self) -> int:
        return self.tokens[self.next][2] + 1 if self.next < len(self.tokens) else len(self.text) + 1

    def _and(self) -> Node:
        value = self._not()
        while self._take("and"):
            value = _both(value, self._not())
        return value

    def _not(self) -> Node:
        negated = False
        while self._take("not"):
            negated = not negated
        value = self._comparison()
        return (lambda names: not value(names)) if negated else value

    def _comparison(self) -> Node:
        left = self._sum()
        if self._take("is"):
            negated = self._take("not") is not None
            self._need("None")
            return lambda names: (left(names) is None) != negated
        sign = self._take(*_COMPARE)
        if sign is None:
            return left
        right = self._sum()
        return lambda names: _compared(sign, left(names), right(names))

    def _sum(self) -> Node:
        return self._left_to_right(_SUM, self._product)

    def _product(self) -> Node:
        return self._left_to_right(_PRODUCT, self._negative)

    def _left_to_right(self, signs: dict[str, Callable[[Any, Any], Any]], part: Callable[[], Node]) -> Node:
        value = part()
        while sign := self._take(*signs):
            value = _computed(signs[sign], value, part())
        return value

    def _negative(self) -> Node:
        negative = False
        while self._take("-"):
            negative = not negative
        value = self._place()
        return (lambda names: -value(names)) if negative else value

    def _place(self) -> Node:
        value = self._atom()
        while self._take("["):
            value = _item(value, self._or())
            self._need("]")
        return value

    def _atom(self) -> Node:
        if self._take("("):
            value = self._or()
            self._need(")")
            return value
        if self.next == len(self.tokens):
            raise self._wrong("a number or a name")
        kind, token, _ = self.tokens[self.next]
        if kind == "sign" or token in _KEYWORDS:
            raise self._wrong("a number or a name")
        self.next += 1
        if kind == "number":
            number = float(token) if "." in token else int(token)
            return lambda names: number
        if kind == "text":
            word = token[1:-1]
            return lambda names: word
        if token in _CONSTANTS:
            constant = _CONSTANTS[token]
            return lambda names: constant
        self.names.add(token)
        return _named(token)


def _either(left: Node, right: Node) -> Node:
    return lambda names: left(names) or right(names)


def _both(left: Node, right: Node) -> Node:
    return lambda names: left(names) and right(names)


def _computed(compute: Callable[[Any, Any], Any], left: Node, right: Node) -> Node:
    return lambda names: compute(_number(left(names)), _number(right(names)))


def _item(value: Node, index: Node) -> Node:
    def item(names: Names) -> Any:
        found, at = value(names), index(names)
        if not isinstance(found, (list, tuple)) or not isinstance(at, int):
            raise TypeError("only a list has places, numbered by whole numbers")
        return found[at]

    return item


def _named(name: str) -> Node:
    def named(names: Names) -> Any:
        if name not in names:
            raise UnknownName(name)
        return names[name]

    return named


def _number(value: Any) -> Any:
    if not isinstance(value, (int, float)) or abs(value) > 2**80:
        raise TypeError("not a number")
    return value


def _compared(sign: str, left: Any, right: Any) -> bool:
    """Whether two values compare so; a list by its elements."""
    compare = _COMPARE[sign]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return compare(list(left), list(right))
    if isinstance(left, (list, tuple)):
        return (all if sign == "==" else any)(compare(value, right) for value in left)
    if isinstance(right, (list, tuple)):
        return (all if sign == "==" else any)(compare(left, value) for value in right)
    return compare(left, right)
