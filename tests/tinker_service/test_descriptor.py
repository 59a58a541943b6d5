"""The messages are the SDK's own: compared in the SDK's environment, where `make setup-tinker` has made one."""

import json
import subprocess
from pathlib import Path

import pytest

from cua_rl.tinker_service.messages import file_descriptor

SDK_PYTHON = Path(__file__).parents[2] / ".venv-tinker" / "bin" / "python"
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


@pytest.mark.skipif(not SDK_PYTHON.exists(), reason="needs the SDK's environment: make setup-tinker")
def test_names_numbers_and_types_are_those_of_the_sdk() -> None:
    sent = file_descriptor().SerializeToString()
    done = subprocess.run([SDK_PYTHON, "-c", _SHOW], input=sent, stdout=subprocess.PIPE, check=True)
    theirs, ours = json.loads(done.stdout)
    assert len(ours) > 50
    assert {name: theirs.get(name) for name in ours} == ours
