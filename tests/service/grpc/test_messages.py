"""The compiled messages are those of the .proto file, and those of the protocol, which tritonclient carries."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc
from tritonclient.grpc import model_config_pb2, service_pb2

from springtide.service.grpc.messages import DESCRIPTOR_FILE, FILE, METHODS

FOLDER = files("springtide.service.grpc")
THEIRS = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}


def test_the_compiled_file_is_that_of_the_proto(tmp_path):
    target = tmp_path / "compiled"
    with_proto = str(Path(str(FOLDER)))
    assert protoc.main(["protoc", f"-I{with_proto}", f"--descriptor_set_out={target}", "inference.proto"]) == 0
    made, kept = (
        descriptor_pb2.FileDescriptorSet.FromString(compiled)
        for compiled in (target.read_bytes(), FOLDER.joinpath(DESCRIPTOR_FILE).read_bytes())
    )
    assert made == kept, "compile inference.proto again: see docs/development.md"


def fields_of(message):
    return {
        field.name: (field.number, field.type, field.is_repeated, kind_of(field), oneof_of(field))
        for field in message.fields
    }


def kind_of(field):
    kind = field.message_type or field.enum_type
    return kind and kind.full_name


def oneof_of(field):
    return field.containing_oneof and field.containing_oneof.name


def assert_within(ours, theirs):
    known = fields_of(theirs)
    for name, facts in fields_of(ours).items():
        assert known.get(name) == facts, f"{ours.full_name}.{name}"
    for inner in ours.nested_types:
        assert_within(inner, theirs.nested_types_by_name[inner.name])


def test_names_and_numbers_are_those_of_the_protocol():
    assert FILE.package == service_pb2.DESCRIPTOR.package
    for name, message in FILE.message_types_by_name.items():
        assert_within(message, THEIRS[name])
    for name, enum in FILE.enum_types_by_name.items():
        assert enum.values_by_name.keys() == model_config_pb2.DESCRIPTOR.enum_types_by_name[name].values_by_name.keys()
        for value in enum.values:
            assert (
                model_config_pb2.DESCRIPTOR.enum_types_by_name[name].values_by_name[value.name].number == value.number
            )


def test_calls_are_those_of_the_protocol():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, ours in METHODS.items():
        kinds = [
            (
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            )
            for method in (ours, theirs[name])
        ]
        assert kinds[0] == kinds[1], name


def test_messages_of_inference_are_whole():
    """What a client may send with an inference has a field here, so that nothing of it is lost unseen."""
    for name in ("ModelInferRequest", "InferTensorContents", "InferParameter", "ModelInferResponse"):
        assert fields_of(FILE.message_types_by_name[name]) == fields_of(THEIRS[name])
