"""The messages of `inference.proto`, from its compiled descriptor.

They are in a pool of their own, so that they can stand beside a client library that brings the same names.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
DESCRIPTOR_FILE = "inference.binpb"


def _file_descriptor() -> Any:
    """The descriptor of the file, in a new pool."""
    compiled = files(__package__).joinpath(DESCRIPTOR_FILE).read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


FILE: Any = _file_descriptor()
# The descriptors of the calls by name.
METHODS: Any = FILE.services_by_name["GRPCInferenceService"].methods_by_name
_TYPES: Any = FILE.message_types_by_name

ModelInferRequest: Any = message_factory.GetMessageClass(_TYPES["ModelInferRequest"])
ModelInferResponse: Any = message_factory.GetMessageClass(_TYPES["ModelInferResponse"])
ModelStreamInferResponse: Any = message_factory.GetMessageClass(_TYPES["ModelStreamInferResponse"])


def request_class(call: str) -> Any:
    """The class of the requests of a call."""
    return message_factory.GetMessageClass(METHODS[call].input_type)


def response_class(call: str) -> Any:
    """The class of the answers of a call."""
    return message_factory.GetMessageClass(METHODS[call].output_type)
