#!/bin/sh
# Writes the Python modules of serving.proto into the folder $2 (default: this repository), with the interpreter $1.
# That needs requirements.txt beside this file: modules of a newer generator refuse the grpcio and protobuf that
# `headrace[grpc]` accepts.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../../..
common=$("$1" -c 'import pathlib, google.rpc.status_pb2 as s; print(pathlib.Path(s.__file__).parents[2])')
exec "$1" -m grpc_tools.protoc -I "$root" -I "$common" --python_out="${2:-$root}" --pyi_out="${2:-$root}" \
  --grpc_python_out="${2:-$root}" serving/proto/v1/serving.proto
