"""`vllm.grpc.engine.VllmEngine`, the interface that gateways speak to engines (the extra `smg`).

A gateway applies chat templates, encodes and decodes; this side takes and gives token ids. Scalars of its settings
have no presence: 0 stands for a setting's neutral value where 0 itself means nothing. The model's own defaults are the
gateway's to apply; `GetModelInfo` gives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto import vllm_engine_pb2 as pb

from serving.api.errors import NotFoundError, UnavailableError
from serving.api.grpc_calls import Call, Method
from serving.api.responses import check_end
from serving.api.schema import CompletionCall, parse_completion, read_request_id
from serving.api.service import Service
from serving.request import CompletionOutput, RequestError, RequestOutput, TokenLogprob

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["VllmEngine"]
CHUNK_BYTES = 2**20  # of the tokenizer's files

PLAIN = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("skip_special_tokens", "ignore_eos", "include_stop_str_in_output"),
)
LISTS = ("stop", "stop_token_ids")
CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "json_object": "json_object"}
# About text, which the gateway makes; and about reasoning before a constraint: here it holds from the first token.
NO_EFFECT = ("spaces_between_special_tokens", "grammar_from_first_token")


class VllmEngine:
    """Methods of the service; those that are not here are UNIMPLEMENTED."""

    def __init__(self, service: Service, version: str):
        self._service, self._version = service, version
        self._started_s = time.monotonic()
        self._running: dict[str, _Running] = {}  # by the gateway's id

    def methods(self) -> dict[str, Method]:
        return {
            "Generate": self._generate,
            "Abort": self._abort,
            "HealthCheck": self._health_check,
            "GetModelInfo": self._get_model_info,
            "GetServerInfo": self._get_server_info,
            "GetLoads": self._get_loads,
            "GetTokenizer": self._get_tokenizer,
        }

    async def _generate(self, data: bytes, call: Call) -> None:
        with self._service.admission():
            request_id, is_stream, parsed = await call.read(data, self._parse)
            if request_id in self._running:
                raise RequestError("request_id", f"{request_id!r} is in use by a request that has not finished")
            running = _Running()
            try:
                if request_id:
                    self._running[request_id] = running
                generation = await self._service.start(parsed, call.request_context())
                answer = _Answer(parsed, len(generation.checked[0].token_ids))
                async with contextlib.aclosing(generation.deltas()) as items:
                    async for _, delta, output in running.until_aborted(items):
                        if is_stream and delta.new_token_ids:
                            await call.send(answer.chunk(delta))
                        if output is not None:
                            for complete in answer.completes(output):
                                await call.send(complete)
                if running.is_aborted:
                    for complete in answer.aborted():
                        await call.send(complete)
            finally:
                if request_id:
                    del self._running[request_id]

    def _parse(self, request: pb.GenerateRequest) -> tuple[str, bool, CompletionCall]:
        config = self._service.config
        for field, _ in request.ListFields():
            if field.name not in ("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"):
                raise RequestError(field.name, "is not offered")
        if request.data_parallel_rank:
            raise RequestError("data_parallel_rank", f"is {request.data_parallel_rank}; there is one rank, 0")
        request_id = request.request_id and read_request_id("request_id", request.request_id, config)
        kind = request.WhichOneof("input")
        body = _settings(request.sampling_params)
        body["prompt"] = list(request.tokenized.input_ids) if kind == "tokenized" else request.text if kind else None
        if request.stream:
            body["stream"] = True
        return request_id, request.stream, parse_completion(body, config, {"max_tokens": None})

    async def _abort(self, data: bytes, call: Call) -> pb.AbortResponse:
        for request_id in await call.read(data, lambda request: list(request.request_ids)):
            if request_id in self._running:
                self._running[request_id].abort()
        return pb.AbortResponse()

    async def _health_check(self, data: bytes, call: Call) -> pb.HealthCheckResponse:
        try:
            self._service.check_ready()
        except UnavailableError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="ready")

    async def _get_model_info(self, data: bytes, call: Call) -> pb.GetModelInfoResponse:
        engine = self._service.engine.engine
        model, tokenizer = engine.model_config, engine.tokenizer
        bos = model.bos_token_id if tokenizer is None else tokenizer.bos_token_id
        return pb.GetModelInfoResponse(
            model_path=self._service.source,
            is_generation=True,
            max_context_length=engine.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=self._service.model_name,
            tokenizer_path=self._service.source,
            architectures=[model.architecture],
            eos_token_ids=engine.eos_token_ids,
            pad_token_id=model.pad_token_id or 0,
            bos_token_id=bos or 0,
            max_req_input_len=engine.max_model_len - 1,
            default_sampling_params_json=json.dumps(self._service.default_fields),
        )

    async def _get_server_info(self, data: bytes, call: Call) -> pb.GetServerInfoResponse:
        config = self._service.engine.engine.config
        return pb.GetServerInfoResponse(
            active_requests=self._service.num_in_flight,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",  # the protocol's name, by which gateways know it
            data_parallel_size=1,
            block_size=config.page_size,
            model_dtype=config.dtype,
            max_num_seqs=config.max_num_seqs,
        )

    async def _get_loads(self, data: bytes, call: Call) -> pb.GetLoadsResponse:
        config = self._service.engine.engine.config
        stats = self._service.stats()
        num_tokens = (int(stats["num_pages"]) - 1) * config.page_size
        load = pb.SchedulerLoad(
            num_running_reqs=int(stats["num_running"]),
            num_waiting_reqs=int(stats["num_waiting"]),
            num_total_reqs=int(stats["num_running"] + stats["num_waiting"]),
            num_used_tokens=round(stats["kv_used_fraction"] * num_tokens),
            max_total_num_tokens=num_tokens,
            token_usage=stats["kv_used_fraction"],
            cache_hit_rate=stats["num_cached_tokens"] / max(stats["num_prompt_tokens"], 1),
            utilization=stats["num_running"] / config.max_num_seqs,
            max_running_requests=config.max_num_seqs,
        )
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=self._version, dp_rank_count=1, loads=[load])

    async def _get_tokenizer(self, data: bytes, call: Call) -> None:
        archive = await self._service.in_text_thread(_tokenizer_archive, self._service.source)
        digest = hashlib.sha256(archive).hexdigest()
        chunk = GetMessageClass(DESCRIPTOR.methods_by_name["GetTokenizer"].output_type)
        for start in range(0, len(archive), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(archive)
            await call.send(chunk(data=archive[start : start + CHUNK_BYTES], sha256=digest if is_last else ""))


def _settings(given: pb.SamplingParams) -> dict[str, Any]:
    """`sampling_params` as fields of the completions schema. Raises RequestError for those that are not offered."""
    for unknown in UnknownFieldSet(given):
        raise RequestError(f"sampling_params.(number {unknown.field_number})", "is not a field that this server knows")
    body: dict[str, Any] = {"skip_special_tokens": given.skip_special_tokens}
    for field, value in given.ListFields():
        name = field.name
        if name in PLAIN:
            body[name] = value
        elif name in LISTS:
            body[name] = list(value)
        elif name == "logit_bias":
            body[name] = {str(key): item for key, item in value.items()}
        elif name in CONSTRAINTS:
            body["structured_outputs"] = {CONSTRAINTS[name]: value}
        elif name == "choice":
            body["structured_outputs"] = {"choice": list(value.choices)}
        elif name not in NO_EFFECT:
            raise RequestError(f"sampling_params.{name}", "is not offered")
    return body


class _Running:
    """A request that may be aborted: while it waits for tokens, never amid a message, which gRPC could not undo."""

    def __init__(self) -> None:
        self.is_aborted = False
        self._waiting: asyncio.Timeout | None = None

    def abort(self) -> None:
        self.is_aborted = True
        if self._waiting is not None:
            self._waiting.reschedule(0)

    async def until_aborted[Item](self, items: AsyncIterator[Item]) -> AsyncIterator[Item]:
        while not self.is_aborted:
            try:
                async with asyncio.timeout(None) as self._waiting:
                    item = await anext(items)
            except StopAsyncIteration:
                self.is_aborted = False  # too late
                return
            except TimeoutError:
                return
            finally:
                self._waiting = None
            yield item


class _Answer:
    """Messages about one request: chunks of a stream, and the end of each of its completions."""

    def __init__(self, call: CompletionCall, num_prompt_tokens: int):
        self._params = call.params
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids: list[list[int]] = [[] for _ in range(call.params.n)]

    def chunk(self, delta: Any) -> pb.GenerateResponse:
        token_ids = self._token_ids[delta.index]
        token_ids += delta.new_token_ids
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=delta.new_token_ids,
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(token_ids),
                output_logprobs=_output_logprobs(delta.new_logprobs),
                index=delta.index,
            )
        )

    def completes(self, output: RequestOutput) -> list[pb.GenerateResponse]:
        """Raises what `check_end` does for completions that did not end by themselves."""
        messages = []
        for completion in output.outputs:
            check_end(completion.finish_reason, completion.error)
            messages.append(self._complete(completion, output))
        return messages

    def _complete(self, completion: CompletionOutput, output: RequestOutput) -> pb.GenerateResponse:
        stop = completion.stop_reason
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=completion.token_ids,
                finish_reason=str(completion.finish_reason),
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=len(completion.token_ids),
                cached_tokens=output.num_cached_tokens,
                output_logprobs=_output_logprobs(completion.logprobs),
                input_logprobs=_input_logprobs(output),
                index=completion.index,
                matched_token_id=stop if isinstance(stop, int) else None,
                matched_stop_str=stop if isinstance(stop, str) else None,
            )
        )

    def aborted(self) -> list[pb.GenerateResponse]:
        return [
            pb.GenerateResponse(
                complete=pb.GenerateComplete(
                    output_ids=token_ids,
                    finish_reason="abort",
                    prompt_tokens=self._num_prompt_tokens,
                    completion_tokens=len(token_ids),
                    index=index,
                )
            )
            for index, token_ids in enumerate(self._token_ids)
        ]


def _output_logprobs(entries: Sequence[TokenLogprob] | None) -> pb.OutputLogProbs | None:
    if entries is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries],
    )


def _input_logprobs(output: RequestOutput) -> pb.InputLogProbs | None:
    if output.prompt_logprobs is None:
        return None
    entries = output.prompt_logprobs
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=output.prompt_token_ids,
        top_logprobs=[_top(entry) for entry in entries],
    )


def _top(entry: TokenLogprob | None) -> pb.TopLogProbs:
    pairs = () if entry is None else entry.top
    return pb.TopLogProbs(values=[logprob for _, logprob in pairs], token_ids=[token_id for token_id, _ in pairs])


def _tokenizer_archive(source: str) -> bytes:
    """The model's tokenizer files as a zip file. Raises NotFoundError where there are none that a gateway can read."""
    from checkpoints.source import open_source  # imports JAX, which a server that is alive need not have yet

    files: Mapping[str, bytes | Path] = open_source(source).extra_files()
    if not {"tokenizer.json", "tokenizer.model"} & files.keys():
        raise NotFoundError("tokenizer", "has no files of its own here: give the gateway one")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(name, content if isinstance(content, bytes) else content.read_bytes())
    return buffer.getvalue()
