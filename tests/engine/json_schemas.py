"""200 JSON schemas of rising difficulty, each with a prompt that asks for what it describes.

Strings and arrays are bounded, numbers with decimals mostly by multipleOf, and what refers to
itself may stop at every level, so a small model says what it says in a few hundred tokens. A few
can go on for as long as it likes: numbers that multipleOf does not bound, as most schemas have
them, and what refers to itself.
"""

# ruff: noqa: RUF001 letters that look like others are meant

from typing import Any, NamedTuple

Schema = dict[str, Any]


class Case(NamedTuple):
    """A schema and what it describes.

    Attributes:
      name: What it describes, on one line; no other case has it.
      schema: Draft 2020-12.
    """

    name: str
    schema: Schema

    @property
    def prompt(self) -> str:
        """What to ask a model for, on one line."""
        return f"Write JSON that describes {self.name}."


def text(most: int, least: int = 1, **more: Any) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most} | more


def like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def in_format(name: str, **more: Any) -> Schema:
    return {"type": "string", "format": name} | more


def whole(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most} | more


def number(least: float, most: float, **more: Any) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most} | more


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def const(value: Any) -> Schema:
    return {"const": value}


def array(items: Schema, least: int, most: int, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most} | more


def closed(properties: dict[str, Any], *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object of these properties and no others, all of them required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    } | more


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def one_of(*schemas: Schema) -> Schema:
    return {"oneOf": list(schemas)}


def fixed(*items: Schema, **more: Any) -> Schema:
    """An array of exactly these."""
    return {
        "type": "array",
        "prefixItems": list(items),
        "items": False,
        "minItems": len(items),
    } | more


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
# Multiples of a power of two: a validator divides them without an error.
LATITUDE = number(-90, 90, multipleOf=0.125)
LONGITUDE = number(-180, 180, multipleOf=0.125)

FLAT = [
    Case("a person", closed({"name": text(24), "age": whole(0, 120)})),
    Case("a book", closed({"title": text(40), "author": text(30), "pages": whole(1, 2000)})),
    Case("a city", closed({"city": text(20), "country": text(20), "is_capital": BOOLEAN})),
    Case("a point on a screen", closed({"x": whole(0, 1919), "y": whole(0, 1079)})),
    Case("a song", closed({"title": text(30), "artist": text(24), "seconds": whole(30, 900)})),
    Case("a dog", closed({"name": text(12), "breed": text(20), "weight_kg": whole(1, 90)})),
    Case("a to-do item", closed({"task": text(40), "done": BOOLEAN, "priority": whole(1, 5)})),
    Case("a film", closed({"title": text(32), "year": whole(1900, 2030), "seen": BOOLEAN})),
    Case("an empty answer", closed({})),
    Case("a sensor reading", closed({"id": whole(1, 9999), "ok": BOOLEAN, "note": text(20, 0)})),
    Case("a planet", closed({"name": text(12), "moons": whole(0, 150), "has_rings": BOOLEAN})),
    Case(
        "a door",
        closed({"open": BOOLEAN, "locked": BOOLEAN, "wood": BOOLEAN, "painted": BOOLEAN}),
    ),
    Case(
        "a plant, with its height if known",
        closed({"name": text(20), "height_cm": whole(1, 5000)}, optional=("height_cm",)),
    ),
    Case(
        "a contact, as far as known",
        closed({"name": text(24), "phone": text(15), "city": text(20)}, optional=("phone", "city")),
    ),
    Case(
        "a nickname, or nothing",
        closed({"nickname": {"type": ["string", "null"], "maxLength": 16}}),
    ),
]

ENUMS = [
    Case("a traffic light", closed({"colour": enum("red", "amber", "green")})),
    Case("a playing card", closed({"suit": enum("♠", "♥", "♦", "♣"), "rank": whole(2, 10)})),
    Case(
        "a shirt",
        closed({"size": enum("S", "M", "L", "XL"), "colour": enum("white", "black", "blue")}),
    ),
    Case("a version marker", closed({"version": const(2), "kind": const("release")})),
    Case("a die roll", closed({"rolled": enum(1, 2, 3, 4, 5, 6)})),
    Case("a vote", closed({"vote": enum("yes", "no", None), "reason": text(30)})),
    Case("a compass direction", enum("north", "north-east", "east", "south", "west")),
    Case("a setting that is mixed", closed({"value": enum(0, "auto", True, None, 1.5)})),
    Case(
        "a weekday and its mood",
        closed(
            {"day": enum("Mon", "Tue", "Wed", "Thu", "Fri"), "mood": enum("good", "bad", "mixed")}
        ),
    ),
    Case("a greeting", const("hello world")),
    Case("a fixed pair", const({"ok": True, "codes": [200, 204]})),
    Case("a log level", closed({"level": enum("DEBUG", "INFO", "WARN"), "message": text(40)})),
    Case(
        "a chess move",
        closed({"piece": enum("K", "Q", "R", "B", "N", "P"), "to": like("^[a-h][1-8]$")}),
    ),
    Case("one of two records", enum({"type": "a", "n": 1}, {"type": "b", "n": [2, 3]})),
    Case(
        "a file mode",
        closed({"mode": enum("r", "w", "a"), "binary": BOOLEAN, "encoding": const("utf-8")}),
    ),
    Case('a quotation mark, as in "so"', closed({"mark": enum('"', "'", "`", "«")})),
    Case("a path separator", closed({"separator": enum("/", "\\", ":"), "os": text(12)})),
    Case(
        "a verdict on a claim",
        closed({"verdict": enum("true", "false", "unclear"), "score": enum(0.0, 0.25, 0.5, 1.0)}),
    ),
]

NUMBERS = [
    Case("a temperature", closed({"celsius": number(-90, 60)})),
    Case("a percentage", closed({"percent": number(0, 100, multipleOf=0.5)})),
    Case("a place on a map", closed({"latitude": LATITUDE, "longitude": LONGITUDE})),
    Case("an even number", closed({"even": whole(0, 1000, multipleOf=2)})),
    Case("a price", closed({"euros": whole(0, 999), "cents": whole(0, 95, multipleOf=5)})),
    Case("a probability", closed({"p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}})),
    Case(
        "an exam mark",
        closed({"mark": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 16}}),
    ),
    Case("a number", number(-1000, 1000)),
    Case("a year", whole(1066, 2024)),
    Case("a dozen or more", closed({"eggs": whole(12, 144, multipleOf=12)})),
    Case("a population", closed({"people": whole(100_000, 40_000_000)})),
    Case("a pH value", closed({"ph": number(0, 14, multipleOf=0.25), "acid": BOOLEAN})),
    Case("a tiny interval", closed({"width": number(0.125, 0.375)})),
    Case(
        "a stock level",
        closed({"stock": whole(0, 10**6), "reorder_at": whole(0, 500, multipleOf=25)}),
    ),
    Case("a rating", closed({"stars": number(1, 5, multipleOf=0.5), "votes": whole(0, 99999)})),
    Case("a signed offset", closed({"hours": whole(-12, 14), "minutes": enum(0, 30, 45)})),
]

STRINGS = [
    Case("a date", closed({"date": in_format("date")})),
    Case("a meeting", closed({"subject": text(30), "at": like("^(0[89]|1[0-7]):[0-5]0$")})),
    Case("a UUID", closed({"id": in_format("uuid")})),
    Case("an IPv4 address", closed({"address": in_format("ipv4"), "port": whole(1, 65535)})),
    Case("a number plate", closed({"plate": like("^[A-Z]{2}[0-9]{2} [A-Z]{3}$")})),
    Case("a colour in hexadecimal", closed({"colour": like("^#[0-9a-f]{6}$"), "name": text(16)})),
    Case("a postcode", closed({"postcode": like("^[0-9]{5}(-[0-9]{4})?$")})),
    Case("a slug", closed({"slug": like("^[a-z]{2,8}(-[a-z]{2,8}){1,3}$")})),
    Case("a semantic version", closed({"version": like(r"^\d{1,2}\.\d{1,2}\.\d{1,2}$")})),
    Case("a phone number", closed({"phone": like(r"^\+[1-9][0-9]{1,2} [0-9]{6,9}$")})),
    Case("an e-mail address", closed({"email": in_format("email", maxLength=30)})),
    Case("a web page", closed({"url": like("^https://[a-z]{3,12}[.](com|org|net)/[a-z]{0,10}$")})),
    Case(
        "a time with its zone", closed({"time": like("^([01][0-9]|2[0-3]):[0-5][0-9](Z|[+]01)$")})
    ),
    Case("a moment", closed({"at": like("^20[0-9]{2}-0[1-9]-[12][0-9]T1[0-9]:[0-5][0-9]Z$")})),
    Case("a moment with its offset", closed({"at": in_format("date-time", maxLength=25)})),
    Case(
        "opening hours", closed({"from": in_format("time", maxLength=9), "to": like("^1[6-9]h$")})
    ),
    Case("a host", closed({"host": like("^[a-z]{3,10}([.][a-z]{2,6}){1,2}$")})),
    Case("three letters", text(3, 3, pattern="^[a-z]*$")),
    Case(
        "a product code and its checksum",
        closed({"code": like("^[A-Z]{3}-[0-9]{4}$"), "sum": like("^[0-9a-f]{8}$")}),
    ),
    Case("a short text without vowels", closed({"text": like("^[^aeiouAEIOU]{3,10}$")})),
    Case("a Roman numeral", closed({"numeral": like("^M{0,3}(CM|CD|D?C{0,3})X{0,3}I{1,3}$")})),
    Case("a password hint", closed({"hint": text(40, 8), "length": whole(8, 64)})),
]

ARRAYS = [
    Case("three colours", closed({"colours": array(text(12), 3, 3)})),
    Case("lottery numbers", array(whole(1, 49), 6, 6)),
    Case("a shopping list", closed({"items": array(text(16), 1, 5)})),
    Case("a row of switches", array(BOOLEAN, 2, 8)),
    Case("a 2 by 2 matrix", array(array(whole(-9, 9), 2, 2), 2, 2)),
    Case("a noughts and crosses board", array(array(enum("X", "O", ""), 3, 3), 3, 3)),
    Case("a poll", closed({"question": text(40), "answers": array(text(16), 2, 4)})),
    Case("a list that may be empty", closed({"warnings": array(text(30), 0, 2)})),
    Case("a polygon", array(closed({"x": whole(0, 99), "y": whole(0, 99)}), 3, 4)),
    Case("scores by round", closed({"rounds": array(array(whole(0, 10), 1, 3), 1, 3)})),
    Case("a list of tags", array(like("^[a-z]{2,9}$"), 1, 4)),
    Case("values or gaps", array({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, 3, 5)),
    Case("a team", array(closed({"name": text(12), "role": enum("dev", "ops", "lead")}), 1, 3)),
    Case(
        "a measurement series",
        closed({"unit": enum("m", "s"), "values": array(whole(0, 500), 2, 5)}),
    ),
    Case("a cube of bits", array(array(array(enum(0, 1), 2, 2), 2, 2), 2, 2)),
    Case("a menu", array(closed({"dish": text(20), "euros": whole(3, 40)}), 2, 3)),
    Case("a palette", closed({"name": text(12), "colours": array(like("^#[0-9A-F]{3}$"), 2, 5)})),
    Case("a sentence in words", closed({"words": array(like("^[A-Za-z]{1,10}$"), 3, 8)})),
]

NESTED = [
    Case(
        "a customer with an address",
        closed(
            {"name": text(20), "address": closed({"street": text(24), "zip": like("^[0-9]{5}$")})}
        ),
    ),
    Case(
        "a rectangle",
        closed(
            {
                "min": closed({"x": whole(0, 9), "y": whole(0, 9)}),
                "area": number(0, 100, multipleOf=0.25),
            }
        ),
    ),
    Case(
        "a company",
        closed({"name": text(20), "ceo": closed({"name": text(20), "since": whole(1980, 2024)})}),
    ),
    Case(
        "four levels of nesting",
        closed({"a": closed({"b": closed({"c": closed({"d": whole(0, 9)})})})}),
    ),
    Case(
        "a course with its students",
        closed({"course": text(20), "students": array(closed({"name": text(14)}), 1, 3)}),
    ),
    Case(
        "optional settings",
        closed(
            {
                "theme": enum("dark", "light"),
                "font": closed({"size": whole(6, 40), "bold": BOOLEAN}, optional=("bold",)),
                "debug": BOOLEAN,
            },
            optional=("font", "debug"),
        ),
    ),
    Case(
        "a word count",
        {
            "type": "object",
            "patternProperties": {"^[a-z]{1,8}$": whole(1, 99)},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 4,
        },
    ),
    Case(
        "exactly one way to be reached",
        closed(
            {"phone": like("^[0-9]{7}$"), "mail": text(20), "fax": like("^[0-9]{7}$")},
            optional=("phone", "mail", "fax"),
            minProperties=1,
            maxProperties=1,
        ),
    ),
    Case(
        "environment variables",
        {
            "type": "object",
            "patternProperties": {"^[A-Z]{2,8}$": text(12)},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    ),
    Case(
        "a record with free fields",
        {
            "type": "object",
            "properties": {"id": whole(1, 99)},
            "required": ["id"],
            "patternProperties": {"^x-[a-z]{1,6}$": enum("x", "y")},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    ),
    Case(
        "a recipe",
        closed(
            {
                "title": text(24),
                "minutes": whole(5, 240, multipleOf=5),
                "ingredients": array(closed({"what": text(14), "grams": whole(1, 900)}), 1, 3),
                "steps": array(text(30), 1, 2),
            }
        ),
    ),
    Case(
        "a room plan",
        closed(
            {
                "rooms": array(
                    closed({"name": text(12), "doors": array(enum("N", "E", "S", "W"), 1, 4)}), 1, 3
                )
            }
        ),
    ),
    Case(
        "a nested tally",
        closed({"by_year": closed({"2022": whole(0, 50), "2023": whole(0, 50), "2024": NULL})}),
    ),
    Case(
        "a profile with odd names",
        closed(
            {"first-name": text(12), "last name": text(12), "e.mail": text(16), "$": whole(0, 9)}
        ),
    ),
    Case(
        "a train connection",
        closed(
            {
                "from": closed({"station": text(16), "platform": whole(1, 20)}),
                "to": closed({"station": text(16), "platform": whole(1, 20)}),
                "minutes": whole(1, 600),
            }
        ),
    ),
    Case(
        "a required property that nothing describes",
        {
            "type": "object",
            "properties": {"a": whole(0, 9)},
            "required": ["a", "b"],
            "additionalProperties": enum(True, False),
            "maxProperties": 2,
        },
    ),
    Case(
        "a grid with labels",
        closed({"columns": array(text(6), 2, 2), "rows": array(array(whole(0, 9), 2, 2), 1, 3)}),
    ),
    Case(
        "a window on a screen",
        closed(
            {
                "title": text(20),
                "size": closed({"w": whole(100, 3000), "h": whole(100, 2000)}),
                "flags": closed({"resizable": BOOLEAN, "modal": BOOLEAN}, optional=("modal",)),
            }
        ),
    ),
]

ALTERNATIVES = [
    Case("an id, as a number or a text", closed({"id": any_of(whole(1, 999), like("^[a-f]{4}$"))})),
    Case(
        "a shape",
        one_of(
            closed({"kind": const("circle"), "radius": whole(1, 99)}),
            closed({"kind": const("square"), "side": whole(1, 99)}),
        ),
    ),
    Case("a value or null", closed({"value": any_of(number(0, 10, multipleOf=0.5), NULL)})),
    Case(
        "a payment",
        closed(
            {
                "amount": whole(1, 500),
                "by": one_of(
                    closed({"type": const("card"), "last4": like("^[0-9]{4}$")}),
                    closed({"type": const("cash")}),
                    closed({"type": const("invoice"), "days": enum(14, 30)}),
                ),
            }
        ),
    ),
    Case("one thing or several", closed({"tag": any_of(text(10), array(text(10), 1, 3))})),
    Case("a JSON scalar", any_of(NULL, BOOLEAN, whole(-99, 99), text(12))),
    Case(
        "a result or an error",
        any_of(
            closed({"ok": const(True), "value": whole(0, 999)}),
            closed({"ok": const(False), "error": text(30)}),
        ),
    ),
    Case(
        "an event",
        closed(
            {
                "at": whole(0, 86399),
                "event": any_of(
                    closed({"click": closed({"x": whole(0, 99), "y": whole(0, 99)})}),
                    closed({"key": like("^[A-Z]$")}),
                ),
            }
        ),
    ),
    Case("an integer or a half", any_of(whole(0, 9), {"type": "number", "enum": [0.5, 1.5]})),
    Case(
        "an animal",
        one_of(
            closed({"animal": const("cat"), "lives": whole(1, 9)}),
            closed({"animal": const("dog"), "tricks": array(text(10), 0, 2)}),
            closed({"animal": const("fish"), "water": enum("salt", "fresh")}),
        ),
    ),
    Case(
        "a base and what is added to it",
        {
            "allOf": [
                {"type": "object", "properties": {"id": whole(1, 99)}, "required": ["id"]},
                {"type": "object", "properties": {"name": text(12)}, "required": ["name"]},
            ],
            "properties": {"id": True, "name": True},
            "additionalProperties": False,
        },
    ),
    Case(
        "a number that two rules bound",
        {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 20}]},
    ),
    Case("a scalar or a pair", any_of(whole(0, 9), fixed(whole(0, 9), whole(0, 9)))),
    Case(
        "a list of mixed things",
        array(any_of(whole(0, 99), like("^[a-z]{1,6}$"), NULL, BOOLEAN), 2, 5),
    ),
    Case(
        "a condition",
        closed(
            {
                "field": like("^[a-z]{2,8}$"),
                "is": any_of(
                    closed({"equals": text(10)}),
                    closed({"between": fixed(whole(0, 9), whole(10, 99))}),
                    closed({"in": array(text(8), 1, 3)}),
                ),
            }
        ),
    ),
    Case(
        "a shape with a type array",
        closed({"limit": {"type": ["integer", "boolean"], "minimum": 1, "maximum": 64}}),
    ),
    Case(
        "two alternatives in two places",
        closed({"a": any_of(const("x"), const(1)), "b": any_of(const(None), const([True]))}),
    ),
    Case(
        "a document part",
        any_of(
            closed({"heading": text(30), "level": whole(1, 3)}),
            closed({"paragraph": text(60)}),
            closed({"list": array(text(16), 1, 3), "ordered": BOOLEAN}),
        ),
    ),
]

REFERENCES = [
    Case(
        "a line between two points",
        closed(
            {"from": ref("point"), "to": ref("point")},
            **{"$defs": {"point": closed({"x": whole(0, 99), "y": whole(0, 99)})}},
        ),
    ),
    Case(
        "an invoice to one address and delivery to another",
        closed(
            {"bill": ref("address"), "ship": ref("address")},
            **{"$defs": {"address": closed({"street": text(20), "city": text(14)})}},
        ),
    ),
    Case(
        "a linked list of digits",
        ref("node")
        | {"$defs": {"node": closed({"digit": whole(0, 9), "next": any_of(NULL, ref("node"))})}},
    ),
    Case(
        "a family tree in one line",
        {
            **ref("person"),
            "$defs": {
                "person": closed({"name": text(10), "child": ref("person")}, optional=("child",))
            },
        },
    ),
    Case(
        "a folder with at most one folder in it",
        {
            **ref("folder"),
            "$defs": {"folder": closed({"name": text(8), "inside": array(ref("folder"), 0, 1)})},
        },
    ),
    Case(
        "nested brackets",
        closed({"inner": any_of({"$ref": "#"}, const("end"))}),
    ),
    Case(
        "a chain of definitions",
        {
            **ref("a"),
            "$defs": {
                "a": closed({"b": ref("b")}),
                "b": closed({"c": ref("c")}),
                "c": array(ref("d"), 1, 2),
                "d": enum("deep", "deeper"),
            },
        },
    ),
    Case(
        "an arithmetic expression",
        {
            **ref("expression"),
            "$defs": {
                "expression": any_of(ref("value"), ref("value"), ref("operation")),
                "value": closed({"value": whole(0, 99)}),
                "operation": closed(
                    {"op": enum("+", "*"), "left": ref("value"), "right": ref("expression")}
                ),
            },
        },
    ),
    Case(
        "a filter",
        {
            **ref("filter"),
            "$defs": {
                "filter": any_of(ref("test"), closed({"not": ref("filter")})),
                "test": closed({"field": like("^[a-z]{2,8}$"), "value": text(10)}),
            },
        },
    ),
    Case(
        "a tree of two levels",
        {
            **ref("root"),
            "$defs": {
                "root": closed({"children": array(ref("branch"), 1, 2)}),
                "branch": closed({"children": array(ref("leaf"), 0, 2)}),
                "leaf": closed({"leaf": whole(0, 9)}),
            },
        },
    ),
    Case(
        "a comment with its reply",
        {
            **ref("comment"),
            "$defs": {
                "comment": closed(
                    {"by": text(10), "text": text(24), "reply": any_of(NULL, ref("comment"))}
                )
            },
        },
    ),
    Case(
        "two kinds of node in turn",
        {
            **ref("ping"),
            "$defs": {
                "ping": closed({"ping": any_of(NULL, ref("pong"))}),
                "pong": closed({"pong": any_of(NULL, ref("ping"))}),
            },
        },
    ),
    Case(
        "a date range, by a pointer into properties",
        closed(
            {"first": like("^20[0-9]{2}-0[1-9]$"), "last": {"$ref": "#/properties/first"}},
        ),
    ),
    Case(
        "a name with a slash in its definition",
        closed({"unit": {"$ref": "#/$defs/kg~1m"}}, **{"$defs": {"kg/m": enum("kg/m", "g/cm")}}),
    ),
    Case(
        "a bounded reference",
        closed(
            {"level": {"$ref": "#/$defs/percent", "maximum": 50}},
            **{"$defs": {"percent": whole(0, 100)}},
        ),
    ),
    Case(
        "a type expression",
        {
            **ref("type"),
            "$defs": {
                "type": any_of(
                    enum("int", "str", "bool"),
                    closed({"list": ref("type")}),
                    closed({"optional": ref("type")}),
                )
            },
        },
    ),
    Case(
        "a route with stops",
        closed(
            {"stops": array(ref("stop"), 2, 3)},
            **{
                "$defs": {
                    "stop": closed({"name": text(10), "at": ref("time")}),
                    "time": like("^([01][0-9]|2[0-3]):[0-5][0-9]$"),
                }
            },
        ),
    ),
    Case(
        "a menu that opens into another",
        {
            **ref("menu"),
            "$defs": {
                "menu": closed(
                    {
                        "label": text(10),
                        "opens": any_of(closed({"action": text(8)}), ref("menu")),
                    }
                )
            },
        },
    ),
    Case(
        "an old-style definition",
        closed({"id": {"$ref": "#/definitions/id"}}, definitions={"id": whole(1, 9999)}),
    ),
    Case(
        "shared tags in two places",
        closed(
            {"public": ref("tags"), "private": ref("tags")},
            **{"$defs": {"tags": array(like("^[a-z]{2,6}$"), 0, 3)}},
        ),
    ),
]

UNICODE = [
    Case("eine Person auf Deutsch", closed({"Name": text(16), "Größe": whole(40, 220)})),
    Case("une ville en français", closed({"ville": text(16), "été": enum("chaud", "très chaud")})),
    Case("a Japanese city", closed({"都市": enum("東京", "大阪", "京都"), "人口": whole(1, 40)})),
    Case("a mood in emoji", closed({"mood": enum("😀", "😢", "🤷‍♀️"), "why": text(20)})),
    Case("a Greek letter", closed({"γράμμα": enum("α", "β", "γ", "δ")})),
    Case("an Arabic greeting", closed({"تحية": const("مرحبا"), "count": whole(1, 3)})),
    Case(
        "a Russian fruit",
        closed({"фрукт": enum("яблоко", "груша"), "кг": number(0, 5, multipleOf=0.25)}),
    ),
    Case("a Hebrew day", closed({"יום": enum("ראשון", "שני", "שלישי")})),
    Case("a Korean menu", closed({"메뉴": array(enum("김치", "비빔밥", "불고기"), 1, 3)})),
    Case("a Hindi number", closed({"संख्या": enum("एक", "दो", "तीन")})),
    Case("a name in Cyrillic letters", closed({"имя": like("^[А-Я][а-я]{2,6}$")})),
    Case("a kana word", closed({"かな": like("^[ぁ-ん]{1,4}$")})),
    Case("three accented letters", like("^[àâäéèêëîïôöùûüç]{3}$")),
    Case("a maths fact", closed({"formula": enum("π ≈ 3.14", "e^{iπ} + 1 = 0"), "∞": BOOLEAN})),
    Case("a Turkish i", closed({"harf": enum("ı", "i", "İ", "I")})),
    Case("a flag", closed({"flag": enum("🇫🇷", "🇯🇵", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"), "land": text(14)})),
    Case("a combining accent", closed({"é": const("e\u0301"), "e\u0301": const("é")})),
    Case("escapes in a text", closed({"tab\t": enum("a\nb", 'say "hi"', "back\\slash", "\u2028")})),
]

TUPLES = [
    Case("a coordinate", fixed(LATITUDE, LONGITUDE)),
    Case("a name and an age", fixed(text(12), whole(0, 120))),
    Case("a colour in RGB", closed({"rgb": fixed(whole(0, 255), whole(0, 255), whole(0, 255))})),
    Case("a log line", fixed(enum("INFO", "WARN"), whole(0, 86399), text(30))),
    Case("a range", closed({"range": fixed(whole(0, 49), whole(50, 99))})),
    Case("a pair of pairs", fixed(fixed(whole(0, 9), text(4)), fixed(whole(0, 9), text(4)))),
    Case("edges of a graph", array(fixed(like("^[A-D]$"), like("^[A-D]$"), whole(1, 9)), 1, 4)),
    Case(
        "a head and a tail",
        {
            "type": "array",
            "prefixItems": [const("sum"), whole(0, 9)],
            "items": whole(0, 9),
            "minItems": 2,
            "maxItems": 5,
        },
    ),
    Case(
        "a tuple that may be short",
        {
            "type": "array",
            "prefixItems": [text(8), whole(0, 9), BOOLEAN],
            "items": False,
            "minItems": 1,
        },
    ),
    Case("a table row", fixed(whole(1, 999), text(14), any_of(NULL, text(8)), BOOLEAN)),
    Case("a chess square and a piece", fixed(like("^[a-h]$"), whole(1, 8), enum("♔", "♕", "♙"))),
    Case("a single thing in a list", fixed(closed({"only": text(10)}))),
    Case(
        "a small program",
        array(
            any_of(fixed(const("push"), whole(0, 9)), fixed(const("add")), fixed(const("pop"))),
            1,
            5,
        ),
    ),
    Case(
        "a box in two corners",
        closed({"box": fixed(fixed(whole(0, 9), whole(0, 9)), fixed(whole(0, 9), whole(0, 9)))}),
    ),
    Case("dates in parts", array(fixed(whole(1900, 2030), whole(1, 12), whole(1, 28)), 1, 3)),
    Case("an amount", fixed(whole(0, 9999), enum("EUR", "USD", "JPY"))),
]

APIS = [
    Case(
        "a tool call for the weather",
        closed(
            {
                "name": const("get_weather"),
                "arguments": closed({"city": text(16), "unit": enum("celsius", "fahrenheit")}),
            }
        ),
    ),
    Case(
        "a search query",
        closed(
            {
                "query": text(30),
                "filters": closed(
                    {"lang": enum("en", "de"), "year": whole(1990, 2024)}, optional=("year",)
                ),
                "page": whole(1, 10),
            }
        ),
    ),
    Case(
        "an order",
        closed(
            {
                "order_id": like("^ORD-[0-9]{6}$"),
                "lines": array(
                    closed({"sku": like("^[A-Z]{2}[0-9]{3}$"), "quantity": whole(1, 9)}), 1, 3
                ),
                "express": BOOLEAN,
            }
        ),
    ),
    Case(
        "an extracted contact",
        closed(
            {
                "name": text(20),
                "email": any_of(in_format("email", maxLength=24), NULL),
                "phones": array(like("^[0-9]{6,10}$"), 0, 2),
            }
        ),
    ),
    Case(
        "the sentiment of a review",
        closed(
            {
                "sentiment": enum("positive", "neutral", "negative"),
                "confidence": number(0, 1, multipleOf=0.125),
                "aspects": array(closed({"aspect": text(12), "score": whole(-2, 2)}), 0, 3),
            }
        ),
    ),
    Case(
        "a GeoJSON line",
        closed(
            {
                "type": const("Feature"),
                "geometry": closed(
                    {
                        "type": const("LineString"),
                        "coordinates": array(fixed(LONGITUDE, LATITUDE), 2, 3),
                    }
                ),
                "properties": closed({"name": text(16)}),
            }
        ),
    ),
    Case(
        "a webhook",
        closed(
            {
                "id": in_format("uuid"),
                "event": enum("created", "updated", "deleted"),
                "data": closed({"object": like("^[a-z]{3,8}$"), "live": BOOLEAN}),
            }
        ),
    ),
    Case(
        "a page of results",
        closed(
            {
                "items": array(closed({"id": whole(1, 999), "title": text(18)}), 0, 3),
                "total": whole(0, 999),
                "next": any_of(NULL, like("^[a-z0-9]{8}$")),
            }
        ),
    ),
    Case(
        "an error response",
        closed(
            {
                "error": closed(
                    {
                        "code": enum(400, 401, 403, 404, 429, 500),
                        "message": text(40),
                        "details": array(closed({"field": text(12), "issue": text(20)}), 0, 2),
                    }
                )
            }
        ),
    ),
    Case(
        "a chat message",
        closed(
            {
                "role": enum("user", "assistant", "system"),
                "content": any_of(
                    text(40), array(closed({"type": const("text"), "text": text(30)}), 1, 2)
                ),
            }
        ),
    ),
    Case(
        "a JSON patch",
        array(
            any_of(
                closed({"op": const("remove"), "path": like("^(/[a-z]{1,6}){1,2}$")}),
                closed(
                    {
                        "op": enum("add", "replace"),
                        "path": like("^(/[a-z]{1,6}){1,2}$"),
                        "value": any_of(whole(0, 99), text(10), NULL),
                    }
                ),
            ),
            1,
            3,
        ),
    ),
    Case(
        "a job for a scheduler",
        closed(
            {
                "name": like("^[a-z]{3,8}-[a-z]{3,8}$"),
                "cron": like(r"^([0-9]|[1-5][0-9]) (\*|1?[0-9]) \* \* [0-6]$"),
                "retries": whole(0, 5),
                "env": closed({"REGION": enum("eu", "us"), "DEBUG": enum("0", "1")}),
            }
        ),
    ),
    Case(
        "a metric sample",
        closed(
            {
                "metric": like("^[a-z]{2,8}(_[a-z]{2,8}){0,2}$"),
                "labels": {
                    "type": "object",
                    "patternProperties": {"^[a-z]{1,6}$": text(8)},
                    "additionalProperties": False,
                    "maxProperties": 2,
                },
                "value": number(0, 1000, multipleOf=0.25),
            }
        ),
    ),
    Case(
        "a calendar entry",
        closed(
            {
                "summary": text(24),
                "start": like("^2024-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T(0[0-9]|1[0-9]):00$"),
                "attendees": array(closed({"name": text(12), "accepted": BOOLEAN}), 0, 3),
                "repeats": any_of(
                    NULL, closed({"every": enum("day", "week"), "times": whole(1, 9)})
                ),
            }
        ),
    ),
    Case(
        "a product",
        closed(
            {
                "sku": like("^[A-Z0-9]{6}$"),
                "title": text(24),
                "price": closed({"amount": whole(1, 9999), "currency": enum("EUR", "USD")}),
                "sizes": array(enum("S", "M", "L"), 0, 3),
                "stock": any_of(NULL, whole(0, 999)),
            }
        ),
    ),
    Case(
        "a user account",
        closed(
            {
                "id": in_format("uuid"),
                "login": like("^[a-z][a-z0-9_]{2,11}$"),
                "born": any_of(NULL, like("^(19|20)[0-9]{2}-(0[1-9]|1[0-2])$")),
                "roles": array(enum("reader", "author", "admin"), 1, 2),
                "quota_gb": number(0, 64, multipleOf=0.5),
                "settings": closed(
                    {"theme": enum("dark", "light"), "language": like("^[a-z]{2}(-[A-Z]{2})?$")},
                    optional=("language",),
                ),
            },
            optional=("quota_gb",),
        ),
    ),
    Case(
        "the configuration of a service",
        closed(
            {
                "listen": closed({"address": in_format("ipv4"), "port": whole(1024, 65535)}),
                "log_level": enum("debug", "info", "warning", "error"),
                "timeouts": closed({"read_s": whole(1, 60), "write_s": whole(1, 60)}),
                "backends": array(
                    closed({"host": like("^[a-z]{3,8}-[0-9]{1,2}$"), "weight": whole(0, 10)}), 1, 3
                ),
                "tls": any_of(NULL, closed({"minimum": enum("1.2", "1.3"), "strict": BOOLEAN})),
            }
        ),
    ),
    Case(
        "a structured log entry with a stack trace",
        closed(
            {
                "at": in_format("date-time", maxLength=25),
                "severity": enum("INFO", "WARNING", "ERROR"),
                "message": text(40),
                "context": {
                    "type": "object",
                    "patternProperties": {"^[a-z]{2,8}$": any_of(whole(0, 999), text(10), NULL)},
                    "additionalProperties": False,
                    "maxProperties": 2,
                },
                "trace": array(ref("frame"), 0, 3),
            },
            optional=("context",),
            **{
                "$defs": {
                    "frame": closed(
                        {"file": like("^[a-z]{2,8}[.]py$"), "line": whole(1, 999)},
                    )
                }
            },
        ),
    ),
    Case(
        "named entities in a text",
        closed(
            {
                "entities": array(
                    closed(
                        {
                            "text": text(16),
                            "type": enum("PERSON", "PLACE", "ORG"),
                            "span": fixed(whole(0, 200), whole(0, 200)),
                        }
                    ),
                    1,
                    3,
                )
            }
        ),
    ),
    Case(
        "a plan of steps",
        closed(
            {
                "goal": text(30),
                "steps": array(
                    one_of(
                        closed({"do": const("search"), "query": text(20)}),
                        closed({"do": const("read"), "page": whole(1, 99)}),
                        closed({"do": const("stop")}),
                    ),
                    1,
                    3,
                ),
            }
        ),
    ),
    Case(
        "a diagnosis of a machine",
        closed(
            {
                "machine": like("^[A-Z][0-9]{3}$"),
                "checks": closed(
                    {
                        "fan": enum("ok", "worn", "dead"),
                        "disk": closed({"used_percent": whole(0, 100), "errors": whole(0, 99)}),
                    }
                ),
                "actions": array(enum("none", "clean", "replace"), 1, 2),
            }
        ),
    ),
]

LEVELS = {
    "flat": FLAT,
    "enums": ENUMS,
    "numbers": NUMBERS,
    "strings": STRINGS,
    "arrays": ARRAYS,
    "nested": NESTED,
    "alternatives": ALTERNATIVES,
    "references": REFERENCES,
    "unicode": UNICODE,
    "tuples": TUPLES,
    "apis": APIS,
}
"""From the easiest to the hardest."""

CASES = [case for level in LEVELS.values() for case in level]
