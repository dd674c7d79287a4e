"""Metadata of a configuration field: help, bounds, choices; and sizes in bytes, as numbers or text such as "2GiB"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvmosaic.errors import InvalidConfig

ENV_PREFIX = "KVMOSAIC_"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_BYTES = 2**50


def parse_bytes(size: int | str) -> int:
    """Reads a size: a whole number of bytes, or text such as "2GiB", "512 MB" or "1.5G" (K, M, G, T: powers of 1024).

    Raises:
        InvalidConfig: not a size, not positive, or above 1 PiB.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
        if match is None or match[2].upper() not in _UNITS:
            raise InvalidConfig(
                f"{size[:99]!r} is not a size; write a number of bytes, or for example '2GiB' or '512MB'"
            )
        number = min(float(match[1]), float(_MAX_BYTES + 1))
        size = int(number * _UNITS[match[2].upper()])
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _MAX_BYTES:
        raise InvalidConfig(f"a size must be a whole number of bytes between 1 and 2**50 (1 PiB), got {size!r}")
    return size


def parse_optional_bytes(size: int | str | None) -> int:
    """Reads a size, or None, 0 and "0" as 0.

    Raises:
        InvalidConfig: see `parse_bytes`.
    """
    if size is None or (size == 0 and not isinstance(size, bool)) or (isinstance(size, str) and size.strip() == "0"):
        return 0
    return parse_bytes(size)


class Unset(str):
    """A default that was not set: equal to its text, and distinguished from it by its type.

    So a model's profile may change what the caller did not choose. `dataclasses.replace` keeps it as it is.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a configuration, except for its name.

    A value is checked by its bounds, its choices and `check`, in Python, on the command line and in the server.
    """

    help: str
    """One or more sentences. Other settings are named in backticks; a flag replaces them by their flags."""
    panel: str
    """Heading under which help texts show it."""
    default: Any = MISSING
    annotation: Any = None
    """The type of the field."""
    low: float | None = None
    """The smallest value."""
    above: float | None = None
    """The value must be above this."""
    high: float | None = None
    """The largest value."""
    below: float | None = None
    """The value must be below this."""
    max_length: int | None = None
    """Maximum characters of a flag's value."""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None
    """The values; a function where they may grow. Default: the members of a `Literal`."""
    flag_choices: Callable[[], tuple[str, ...]] | None = None
    """The values of a flag, where Python takes others as well."""
    check: Callable[[Any], object] | None = None
    """A function that raises InvalidConfig for a wrong value."""
    metavar: str = ""
    """Placeholder of the value in help texts: SIZE, URL, FILE, …"""
    off: str = ""
    """What happens with None, which is 0 as a flag."""
    unset: str = ""
    """What is used if nothing is given, where that is not a value."""
    flag_alias: str = ""
    """Another name of its flag."""
    flag_default: str | None = None
    """The default of a flag, where Python has another type."""
    is_secret: bool = False
    """Whether its value is never shown."""

    @property
    def is_optional(self) -> bool:
        """Whether None is a value."""
        return NoneType in get_args(self.annotation)

    @property
    def kind(self) -> Any:
        """The type without None: int, float, bool, str, tuple, or a `Literal`; str where several are possible."""
        kinds = [part for part in get_args(self.annotation) if part is not NoneType]
        if get_origin(self.annotation) in (Literal, tuple) or not kinds:
            return tuple if get_origin(self.annotation) is tuple else self.annotation
        literals = [part for part in kinds if get_origin(part) is Literal]
        return literals[0] if literals else kinds[0] if len(kinds) == 1 else str

    def names(self) -> tuple[str, ...]:
        """The values that a flag may have; empty: not a choice."""
        chosen = self.flag_choices or self.choices
        if chosen is None:
            return tuple(get_args(self.kind)) if get_origin(self.kind) is Literal else ()
        return chosen() if callable(chosen) else chosen

    def flag_help(self) -> str:
        """The help text of an option, without a default that is a value."""
        text = f"{self.help.removesuffix('.')}; 0: {self.off}." if self.off else self.help
        text = re.sub(r"`([a-z_]+)`", lambda match: flag_of(match[1]), text)
        return f"{text} Default: {self.unset}." if self.unset else text

    def parse(self, label: str, text: str) -> Any:
        """Reads a text, such as that of the environment variable `label`.

        Raises:
            InvalidConfig: not one of the choices; or not a whole number, or out of its bounds.
        """
        if self.kind is not int:
            self.validate(label, text)
            return text
        assert self.low is not None and self.high is not None
        low = 0 if self.off else self.low
        if not (text.isascii() and text.isdigit() and len(text) <= 18 and low <= int(text) <= self.high):
            raise InvalidConfig(f"{label} is {text!r:.80}; give a whole number from {low} to {self.high}")
        return int(text)

    def validate(self, name: str, value: Any) -> None:
        """Checks a value.

        Raises:
            InvalidConfig: the value is not one of the choices, or out of its bounds.
        """
        if value is None and self.is_optional:
            return
        if self.check is not None:
            self.check(value)
        elif self.choices is not None or get_origin(self.kind) is Literal:
            _check_choice(name, value, self.choices or get_args(self.kind))
        elif self.kind is int:
            assert self.low is not None and self.high is not None
            _check_range(name, value, self.low, self.high)
        elif self.kind is float:
            self._check_number(name, value)

    def _check_number(self, name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        assert self.above is not None
        if is_number and value > self.above:
            if self.high is not None and value <= self.high:
                return
            if self.below is not None and value < self.below:
                return
        limit = f"below {self.below:g}" if self.high is None else f"at most {self.high:g}"
        raise InvalidConfig(f"{name} must be a number above {self.above:g} and {limit}, got {value!r}")


def setting(default: Any, **about: Any) -> Any:
    """A dataclass field with its `Setting`."""
    return field(
        default=default, repr=not about.get("is_secret", False), metadata={"setting": Setting(default=default, **about)}
    )


@cache
def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a configuration by the name of their field."""
    types = get_type_hints(config)
    return {each.name: replace(each.metadata["setting"], annotation=types[each.name]) for each in fields(config)}


def validate_settings(config: Any) -> None:
    """Checks every field of a configuration.

    Raises:
        InvalidConfig: the first wrong value, with its name, its limit and the way out.
    """
    for name, each in settings_of(config.__class__).items():
        each.validate(name, getattr(config, name))


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def _check_choice(name: str, value: object, choices: tuple[str, ...] | Callable[[], tuple[str, ...]]) -> None:
    names = choices() if callable(choices) else choices
    if value not in names:
        raise InvalidConfig(f"{name} is {value!r}; choose " + " or ".join(repr(choice) for choice in names))


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(f"{name} must be a whole number between {low} and {high}, got {value!r}")
