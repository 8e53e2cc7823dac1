"""SQL that SQLite and PostgreSQL spell differently.

`insert`, with its ON CONFLICT, is the same on both.
"""

from typing import Any

from sqlalchemy import Integer, String
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

__all__ = ["JSONPairs", "Numbers", "Texts", "insert"]


class Numbers(FunctionElement[int]):
    """The numbers in a JSON list, behind IN: one parameter of type JSON, however many they are."""

    type = Integer()
    inherit_cache = True


class Texts(FunctionElement[str]):
    """The texts in a JSON list, behind IN, as `Numbers`."""

    type = String()
    inherit_cache = True


class JSONPairs(FunctionElement[Any]):
    """Keys and values of a column of JSON objects, as a table. On PostgreSQL only values that are texts are in it."""

    inherit_cache = True


@compiles(Numbers, "postgresql")
def _numbers(element: Numbers, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(SELECT value::bigint FROM json_array_elements_text({compiler.process(element.clauses, **kw)}))"


@compiles(Texts, "postgresql")
def _texts(element: Texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(SELECT value FROM json_array_elements_text({compiler.process(element.clauses, **kw)}))"


@compiles(Numbers, "sqlite")
@compiles(Texts, "sqlite")
def _entries(element: Numbers | Texts, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **kw)}))"


@compiles(JSONPairs, "postgresql")
def _pairs_of_postgresql(element: JSONPairs, compiler: SQLCompiler, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    pairs = f"json_each({column}) AS pairs (key, value)"
    return f"(SELECT key, value #>> '{{}}' AS value FROM {pairs} WHERE json_typeof(value) = 'string')"


@compiles(JSONPairs, "sqlite")
def _pairs_of_sqlite(element: JSONPairs, compiler: SQLCompiler, **kw: Any) -> str:
    return f"json_each({compiler.process(element.clauses, **kw)})"
