"""`headrace generate`: prompts in, completions out, through the engine in this process."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from serving.cli.flags import given_fields
from serving.cli.parser import UsageError
from serving.cli.prompts import PromptLine, read_prompts, single_prompt
from serving.request import (
    CompletionOutput,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
)


def run_generate(args: argparse.Namespace, make_llm: Callable[[], Any]) -> int:
    """Complete every prompt and write the answers in input order. Returns the exit status: 1 if a request failed.

    `make_llm` returns a `serving.llm.LLM` or what stands in for it; it is called once all that needs no model has been
    checked. Raises UsageError, RequestError or OSError before anything runs.
    """
    sampling = given_fields(args, SamplingParams)
    if args.json_schema is not None:
        if "structured" in sampling:
            raise UsageError("--json_schema contradicts --structured: give one of them")
        sampling["structured"] = _read_schema(args.json_schema)
    if args.prompts_file is not None:
        lines = read_prompts(args.prompts_file, sampling)
    elif args.prompt is not None:
        lines = [single_prompt(args.prompt, sampling)]
    else:
        raise UsageError("one of --prompt and --prompts_file is required")
    if args.output is not None:
        check_writable(args.output)
    llm = make_llm()
    start_s = time.perf_counter()
    outputs = complete(llm, lines, use_tqdm=sys.stderr.isatty())
    elapsed_s = time.perf_counter() - start_s
    if args.output is not None:
        write_jsonl(args.output, outputs)
    else:
        print_answers(lines, outputs, sys.stdout)
    print_summary(outputs, elapsed_s, llm.stats() if args.print_stats else {}, sys.stderr)
    failed = [line.where for line, output in zip(lines, outputs, strict=True) if request_error(output) is not None]
    if failed:
        print(
            f"headrace: error: {len(failed)} of {len(lines)} prompts failed: {', '.join(failed[:8])}", file=sys.stderr
        )
    return 1 if failed else 0


def _read_schema(path: Path) -> StructuredOutput:
    try:
        return StructuredOutput.json_schema(path.read_text(encoding="utf-8"))
    except (RequestError, UnicodeDecodeError) as error:
        raise RequestError(str(path), str(error)) from None


def complete(llm: Any, lines: Sequence[PromptLine], *, use_tqdm: bool) -> list[RequestOutput]:
    """The outputs of `lines` in order. What the model itself refuses raises RequestError naming the line."""
    params = []
    for line in lines:
        try:
            params.append(llm.default_sampling_params(**line.sampling))
        except RequestError as error:
            raise RequestError(line.where, str(error)) from None
    try:
        return list(llm.generate([line.engine_prompt for line in lines], params, use_tqdm=use_tqdm))
    except RequestError as error:
        index = re.match(r"prompts\[(\d+)\]", error.field)
        if index is None:
            raise
        raise RequestError(lines[int(index[1])].where, str(error)) from None


def request_error(output: RequestOutput) -> str | None:
    """What went wrong with a request while it ran, or None."""
    for completion in output.outputs:
        if completion.error is not None or completion.finish_reason is FinishReason.ERROR:
            return completion.error or "unknown error"
    return None


def output_record(output: RequestOutput) -> dict[str, Any]:
    """An output line: the completion's fields, or `outputs` with those of each where n > 1 were asked for."""
    record: dict[str, Any] = {"prompt_token_ids": list(output.prompt_token_ids)}
    completions = [_completion_record(completion) for completion in output.outputs]
    record |= completions[0] if len(completions) == 1 else {"outputs": completions}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprob_record(entry) for entry in output.prompt_logprobs]
    error = request_error(output)
    if error is not None:
        record["error"] = error
    return record


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": None if completion.logprobs is None else [_logprob_record(entry) for entry in completion.logprobs],
    }


def _logprob_record(entry: TokenLogprob | None) -> dict[str, Any] | None:
    if entry is None:  # the first token of a prompt
        return None
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}


def _is_stream(path: Path) -> bool:
    """Whether `path` leads to a FIFO or a character device, which is written to and never replaced.

    Raises RequestError for what is neither that nor a regular file, nor missing.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return True
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "neither a file, a FIFO nor a character device"
        raise RequestError("output", f"{str(path)!r} is {kind}")
    return False


def _target_and_part(path: Path) -> tuple[Path, Path]:
    """The file that `path` leads to through links, and one beside it that nobody else has, to be renamed over it."""
    target = Path(os.path.realpath(path))
    return target, target.with_name(f"{target.name}.{os.getpid()}.part")


def check_writable(path: Path) -> None:
    """Raise OSError or RequestError now rather than after the work if `path` cannot be written."""
    if _is_stream(path):
        if not os.access(path, os.W_OK):  # not opened: a FIFO would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    _, part = _target_and_part(path)
    part.open("x").close()
    part.unlink()


def write_jsonl(path: Path, outputs: Sequence[RequestOutput]) -> None:
    """One JSON line an output. A regular file appears whole or not at all; FIFOs and devices are written to."""
    if _is_stream(path):
        _write_lines(path, "w", outputs)
        return
    target, part = _target_and_part(path)
    try:
        _write_lines(part, "x", outputs)
        os.replace(part, target)
    except FileExistsError:  # a part file that is not ours stays
        raise
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _write_lines(path: Path, mode: str, outputs: Sequence[RequestOutput]) -> None:
    # backslashreplace: half of a surrogate pair becomes the escape that JSON has for it
    with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
        for output in outputs:
            file.write(json.dumps(output_record(output), ensure_ascii=False, allow_nan=False) + "\n")


def print_answers(lines: Sequence[PromptLine], outputs: Sequence[RequestOutput], file: TextIO) -> None:
    """Each prompt in a line, its answers below it, for people. What `file` cannot encode is escaped."""
    encoding = file.encoding or "utf-8"

    def printable(text: str) -> str:
        return text.encode(encoding, "backslashreplace").decode(encoding)

    for line, output in zip(lines, outputs, strict=True):
        print(f"> {printable(line.shown)}", file=file)
        for completion in output.outputs:
            print(printable(completion.text.strip()), end="\n\n", file=file)


def print_summary(outputs: Sequence[RequestOutput], elapsed_s: float, counters: dict[str, Any], file: TextIO) -> None:
    """Totals, throughput with the latency beside it, and the engine's counters if any are given."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    summary = f"{len(outputs)} prompts, {num_prompt} prompt tokens, {num_output} output tokens in {elapsed_s:.2f} s"
    rate = num_output / elapsed_s if elapsed_s > 0 else 0.0
    first_token_s = sorted(
        output.metrics["first_token_time_s"] - output.metrics["arrival_time_s"]
        for output in outputs
        if output.metrics.get("first_token_time_s") is not None
    )
    summary += f": {rate:.1f} output tokens/s"
    if first_token_s:
        summary += f", first token after {first_token_s[len(first_token_s) // 2]:.2f} s (median)"
    print(summary, file=file)
    for name, value in counters.items():
        print(f"  {name:<32}{value}", file=file)
