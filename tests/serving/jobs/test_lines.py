"""Lines of batch files, and files of answers after a crash."""

from __future__ import annotations

import io
import json
import os
import random

import pytest

from configs.server import ServerConfig
from serving.jobs.appending import LineFile, replace_file
from serving.jobs.lines import LineAnswer, check_lines, input_lines, output_line, read_line, unanswered_line
from serving.request import RequestError

CONFIG = ServerConfig(max_body_bytes=2000, max_batch_lines=5)
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


def answered(custom_id: str) -> bytes:
    return output_line(custom_id, LineAnswer(status_code=200, body={"text": "é\n"}, request_id="req-1"))


def test_a_line_is_read_and_its_answer_has_the_form_of_vllm_run_batch():
    line = read_line(json.dumps(LINE).encode(), CONFIG)
    assert (line.custom_id, line.url, line.body) == ("a", "/v1/completions", {"prompt": "a"})
    record = json.loads(answered("a"))
    assert record.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"text": "é\n"}}
    assert record == {"custom_id": "a", "response": response, "error": None}
    record = json.loads(unanswered_line("a", "batch_expired", "m"))
    assert (record["response"], record["error"]) == (None, {"code": "batch_expired", "message": "m"})


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "line"),
        (b"{", "line"),
        (b"[]", "line"),
        (b"null", "line"),
        (b"\xff\xfe", "line"),
        (b'{"custom_id": "a", "custom_id": "b"}', "line"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "line"),
        (b"[" * 100_000, "line"),
        (json.dumps({**LINE, "body": {"x": 1e999}}).encode(), "line"),
        (json.dumps({**LINE, "other": 1}).encode(), "line.other"),
        (json.dumps({**LINE, "custom_id": None}).encode(), "line.custom_id"),
        (json.dumps({**LINE, "custom_id": 5}).encode(), "line.custom_id"),
        (json.dumps({**LINE, "custom_id": ""}).encode(), "line.custom_id"),
        (json.dumps({**LINE, "custom_id": "x" * 300}).encode(), "line.custom_id"),
        (json.dumps({**LINE, "custom_id": "\ud800"}).encode(), "line"),
        (json.dumps({**LINE, "method": "GET"}).encode(), "line.method"),
        (json.dumps({**LINE, "url": "/v1/embeddings"}).encode(), "line.url"),
        (json.dumps({**LINE, "url": ["/v1/completions"]}).encode(), "line.url"),
        (json.dumps({**LINE, "body": []}).encode(), "line.body"),
        (json.dumps({**LINE, "body": "x"}).encode(), "line.body"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_field(data, field):
    with pytest.raises(RequestError) as refused:
        read_line(data, CONFIG)
    assert refused.value.field == field


def checked(*lines: object, url: str | None = None) -> tuple[int, list[tuple[str, int | None]]]:
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    count, problems = check_lines(io.BytesIO(data), CONFIG, url, 3)
    return count, [(problem.code, problem.line) for problem in problems]


def test_a_file_is_checked_with_the_numbers_of_its_lines():
    b = {**LINE, "custom_id": "b"}
    assert checked(LINE, b"", b"  ", b) == (2, [])
    assert checked(LINE, b"", LINE) == (2, [("duplicate_custom_id", 3)])
    assert checked(b"x", LINE, b"\xff", b"{}", b"[]") == (
        4,
        [("invalid_line", 1), ("invalid_line", 3), ("invalid_line", 4)],
    )
    assert checked() == (0, [("empty_file", None)])
    assert checked(LINE, url="/v1/chat/completions")[1] == [("invalid_line", 1)]
    assert checked(*({**LINE, "custom_id": str(i)} for i in range(6)))[1] == [("invalid_line", 6)]
    assert checked(LINE, b"x" * 10_000, b)[1] == [("invalid_line", 2)]


def test_a_line_without_end_is_not_read_whole():
    class Endless(io.RawIOBase):
        num_read = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            self.num_read += len(buffer)
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    endless = Endless()
    with pytest.raises(RequestError, match="more than"):
        list(input_lines(io.BufferedReader(endless), CONFIG))
    assert endless.num_read < 100_000


def test_what_a_crash_left_of_the_last_line_is_dropped(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = answered("a") + b"\n" + answered("b") + b"\n"
    seed = random.randrange(2**32)
    print("seed", seed)
    torn = answered("c")
    cuts = [0, 1, 5, len(torn) - 1, len(torn), *random.Random(seed).sample(range(len(torn)), 10)]
    for tail in [torn[:cut] for cut in cuts] + [b"\0" * 100, torn[:40] + b"\0" * 9]:
        path.write_bytes(whole + tail)
        file = LineFile(path)
        assert file.custom_ids == ["a", "b"] and path.read_bytes() == whole
        file.add(torn)
        file.close()
        assert path.read_bytes() == whole + torn + b"\n"
        again = LineFile(path)
        assert again.custom_ids == ["a", "b", "c"]
        again.close()


@pytest.mark.parametrize(
    "data",
    [
        b"notes of mine",
        b"notes\n",
        b'{"custom_id": "a", "method": "POST"}\n',
        b'{"id": "batch_req_1", "custom_id": 5, "response": null}\n',
        answered("a") + b"\nx\n" + answered("b") + b"\n",
        answered("a")[:30] + b"\n" + answered("b") + b"\n",
    ],
)
def test_a_file_that_is_something_else_stays_as_it_is(tmp_path, data):
    path = tmp_path / "out.jsonl"
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"line \d is no answer of a batch"):
        LineFile(path)
    assert path.read_bytes() == data


def test_one_process_writes_at_a_time_and_no_link_is_followed(tmp_path):
    first = LineFile(tmp_path / "a")
    with pytest.raises(OSError, match="another process writes to it"):
        LineFile(tmp_path / "a")
    first.close()
    LineFile(tmp_path / "a").close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        LineFile(tmp_path / "link")


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "a")
    file.add(answered("a"))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    with pytest.raises(OSError, match="only 7 of"):
        file.add(answered("b"))
    monkeypatch.undo()
    file.add(answered("c"))
    file.close()
    again = LineFile(tmp_path / "a")
    assert again.custom_ids == ["a", "c"]
    again.close()


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    replace_file(path, b"old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new and longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["state.json"]
