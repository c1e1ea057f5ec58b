"""A process that renders chat templates for `serving.text.template_renderer`, within limits the system enforces.

Templates come with model files and are programs: they can loop for ever or ask for any amount of memory, and no
check inside Python stops both. Here the CPU-time limit ends the process whatever it is doing, and the address-space
limit fails its allocations. Run as a script; imports the standard library and jinja2 only.

Frames on both pipes: four bytes of length, most significant first, then JSON. First come the templates
{"templates": {name: source}}, answered by {"constants": {name: [strings in the template's expressions]}}; then each
{"name": ..., "variables": ...} is answered by {"text": ...} or {"error": "raised" or "failed", "message": ...}.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, BinaryIO

MAX_MESSAGE_CHARS = 500  # of an error


def read_frame(stream: BinaryIO) -> Any:
    """The next JSON value, or None at the end of the stream."""
    header = stream.read(4)
    return json.loads(stream.read(int.from_bytes(header, "big"))) if len(header) == 4 else None


def encode_frame(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "big") + data


def make_environment() -> Any:
    """The Jinja environment that Hugging Face chat templates are written for (transformers `apply_chat_template`)."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2.ext declares it

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            text: str = caller()
            return text

    def raise_exception(message: object) -> None:
        raise RaisedByTemplate(str(message))

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


class RaisedByTemplate(Exception):
    """The template called raise_exception: it does not accept these messages."""


def constants(environment: Any, source: str) -> list[str]:
    import jinja2

    try:
        tree = environment.parse(source)
    except jinja2.TemplateError:
        return []  # rendering will say what is wrong
    return sorted({node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)})


def render(template: Any, variables: dict[str, Any], max_output_chars: int) -> str:
    pieces = []
    num_chars = 0
    for piece in template.generate(variables):
        num_chars += len(piece)
        if num_chars > max_output_chars:
            raise ValueError(f"the text has more than {max_output_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["package_folders"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process; the parent may have passed on something else
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_AS, (settings["max_memory_bytes"],) * 2)
    environment = make_environment()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sources: dict[str, str] | None = None
    compiled: dict[str, Any] = {}
    while (request := read_frame(requests)) is not None:
        # SIGPROF has no handler in Python, which would wait for one long operation to end.
        signal.setitimer(signal.ITIMER_PROF, settings["max_cpu_s"])
        answer: dict[str, Any]
        try:
            if sources is None:
                sources = dict(request["templates"])
                answer = {"constants": {name: constants(environment, source) for name, source in sources.items()}}
            else:
                name = request["name"]
                if name not in compiled:
                    compiled[name] = environment.from_string(sources[name])
                text = render(compiled[name], request["variables"], settings["max_output_chars"])
                answer = {"text": text}
        except RaisedByTemplate as error:
            answer = {"error": "raised", "message": str(error)[:MAX_MESSAGE_CHARS]}
        except Exception as error:
            answer = {"error": "failed", "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]}
        frame = encode_frame(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(frame)
        answers.flush()


if __name__ == "__main__":
    main()
