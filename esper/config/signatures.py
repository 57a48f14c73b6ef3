"""Validation of a configuration against signatures, before anything is built.

A node with `_target_` is validated against the signature of its target, other nodes against a TypedDict (`schema.py`).
Each value is validated by pydantic against the annotation of its argument, without conversion.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from esper.config.suggest import suggest
from esper.plugins import check_optional_package, describe_import_error
from esper.renames import KEYS, TARGETS

HYDRA_KEYS = {  # of a node with `_target_`, besides the arguments of its target
    "_target_": str,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list[Any],
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
WORDS = {  # how messages name a type: one value, several values
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a finite number", "finite numbers"),
    str: ("a string", "strings"),
    NoneType: ("null", "null"),
}
BOUNDS = {Ge: ("ge", "of at least"), Gt: ("gt", "above"), Le: ("le", "of at most"), Lt: ("lt", "below")}
LONGEST = 80  # characters of a value in a message
LISTS = (list, tuple, set, frozenset, Set, Sequence, Collection, Iterable)
MAPPINGS = (dict, Mapping)


def check_value(key: str, value: Any, annotation: Any) -> None:
    """Raise a ValueError with key, value and what is allowed if a plain value does not fit an annotation."""
    if _is_node(value):
        _check_node(key, value, annotation)
    elif isinstance(value, dict) and (table := _member(annotation, is_typeddict)) is not None:
        _check_table(key, value, table)
    elif _has_names(value) and (mapping := _member(annotation, _is_mapping)) is not None:
        for name, part in value.items():
            check_value(f"{key}.{name}", part, _inner_types(mapping)[-1])
    elif isinstance(value, list) and any(map(_is_node, value)):
        element = _inner_types(_member(annotation, _is_list))[0]
        for index, part in enumerate(value):
            check_value(f"{key}[{index}]", part, element)
    elif not _is_valid(value, annotation):
        raise ValueError(f"{key}={_shorten(value)}: must be {describe(annotation)}.")


def check_names(target: str, names: Iterable[str], prefix: str = "") -> None:
    """Raise a ValueError for a name that is not an argument of a target; `prefix` is the key of its node."""
    signature = read_signature(target)
    arguments = signature.types
    for name in names:
        if signature.takes_any_name or name in arguments or name in HYDRA_KEYS:
            continue
        renamed = next((new for old, new in KEYS.items() if old.endswith(f".{name}") and new in arguments), None)
        hint = suggest(name, list(arguments)) if renamed is None else f"it is now {renamed}"
        raise ValueError(f"{prefix}{name}: is not an argument of {target}; {hint}.")


def check_target(key: str, target: Any) -> Any:
    """The object that `_target_` names; a ValueError if there is none, or if it was renamed."""
    if not isinstance(target, str):
        raise ValueError(f"{key}={_shorten(target)}: must be the full name of a class or function.")
    if target in TARGETS:
        raise ValueError(f"{key}={target}: is now {TARGETS[target]}.")
    check_optional_package(target, f"{key}={target}")
    try:
        found = resolve_name(target)
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        raise ValueError(f"{key}={target}: {_import_failure(target, error)}.") from None
    if not callable(found):
        raise ValueError(f"{key}={target}: must be the full name of a class or function.")
    return found


def _import_failure(target: str, error: BaseException) -> str:
    """Why a target cannot be imported; the nearest name if its module can."""
    module, _, name = target.rpartition(".")
    if module in sys.modules:
        public = [name for name in vars(sys.modules[module]) if not name.startswith("_")]
        return f"there is no such class or function; {suggest(name, public)}"
    return f"cannot be imported ({describe_import_error(error)})"


@dataclass(frozen=True)
class TargetSignature:
    """The annotations of a target's arguments, by name."""

    types: Mapping[str, Any]
    takes_any_name: bool  # by **kwargs without names, or because the target has no signature


@cache
def read_signature(target: str) -> TargetSignature:
    found = resolve_name(target)
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return TargetSignature({}, takes_any_name=True)  # some types of Python itself
    try:
        hints = get_type_hints(found.__init__ if inspect.isclass(found) else found, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}  # some annotations are imported for type checkers only, and partial functions have none
    types: dict[str, Any] = {}
    takes_any_name = False
    for name, parameter in parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is not parameter.VAR_KEYWORD:
            types[name] = hint
        elif get_origin(hint) is Unpack:
            types |= get_type_hints(get_args(hint)[0], include_extras=True)
        else:
            takes_any_name = True
    return TargetSignature(types, takes_any_name)


def describe(annotation: Any, *, plural: bool = False) -> str:
    """What an annotation allows, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation][plural]
    if annotation is Path:
        return describe(str, plural=plural)
    if origin is Annotated:
        words = " ".join([describe(arguments[0], plural=plural), *_describe_constraints(arguments[1:])])
        return words.replace("finite ", "") if AllowInfNan() in arguments[1:] else words
    if origin is Literal:
        return f"one of {', '.join(dict.fromkeys('null' if option is None else str(option) for option in arguments))}"
    if origin in (Union, UnionType):
        return ", or ".join(dict.fromkeys(describe(member, plural=plural) for member in _plain_members(annotation)))
    if _is_list(annotation):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        return f"a list of {count}{describe(_inner_types(annotation)[0], plural=True)}"
    if _is_mapping(annotation):
        return f"{describe(_inner_types(annotation)[-1], plural=True)} by name"
    if annotation in (Any, object):
        return "any values" if plural else "any value"
    return "a node with a _target_" if not plural else "nodes with a _target_"


def _describe_constraints(constraints: Sequence[Any]) -> Iterator[str]:
    bounds = [(kind, bound) for bound in constraints for kind in BOUNDS if isinstance(bound, kind)]
    if bounds:
        yield " and ".join(f"{BOUNDS[kind][1]} {getattr(bound, BOUNDS[kind][0])}" for kind, bound in bounds)
    if any(isinstance(constraint, MinLen) for constraint in constraints):
        yield "that is not empty"


def _check_node(key: str, node: Mapping[str, Any], annotation: Any) -> None:
    """Check a node with `_target_`: its target, what that builds, and its arguments."""
    target = node["_target_"]
    built = _built_type(check_target(f"{key}._target_", target))
    allowed = [member for member in _members(annotation) if member is not NoneType]
    if inspect.isclass(built) and all(_excludes(member, built) for member in allowed):
        raise ValueError(f"{key}._target_={target}: must build {_class_names(allowed)}.")
    names = [name for name in node if name not in HYDRA_KEYS]
    check_names(target, names, f"{key}.")
    for name, kind in HYDRA_KEYS.items():
        if name in node:
            check_value(f"{key}.{name}", node[name], kind)
    types = read_signature(target).types
    for name in names:
        check_value(f"{key}.{name}", node[name], types.get(name, Any))


def _check_table(key: str, value: Mapping[str, Any], table: Any) -> None:
    hints = get_type_hints(table, include_extras=True)
    types = {name: get_args(hint)[0] if get_origin(hint) is NotRequired else hint for name, hint in hints.items()}
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in types:
            raise ValueError(f"{prefix}{name}: there is no such key; {suggest(str(name), list(types))}.")
    for name in (name for name in types if name in value):  # a key comes before those that refer to it
        check_value(f"{prefix}{name}", value[name], types[name])


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _is_mapping(annotation: Any) -> bool:
    return (get_origin(annotation) or annotation) in MAPPINGS


def _is_list(annotation: Any) -> bool:
    return (get_origin(annotation) or annotation) in LISTS


def _inner_types(annotation: Any) -> tuple[Any, ...]:
    """The arguments of a list or mapping; Any if it has none."""
    return get_args(annotation) or (Any, Any)


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_valid(value: Any, annotation: Any) -> bool:
    try:
        _adapter(annotation).validate_python(value)
    except (ValidationError, OverflowError):  # a whole number may be too large for a float
        return False
    return True


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_plain(annotation), config=STRICT)


def _plain(annotation: Any) -> Any:
    """The annotation of the plain values that an argument takes; objects are built from nodes, so they are left out."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is int:
        return Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]  # torch has no larger ones
    if annotation in (*WORDS, Any, object) or origin is Literal:
        return annotation
    if annotation is Path:
        return str
    if origin is Annotated:
        return Annotated[_plain(arguments[0]), *arguments[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(map(_plain, arguments))]  # noqa: UP007  # members are not known here
    if origin is tuple and arguments:
        members = tuple(part if part is Ellipsis else _plain(part) for part in arguments)
        return Annotated[tuple[members], BeforeValidator(_as_tuple)]  # type: ignore[valid-type]
    if _is_list(annotation):
        return list[_plain(_inner_types(annotation)[0])]  # type: ignore[misc]
    if _is_mapping(annotation):
        key, value = map(_plain, _inner_types(annotation))
        return dict[key, value]  # type: ignore[valid-type]
    return _Built if inspect.isclass(annotation) or origin is not None else Any  # unknown kinds allow any value


class _Built:
    """Stands for objects that are built from nodes: no plain value is one."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _member(annotation: Any, is_wanted: Callable[[Any], bool]) -> Any:
    """The first member that is wanted; None if there is none."""
    return next(filter(is_wanted, _members(annotation)), None)


def _plain_members(annotation: Any) -> list[Any]:
    """The members that plain values can have, or all if there is none but null."""
    plain = [member for member in get_args(annotation) if _plain(member) is not _Built]
    return plain if set(plain) - {NoneType} else list(get_args(annotation))


def _built_type(found: Any) -> Any:
    """What a target builds: the class itself, or the annotation of what a function returns."""
    return found if inspect.isclass(found) else getattr(found, "__annotations__", {}).get("return")


def _excludes(member: Any, built: type) -> bool:
    """Whether an annotation cannot hold an object of a class; protocols and functions may hold any."""
    kind = get_origin(member) or member
    if is_typeddict(kind):
        return True
    is_protocol = getattr(kind, "_is_protocol", False)  # typing.is_protocol needs Python 3.13
    is_open = not inspect.isclass(kind) or kind in (Any, object, Callable) or is_protocol
    return not is_open and not issubclass(built, kind)


def _class_names(members: Sequence[Any]) -> str:
    return " or ".join(getattr(member, "__name__", str(member)) for member in members)


def _shorten(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
