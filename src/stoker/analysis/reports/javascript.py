"""Translates Python functions into JavaScript, so that the report page has the same formulas.

The functions may use constructs that mean the same in both languages: numbers, strings, pairs,
fields of dataclasses, ``if``, ``for`` over ``range``, ``pairwise`` or a list, functions inside
functions, and calls of each other. Anything else is refused. One rule is not checked: an empty list
is true in JavaScript, so a condition must ask for ``len(...) > 0``. Names become camelCase; fields
keep their names, because the data in the page has them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from textwrap import indent
from types import FunctionType
from typing import Any

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.And: "&&", ast.Or: "||",
    ast.Not: "!", ast.USub: "-", ast.Eq: "===", ast.NotEq: "!==", ast.Is: "===", ast.IsNot: "!==",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
_CALLS = {"min": "Math.min", "max": "Math.max", "math.log": "Math.log"}
_PRELUDE = {
    "pairwise": "const pairwise = (items) => items.slice(1).map((item, i) => [items[i], item]);",
    "replace": "const replace = (value, changes) => ({ ...value, ...changes });",
    "Prediction": "const Prediction = (fields) => fields;",
}


def translate(*functions: Callable[..., Any]) -> str:
    """Return a script that defines these functions, and all functions and constants that they use.

    Raises ValueError for a function that cannot be translated.
    """
    constants: dict[str, str] = {}
    defined: dict[str, str] = {}

    def define(function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        if function.__name__ in defined or function.__name__ in _PRELUDE:
            return
        (tree,) = _WithoutChecks().visit(ast.parse(inspect.getsource(function))).body
        defined[function.__name__] = _statement(tree)
        for node in ast.walk(tree):
            used = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(used, FunctionType):
                define(used)
            elif isinstance(node, ast.Name) and node.id.isupper():
                constants[node.id] = f"const {node.id} = {_write_value(used)};"

    for function in functions:
        define(function)
    parts = ['"use strict";', *_PRELUDE.values(), *constants.values(), *defined.values()]
    return "\n".join(parts)


class _WithoutChecks(ast.NodeTransformer):
    """Removes docstrings, and checks of arguments: the page asks only valid questions."""

    def visit_Expr(self, node: ast.Expr) -> None:
        pass


def _write_value(value: Any) -> str:
    if value == float("inf"):
        return "Infinity"
    return json.dumps(asdict(value) if is_dataclass(value) else value)  # type: ignore[arg-type]


def _statement(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef(name=name, args=args, body=body):
            undefaulted = len(args.args) - len(args.defaults)
            parameters = [_camel(arg.arg) for arg in args.args]
            for place, default in enumerate(args.defaults, undefaulted):
                parameters[place] += f" = {_expression(default)}"
            own = sorted(_list_assigned(body) - {_camel(arg.arg) for arg in args.args})
            declared = f"let {', '.join(own)};\n" if own else ""
            return f"function {_camel(name)}({', '.join(parameters)}) {_block(body, declared)}"
        case ast.Return(value=ast.expr() as value):
            return f"return {_expression(value)};"
        case ast.Assign(targets=targets, value=value):
            return " = ".join(map(_expression, [*targets, value])) + ";"
        case ast.AugAssign(target=target, op=op, value=value):
            return f"{_expression(target)} {_operator(op)}= {_expression(value)};"
        case ast.If(test=test, body=body, orelse=orelse):
            otherwise = f" else {_block(orelse)}" if orelse else ""
            return f"if ({_expression(test)}) {_block(body)}{otherwise}"
        case ast.For(target=target, iter=ast.Call(ast.Name("range"), args), body=body):
            start, end = [ast.Constant(0), *args][-2:]
            name = _expression(target)
            loop = f"let {name} = {_expression(start)}; {name} < {_expression(end)}; {name}++"
            return f"for ({loop}) {_block(body)}"
        case ast.For(target=target, iter=items, body=body):
            return f"for (const {_expression(target)} of {_expression(items)}) {_block(body)}"
    raise ValueError(f"cannot be said in JavaScript: {ast.unparse(node)}")


def _block(body: Sequence[ast.stmt], declared: str = "") -> str:
    lines = "\n".join(map(_statement, body))
    return "{\n" + indent(declared + lines, "  ") + "\n}"


def _list_assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Return the variables that a function assigns, without those of its inner functions."""
    found = set()
    for node in body:
        match node:
            case ast.Assign(targets=targets):
                inside = (part for target in targets for part in ast.walk(target))
                found |= {_camel(part.id) for part in inside if isinstance(part, ast.Name)}
            case ast.If(body=inner, orelse=orelse):
                found |= _list_assigned([*inner, *orelse])
            case ast.For(body=inner):
                found |= _list_assigned(inner)
    return found


def _expression(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return _camel(name)
        case ast.Constant(value=value):
            return _write_value(value)
        case ast.Attribute(value=value, attr=attr):
            return f"{_expression(value)}.{attr}"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return f"[{', '.join(map(_expression, parts))}]"
        case ast.Subscript(value=value, slice=ast.Constant(int() as place)):
            return f"{_expression(value)}[{place}]"
        case ast.Subscript(value=value, slice=ast.UnaryOp() as place):  # from the end
            return f"{_expression(value)}.at({_expression(place)})"
        case ast.BinOp(left=left, op=op, right=right):
            return f"({_expression(left)} {_operator(op)} {_expression(right)})"
        case ast.UnaryOp(op=op, operand=operand):
            return f"{_operator(op)}{_expression(operand)}"
        case ast.BoolOp(op=op, values=values):
            return f"({f' {_operator(op)} '.join(map(_expression, values))})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({_expression(left)} {_operator(op)} {_expression(right)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({_expression(test)} ? {_expression(body)} : {_expression(orelse)})"
        case ast.ListComp(
            elt=ast.Name(element),
            generators=[ast.comprehension(ast.Name(name), items, [condition])],
        ) if element == name:
            return f"{_expression(items)}.filter(({name}) => {_expression(condition)})"
        case ast.Call(func=ast.Name("len"), args=[items]):
            return f"{_expression(items)}.length"
        case ast.Call(func=func, args=args, keywords=keywords):
            given = [_expression(arg) for arg in args]
            if keywords:
                fields = (f"{word.arg}: {_expression(word.value)}" for word in keywords)
                given.append(f"{{ {', '.join(fields)} }}")
            called = ast.unparse(func)
            return f"{_CALLS.get(called) or _expression(func)}({', '.join(given)})"
    raise ValueError(f"cannot be said in JavaScript: {ast.unparse(node)}")


def _operator(node: ast.AST) -> str:
    if type(node) not in _OPERATORS:
        raise ValueError(f"cannot be said in JavaScript: {type(node).__name__}")
    return _OPERATORS[type(node)]


def _camel(name: str) -> str:
    """Return a name in camelCase; constants and classes keep theirs."""
    if name.isupper():
        return name
    return re.sub(r"(?<=\w)_(\w)", lambda found: found[1].upper(), name)
