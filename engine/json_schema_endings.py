"""Finds what of a JSON schema requires itself without end: no document satisfies it. No JAX.

llguidance accepts such a schema, and an output that has come to that place cannot go on.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

type Needs = list[list[int]]
"""What a subschema needs to end: of each group one subschema that ends, by its id."""


def needs(schema: Mapping[str, Any], target: object = True) -> Needs:
    """What every document of a subschema needs; what is hard to tell, and booleans, are left out.

    Args:
      schema: Wrong types in it are left for llguidance to refuse.
      target: What its $ref points to.
    """
    groups: list[list[object]] = [[target], *([each] for each in _members(schema, "allOf"))]
    groups += [_members(schema, "anyOf"), _members(schema, "oneOf")]
    if schema.get("type") in ("object", ["object"]):
        groups += _of_object(schema)
    if schema.get("type") in ("array", ["array"]):
        groups += _of_array(schema)
    alternatives = (
        [id(each) for each in group if each is not False]
        for group in groups
        if not any(each is True for each in group)
    )
    return [each for each in alternatives if each]


def endless(all_needs: Mapping[int, Needs]) -> set[int]:
    """The ids of those that no finite document satisfies, in time linear in what they need.

    Args:
      all_needs: By id, those of every subschema that another needs too.
    """
    num_unmet = {each: len(groups) for each, groups in all_needs.items()}
    waiting: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for each, groups in all_needs.items():
        for number, group in enumerate(groups):
            for alternative in group:
                waiting[alternative].append((each, number))
    ending = [each for each, num in num_unmet.items() if not num]
    met: set[tuple[int, int]] = set()
    while ending:
        for each, number in waiting[ending.pop()]:
            if (each, number) not in met:
                met.add((each, number))
                num_unmet[each] -= 1
                if not num_unmet[each]:
                    ending.append(each)
    return {each for each, num in num_unmet.items() if num}


def _of_object(schema: Mapping[str, Any]) -> Iterator[list[object]]:
    named, patterned = schema.get("properties"), schema.get("patternProperties")
    properties: dict[str, object] = named if isinstance(named, dict) else {}
    others = [schema.get("additionalProperties", True)]
    others += patterned.values() if isinstance(patterned, dict) else ()
    required = {name for name in _members(schema, "required") if isinstance(name, str)}
    yield from ([properties[name]] for name in required if name in properties)
    if not required <= properties.keys():
        yield others
    if schema.get("minProperties", 0) > 0:
        yield [*properties.values(), *others]


def _of_array(schema: Mapping[str, Any]) -> Iterator[list[object]]:
    least, first = int(schema.get("minItems", 0)), _members(schema, "prefixItems")
    yield from ([each] for each in first[:least])
    if least > len(first):
        yield [schema.get("items", True)]


def _members(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
