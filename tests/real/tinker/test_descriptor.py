"""The service's messages are the SDK's own."""

import json
import subprocess

from cua_rl.tinker_service.messages import file_descriptor
from tests.real.tinker.conftest import ROOT

SDK_PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
_SHOW = """
import json, sys
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tinker.proto import tinker_public_pb2
theirs, ours = FileDescriptorProto(), FileDescriptorProto.FromString(sys.stdin.buffer.read())
tinker_public_pb2.DESCRIPTOR.CopyToProto(theirs)

def facts(file):
    found = {enum.name: {value.name: value.number for value in enum.value} for enum in file.enum_type}
    for message in file.message_type:
        oneofs = [one.name for one in message.oneof_decl]
        nested = [(f"{message.name}.{one.name}", one) for one in message.nested_type]
        for kind, of in [(message.name, message), *nested]:
            for field in of.field:
                oneof = oneofs[field.oneof_index] if field.HasField("oneof_index") else None
                found[f"{kind}.{field.name}"] = [field.number, field.type, field.label, field.type_name, oneof]
    return found

print(json.dumps([facts(theirs), facts(ours)]))
"""


def test_names_numbers_and_types_are_those_of_the_sdk() -> None:
    sent = file_descriptor().SerializeToString()
    done = subprocess.run([SDK_PYTHON, "-c", _SHOW], input=sent, stdout=subprocess.PIPE, check=True)
    theirs, ours = json.loads(done.stdout)
    assert len(ours) > 50
    assert {name: theirs.get(name) for name in ours} == ours
