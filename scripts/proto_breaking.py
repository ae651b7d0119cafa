"""Compares two versions of the protobuf contract and lists what would break a peer.

Invariants: both sides are complete ``FileDescriptorSet`` messages. A change is breaking when bytes or
calls of the old contract would be misread or refused by the new one: a file, message, enum, service or
rpc that is gone; a field that is gone without its number being reserved, or changed its name, type,
cardinality or oneof; an enum value that is gone or renumbered; an rpc with other types or streaming.
Additions are never breaking.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

Messages = dict[str, DescriptorProto]
Enums = dict[str, EnumDescriptorProto]
Services = dict[str, ServiceDescriptorProto]


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Every breaking change from ``old`` to ``new``, one readable line each; empty when compatible."""
    return list(
        chain(
            _removed("file", (f.name for f in old.file), {f.name for f in new.file}),
            _compare_messages(_messages(old), _messages(new)),
            _compare_enums(_enums(old), _enums(new)),
            _compare_services(_services(old), _services(new)),
        )
    )


def _removed(kind: str, names: Iterable[str], kept: Iterable[str]) -> Iterator[str]:
    return (f"{kind} {name} was removed" for name in names if name not in kept)


def _compare_messages(old: Messages, new: Messages) -> Iterator[str]:
    yield from _removed("message", old, new)
    for name in old.keys() & new.keys():
        yield from _compare_fields(name, old[name], new[name])


def _compare_fields(message: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    reserved = {n for span in new.reserved_range for n in range(span.start, min(span.end, span.start + 4096))}
    for field in old.field:
        where = f"{message}.{field.name} (= {field.number})"
        if (now := fields.get(field.number)) is None:
            if field.number not in reserved:
                yield f"field {where} was removed and its number is not reserved"
        elif (was := _shape(field, old)) != (is_now := _shape(now, new)):
            yield f"field {where} changed from {was} to {is_now}"


def _shape(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """All that a peer relies on: name, cardinality, type and the oneof it belongs to."""
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    kind = field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.proto3_optional:
        return f"explicit {kind} {field.name}"
    if field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    return f"{label} {kind} {field.name}"


def _compare_enums(old: Enums, new: Enums) -> Iterator[str]:
    yield from _removed("enum", old, new)
    for name in old.keys() & new.keys():
        numbers = {value.name: value.number for value in new[name].value}
        for value in old[name].value:
            if numbers.get(value.name) != value.number:
                yield f"enum value {name}.{value.name} = {value.number} was removed or renumbered"


def _compare_services(old: Services, new: Services) -> Iterator[str]:
    yield from _removed("service", old, new)
    for name in old.keys() & new.keys():
        before, after = _signatures(old[name]), _signatures(new[name])
        yield from _removed("rpc", (f"{name}.{rpc}" for rpc in before), {f"{name}.{rpc}" for rpc in after})
        for rpc in before.keys() & after.keys():
            if before[rpc] != after[rpc]:
                yield f"rpc {name}.{rpc} changed from {before[rpc]} to {after[rpc]}"


def _signatures(service: ServiceDescriptorProto) -> dict[str, str]:
    return {
        rpc.name: f"{'stream ' * rpc.client_streaming}{rpc.input_type} -> "
        f"{'stream ' * rpc.server_streaming}{rpc.output_type}"
        for rpc in service.method
    }


def _messages(contract: FileDescriptorSet) -> Messages:
    found: Messages = {}
    pending = [(file.package, message) for file in contract.file for message in file.message_type]
    while pending:
        scope, message = pending.pop()
        name = f"{scope}.{message.name}"
        found[name] = message
        pending += [(name, nested) for nested in message.nested_type]
    return found


def _enums(contract: FileDescriptorSet) -> Enums:
    top = {f"{file.package}.{enum.name}": enum for file in contract.file for enum in file.enum_type}
    nested = {
        f"{name}.{enum.name}": enum
        for name, message in _messages(contract).items()
        for enum in message.enum_type
    }
    return top | nested


def _services(contract: FileDescriptorSet) -> Services:
    return {f"{file.package}.{service.name}": service for file in contract.file for service in file.service}
