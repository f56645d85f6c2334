"""`build`: the dataclass is the schema, and every refusal names the full key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lit_refusion.errors import UserError
from lit_refusion.schema import build


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int
    rates: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Outer:
    steps: int
    rate: float
    name: str
    is_on: bool
    kind: Literal["left", "right"]
    limit: int | None
    devices: int | str
    sizes: tuple[int, ...]
    extra: dict[str, int]
    free: Any
    inner: Inner
    inners: tuple[Inner, ...]


@dataclass(frozen=True, kw_only=True)
class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Square(Shape):
    side: float

    def area(self) -> float:
        return self.side**2


class NotADataclass:
    pass


GOOD: dict[str, Any] = {
    "steps": 3,
    "rate": 1,  # YAML writes whole numbers for floats
    "name": "a",
    "is_on": True,
    "kind": "left",
    "limit": None,
    "devices": "auto",
    "sizes": [4, 8],
    "extra": {"a": 1},
    "free": [1, {"b": 2}],
    "inner": {"depth": 2, "rates": [0, 0.5]},
    "inners": [{"depth": 1, "rates": [0, 1]}],
}


def test_every_field_becomes_its_type() -> None:
    built = build(GOOD, Outer)

    assert built == Outer(
        steps=3,
        rate=1.0,
        name="a",
        is_on=True,
        kind="left",
        limit=None,
        devices="auto",
        sizes=(4, 8),
        extra={"a": 1},
        free=[1, {"b": 2}],
        inner=Inner(depth=2, rates=(0.0, 0.5)),
        inners=(Inner(depth=1, rates=(0.0, 1.0)),),
    )
    assert type(built.rate) is float
    assert type(built.inner.rates[0]) is float


@pytest.mark.parametrize(("key", "value"), [("limit", 5), ("devices", 2), ("sizes", []), ("free", None)])
def test_alternatives_of_a_field_are_accepted(key: str, value: Any) -> None:
    expected = tuple(value) if isinstance(value, list) else value

    assert getattr(build({**GOOD, key: value}, Outer), key) == expected


WRONG = {
    "text for int": ({"steps": "many"}, ["job.steps='many'", "whole number", "found str"]),
    "float for int": ({"steps": 1.5}, ["job.steps=1.5", "whole number", "found float"]),
    "bool for int": ({"steps": True}, ["job.steps=True", "whole number", "found bool"]),
    "null for int": ({"steps": None}, ["job.steps=None", "whole number"]),
    "text for float": ({"rate": "fast"}, ["job.rate='fast'", "expected a number"]),
    "bool for float": ({"rate": False}, ["job.rate=False", "expected a number"]),
    "int for text": ({"name": 7}, ["job.name=7", "expected text"]),
    "int for bool": ({"is_on": 1}, ["job.is_on=1", "bool"]),
    "unknown choice": ({"kind": "up"}, ["job.kind=up", "left, right"]),
    "text for optional int": ({"limit": "none"}, ["job.limit='none'", "whole number"]),
    "no alternative fits": ({"devices": 1.5}, ["job.devices=1.5", "whole number"]),
    "scalar for a list": ({"sizes": 4}, ["job.sizes=4", "a list"]),
    "wrong item of a list": ({"sizes": [4, "x"]}, ["job.sizes[1]='x'", "whole number"]),
    "scalar for a dict": ({"extra": 3}, ["job.extra=3", "group of settings"]),
    "wrong value of a dict": ({"extra": {"a": "b"}}, ["job.extra.a='b'", "whole number"]),
    "scalar for a dataclass": ({"inner": 3}, ["job.inner=3", "group of settings"]),
    "wrong length of a pair": ({"inner": {"depth": 1, "rates": [1]}}, ["job.inner.rates", "expected 2 values"]),
    "nested wrong type": ({"inner": {"depth": "x", "rates": [1, 2]}}, ["job.inner.depth='x'"]),
    "nested missing": ({"inner": {"rates": [1, 2]}}, ["job.inner.depth", "missing"]),
    "nested unknown": ({"inner": {"depth": 1, "rates": [1, 2], "dept": 1}}, ["job.inner.dept=1", "'depth'"]),
    "in a list of groups": ({"inners": [{"depth": 1, "rates": [0, 1]}, {"depth": 1}]}, ["job.inners[1].rates"]),
    "unknown, close to a name": ({"step": 3}, ["unknown setting job.step=3", "did you mean 'steps'?"]),
    "unknown, close to none": ({"zzz": 3}, ["unknown setting job.zzz=3", "it takes", "steps", "inner"]),
}


@pytest.mark.parametrize(("change", "parts"), WRONG.values(), ids=WRONG)
def test_wrong_input_names_the_full_key(change: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build({**GOOD, **change}, Outer, key="job")

    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_key_is_named() -> None:
    with pytest.raises(UserError, match=r"^job\.rate: missing; set it, Outer has no default"):
        build({name: value for name, value in GOOD.items() if name != "rate"}, Outer, key="job")


def test_top_level_keys_have_no_prefix() -> None:
    with pytest.raises(UserError, match=r"^steps='x'"):
        build({**GOOD, "steps": "x"}, Outer)


@pytest.mark.parametrize("node", [3, None, "text", [1]])
def test_not_a_group(node: Any) -> None:
    with pytest.raises(UserError, match=r"job=.*expected a group of settings"):
        build(node, Outer, key="job")


def test_target_names_the_class() -> None:
    shape = build({"_target_": f"{__name__}.Square", "side": 3}, Shape)

    assert type(shape) is Square
    assert shape.area() == 9.0


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        (f"{__name__}.Inner", ["must be a subclass of Shape"]),
        (f"{__name__}.test_target_names_the_class", ["must be a subclass of Shape"]),
        (f"{__name__}.Sqare", ["cannot import it", "Sqare"]),
        ("no_such_package.Square", ["cannot import it", "no_such_package", "installed package"]),
        ("Square", ["cannot import it"]),
        (3, ["cannot import it"]),
    ],
)
def test_wrong_target_is_refused(target: Any, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build({"_target_": target, "side": 3}, Shape, key="job.shape")

    for part in [f"job.shape._target_={target}", *parts]:
        assert part in str(caught.value)


def test_target_must_be_a_dataclass() -> None:
    with pytest.raises(UserError, match=r"job\._target_=.*NotADataclass must be a dataclass"):
        build({"_target_": f"{__name__}.NotADataclass"}, NotADataclass, key="job")


def test_field_errors_of_a_target_carry_the_key() -> None:
    with pytest.raises(UserError, match=r"job\.shape\.side='x': expected a number"):
        build({"_target_": f"{__name__}.Square", "side": "x"}, Shape, key="job.shape")
