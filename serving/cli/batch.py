"""`headrace batch`: OpenAI's batch lines in and out, through an engine in this process or a server's."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.run import Configs
from configs.scheduling import MAX_PRIORITY
from configs.server import ServerConfig
from serving.cli.parser import UsageError
from serving.request import RequestError

if TYPE_CHECKING:
    from serving.jobs.lines import BatchLine, LineAnswer

KEY_VARIABLE = "HEADRACE_API_KEY"

Answers = AsyncGenerator[tuple[str, "LineAnswer"], None]  # with their custom_id, as they come


def run_batch(args: argparse.Namespace, configs: Configs) -> int:
    """Answer every line that has no answer in the output yet. Returns the exit status: 1 if a request failed.

    Raises UsageError, RequestError or OSError, the first two before anything runs.
    """
    if not 1 <= args.max_in_flight <= 2**16:
        raise UsageError(f"--max_in_flight must be in [1, {2**16}], got {args.max_in_flight}")
    if args.server is None:
        source = configs.run.model_source
        config = dataclasses.replace(configs.server, served_model_name=args.served_model_name)

        def answers(lines: Iterator[BatchLine]) -> Answers:
            return _local_answers(lines, source, configs, config, args.max_in_flight)
    else:
        if importlib.util.find_spec("grpc") is None:
            raise UsageError("--server needs grpcio: pip install 'headrace[grpc]'")
        config = configs.server
        key = args.api_key or os.environ.get(KEY_VARIABLE)

        def answers(lines: Iterator[BatchLine]) -> Answers:
            return _remote_answers(lines, args.server, key, args.max_in_flight)

    return complete_file(args.input, args.output, config, answers, show_progress=sys.stderr.isatty())


def complete_file(
    source: Path,
    destination: Path,
    config: ServerConfig,
    answers: Callable[[Iterator[BatchLine]], Answers],
    *,
    show_progress: bool,
) -> int:
    from tqdm import tqdm

    from serving.jobs.appending import LineFile
    from serving.jobs.lines import check_lines, output_line

    with source.open("rb") as file:
        num_lines, problems = check_lines(file, config, None, 1)
        if problems:
            place = source if problems[0].line is None else f"{source} line {problems[0].line}"
            raise RequestError(str(place), problems[0].message)
        output = LineFile(destination)
        with contextlib.closing(output):
            done = {*output.custom_ids}
            file.seek(0)
            todo = [line for line in _read(file, config) if line.custom_id not in done]
            bar = tqdm(
                total=num_lines,
                initial=num_lines - len(todo),
                disable=not show_progress,
                unit="request",
                file=sys.stderr,
            )
            num_answered, num_failed = 0, 0

            async def run() -> None:
                nonlocal num_answered, num_failed
                async with contextlib.aclosing(answers(iter(todo))) as items:
                    async for custom_id, answer in items:
                        output.add(output_line(custom_id, answer))
                        num_answered += 1
                        num_failed += answer.is_error
                        bar.update()

            with bar:
                if todo:
                    asyncio.run(run())
    num_missing = len(todo) - num_answered
    print(
        f"{num_lines} requests: {num_lines - len(todo)} had answers, {num_answered} were answered now, "
        f"{num_failed} of these with an error, {num_missing} have none",
        file=sys.stderr,
    )
    return 1 if num_failed or num_missing else 0


def _read(file: Any, config: ServerConfig) -> Iterator[BatchLine]:
    from serving.jobs.lines import input_lines, read_line

    for _, data in input_lines(file, config):
        yield read_line(data, config)


async def _local_answers(
    lines: Iterator[BatchLine], source: str, configs: Configs, config: ServerConfig, max_in_flight: int
) -> Answers:
    from serving.api.errors import OverloadedError
    from serving.api.service import Service
    from serving.async_engine import AsyncEngine
    from serving.display import ProgressReporter
    from serving.jobs.lines import BATCH_CONTEXT, answer_request

    engine = AsyncEngine.from_source(
        source, configs.engine, configs.mesh, scheduling=configs.scheduling, progress=ProgressReporter(True)
    )
    service = Service(config, source)
    try:
        service.attach(engine)

        async def answer(line: BatchLine) -> tuple[str, LineAnswer]:
            while True:
                try:
                    return line.custom_id, await answer_request(
                        service, line.url, line.body, context=BATCH_CONTEXT, may_be_overloaded=True
                    )
                except OverloadedError as error:  # by rate limits
                    await asyncio.sleep(error.retry_after_s)

        running: set[asyncio.Task[tuple[str, LineAnswer]]] = set()
        try:
            for line in lines:
                running.add(asyncio.ensure_future(answer(line)))
                if len(running) >= max_in_flight:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    finally:
        service.close()
        await asyncio.to_thread(engine.close)


async def _remote_answers(lines: Iterator[BatchLine], target: str, key: str | None, max_in_flight: int) -> Answers:
    import grpc

    from serving.jobs.lines import LineAnswer
    from serving.proto.v1 import serving_pb2 as pb
    from serving.proto.v1.serving_pb2_grpc import ServingStub

    metadata: Sequence[tuple[str, str]] = () if key is None else (("authorization", f"Bearer {key}"),)
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    room = asyncio.Semaphore(max_in_flight)

    async def write(stream: Any) -> None:
        for line in lines:
            await room.acquire()
            body = {"priority": MAX_PRIORITY, **line.body}
            http = pb.HttpRequest(url=line.url, body=json.dumps(body, ensure_ascii=False).encode())
            await stream.write(pb.GenerateBatchRequest(id=line.custom_id, http=http))
        await stream.done_writing()

    async with grpc.aio.insecure_channel(target, options=unlimited) as channel:
        stream = ServingStub(channel).GenerateBatch(metadata=metadata)
        writing = asyncio.ensure_future(write(stream))
        try:
            async for response in stream:
                room.release()
                if response.WhichOneof("result") == "error":  # not the request's fault: it has no answer yet
                    print(f"headrace: {response.id}: {response.error.message}", file=sys.stderr)
                    continue
                http = response.http
                yield (
                    response.id,
                    LineAnswer(status_code=http.status_code, request_id=http.request_id, body=json.loads(http.body)),
                )
        except grpc.aio.AioRpcError as error:
            raise OSError(f"server {target}: {error.code().name}: {error.details()}") from None
        finally:
            stream.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
