"""Assignments of a script, and the values of variables after them."""

from __future__ import annotations

from hpcgen.check.lint.expander import Expander
from hpcgen.check.lint.place import Place
from hpcgen.check.lint.script import Assignment
from hpcgen.check.lint.syntax import Node
from hpcgen.check.lint.words import Variable, appended, unknown_variable, variable_of


def assignment_of(item: Node, place: Place, expander: Expander) -> Assignment:
    """Converts a node of the syntax tree to an assignment."""
    items = None
    value = expander.single(item["Value"]) if item.get("Value") else None
    if "Array" in item:
        elements = [element["Value"] for element in item["Array"].get("Elems", []) if "Value" in element]
        items = tuple(word for element in elements for word in expander.fields(element))
    return Assignment(
        name=item["Name"]["Value"],
        line=expander.line_of(item),
        value=value,
        items=items,
        append=bool(item.get("Append")),
        conditional=place.conditional,
        function=place.function,
        outer=place.outer,
        dead=place.dead,
        loop=place.loop,
    )


def variable_after(item: Node, assignment: Assignment, expander: Expander) -> Variable:
    """The variable after the assignment."""
    if item.get("Index"):
        return unknown_variable(assignment.name)
    if assignment.items is not None:
        variable = Variable(items=assignment.items)
    elif item.get("Value"):
        variable = expander.scalar(item["Value"])
    else:
        variable = variable_of("")
    return appended(expander.variables.get(assignment.name), variable) if assignment.append else variable
