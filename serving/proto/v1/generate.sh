#!/bin/sh
# Writes the Python modules of serving.proto into the tree $2 (default: this repository), with the interpreter $1.
# It must have requirements.txt beside this file: modules of a newer generator refuse a grpcio and a protobuf that
# `headrace[grpc]` accepts.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
out=${2:-$root}
common=$("$1" -c 'import pathlib, google.rpc.status_pb2 as s; print(pathlib.Path(s.__file__).parents[2])')
"$1" -m grpc_tools.protoc -I "$root" -I "$common" --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  serving/proto/v1/serving.proto
cd "$out/serving/proto/v1"
"$1" - "$here/serving.proto" serving_pb2.py serving_pb2.pyi serving_pb2_grpc.py > generated.sha256 <<'END'
import hashlib, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
END
