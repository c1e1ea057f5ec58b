"""ServerConfig: where a server listens, who may ask, and every limit on what one request may hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from configs.checks import ConfigError, check_bool, check_float, check_int, fail

MAX_PORT = 65535
_TENANT = re.compile(r"[ -~]{1,64}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Addresses, keys and limits of one server; HTTP, gRPC and batch go by the same ones.

    What is over a limit is refused by name before it costs anything. Alternatives of log-probs are bounded by
    EngineConfig.max_logprobs, tokens by EngineConfig.max_model_len. Raises ConfigError, which never shows a key.
    """

    host: str = "127.0.0.1"  # address that HTTP and gRPC listen on; 0.0.0.0: all
    port: int = 8000  # of HTTP; 0: a free one
    grpc_port: int | None = None  # of gRPC; None: no gRPC, 0: a free one
    admin_host: str = "127.0.0.1"  # address that the admin routes listen on
    admin_port: int | None = None  # of the admin routes; None: none, 0: a free one
    # Bearer keys, one of which every call but health checks must bring; none: everybody may call. A gin file keeps them
    # out of the list of processes.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # Tenants that metrics and logs count for, one for each of api_keys, in their order; none: all are "default".
    api_key_tenants: tuple[str, ...] = ()
    # Header in which a trusted proxy, and nobody else, names the tenant, instead of api_key_tenants.
    tenant_header: str | None = None
    served_model_name: str | None = None  # what clients call the model; None: the model source
    tool_call_format: str = "auto"  # in which the model calls tools, such as hermes; auto: as its template shows; none
    reasoning_format: str = "auto"  # in which the model marks its reasoning: think, deepseek_r1, harmony; auto; none
    drain_grace_s: float = 30.0  # running requests may go on for so long after SIGTERM
    max_concurrent_requests: int = 1024  # requests in flight, running and waiting; further ones get 429
    max_waiting_completions: int = 4096  # completions waiting for a slot, of all requests; further requests get 429
    max_loop_delay_s: float = 0.1  # new requests get 429 while the event loop is never less late than this
    retry_after_s: int = 1  # what a 429 or 503 says to wait
    max_n: int = 128  # completions of a prompt
    max_prompts: int = 1024  # prompts of a request
    max_completions: int = 1024  # of a request: prompts times n
    max_stop_strings: int = 16  # of a request
    max_stop_chars: int = 1024  # of a stop string
    max_id_chars: int = 256  # of a request id, a cache salt or a model name
    max_tools: int = 128  # of a request
    max_body_bytes: int = 4 * 2**20  # of a request's body or message
    body_timeout_s: float = 60.0  # in which a body must have arrived
    header_timeout_s: float = 30.0  # in which the headers of a connection's next request must have arrived
    max_header_bytes: int = 32 * 2**10  # of a request's headers together
    max_json_depth: int = 64  # of values inside each other in a body
    max_schema_depth: int = 32  # of values inside each other in a JSON schema
    max_grammar_chars: int = 64 * 2**10  # of a regex, a grammar, or a schema as JSON
    chat_template_s: float = 1.0  # CPU time of one rendering of the chat template
    max_answer_bytes: int = 64 * 2**20  # of one message to a gRPC client
    grpc_reflection: bool = False  # gRPC clients may ask which methods there are
    grpc_keepalive_s: float = 60.0  # a gRPC connection without traffic is tried this often
    grpc_min_ping_s: float = 10.0  # gRPC clients that try theirs more often are cut off
    batch_dir: str | None = None  # folder of batch jobs and their files, of this server alone; None: no batch jobs
    max_batch_in_flight: int = 256  # requests of batch jobs, or of one gRPC batch call, at once
    max_batch_lines: int = 50_000  # requests of a batch job
    max_file_bytes: int = 200 * 2**20  # of an uploaded file
    max_store_bytes: int = 16 * 2**30  # of all files together; further uploads get 429

    def __post_init__(self) -> None:
        for name in ("host", "admin_host"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not value.isascii() or any(c.isspace() for c in value):
                fail(self, name, "is no address")
        check_int(self, "port", minimum=0, maximum=MAX_PORT)
        for name in ("grpc_port", "admin_port"):
            check_int(self, name, minimum=0, maximum=MAX_PORT, optional=True)
        ports = [port for port in (self.port, self.grpc_port, self.admin_port) if port]
        if len(set(ports)) < len(ports):
            fail(self, "port", f"is not its own: grpc_port={self.grpc_port}, admin_port={self.admin_port}")
        self._check_keys()
        self._check_tenants()
        model = self.served_model_name
        if model is not None and (not isinstance(model, str) or not model.strip() or not model.isprintable()):
            fail(self, "served_model_name", "must be a name")
        for name in ("tool_call_format", "reasoning_format"):  # which there are, serving.api.chat_text knows
            if not isinstance(getattr(self, name), str):
                fail(self, name, "must be the name of a format, auto or none")
        check_float(self, "drain_grace_s", minimum=0.0, maximum=86400.0)
        check_int(self, "max_concurrent_requests", minimum=1, maximum=2**20)
        check_int(self, "max_waiting_completions", minimum=1, maximum=2**20)
        check_float(self, "max_loop_delay_s", above=0.0, maximum=60.0)
        check_int(self, "retry_after_s", minimum=1, maximum=3600)
        check_int(self, "max_n", minimum=1, maximum=128)
        check_int(self, "max_prompts", minimum=1, maximum=2**16)
        check_int(self, "max_completions", minimum=1, maximum=2**16)
        check_int(self, "max_stop_strings", minimum=0, maximum=16)
        check_int(self, "max_stop_chars", minimum=1, maximum=1024)
        check_int(self, "max_id_chars", minimum=1, maximum=1024)
        check_int(self, "max_tools", minimum=0, maximum=4096)
        check_int(self, "max_body_bytes", minimum=1024, maximum=2**30)
        check_float(self, "body_timeout_s", above=0.0, maximum=3600.0)
        check_float(self, "header_timeout_s", above=0.0, maximum=3600.0)
        check_int(self, "max_header_bytes", minimum=1024, maximum=2**20)
        check_int(self, "max_json_depth", minimum=8, maximum=64)
        check_int(self, "max_schema_depth", minimum=1, maximum=64)
        check_int(self, "max_grammar_chars", minimum=1, maximum=2**20)
        check_float(self, "chat_template_s", above=0.0, maximum=60.0)
        check_int(self, "max_answer_bytes", minimum=2**16, maximum=2**31 - 1)
        check_bool(self, "grpc_reflection")
        check_float(self, "grpc_keepalive_s", minimum=1.0, maximum=86400.0)
        check_float(self, "grpc_min_ping_s", minimum=0.1, maximum=3600.0)
        folder = self.batch_dir
        if folder is not None and (not isinstance(folder, str) or not folder.strip() or "\0" in folder):
            fail(self, "batch_dir", "is no folder")
        check_int(self, "max_batch_in_flight", minimum=1, maximum=2**16)
        check_int(self, "max_batch_lines", minimum=1, maximum=10**6)
        check_int(self, "max_file_bytes", minimum=1024, maximum=2**40)
        check_int(self, "max_store_bytes", minimum=1024, maximum=2**50)

    @property
    def has_tenants(self) -> bool:
        """Whether requests may be of several tenants."""
        return len(set(self.api_key_tenants)) > 1 or self.tenant_header is not None

    def _check_tenants(self) -> None:
        tenants = self.api_key_tenants
        if isinstance(tenants, list):  # from flags
            tenants = tuple(tenants)
            object.__setattr__(self, "api_key_tenants", tenants)
        if not isinstance(tenants, tuple) or not all(
            isinstance(name, str) and _TENANT.fullmatch(name) for name in tenants
        ):
            fail(self, "api_key_tenants", "must be names of 1 to 64 printable ASCII characters")
        if tenants and len(tenants) != len(self.api_keys):
            fail(self, "api_key_tenants", f"has {len(tenants)} names for {len(self.api_keys)} api_keys")
        header = self.tenant_header
        if header is not None and not (isinstance(header, str) and _HEADER_NAME.fullmatch(header)):
            fail(self, "tenant_header", "must be the name of a header")
        if header is not None and tenants:
            fail(self, "tenant_header", "contradicts api_key_tenants: give one of them")

    def _check_keys(self) -> None:
        keys = self.api_keys
        if isinstance(keys, list):  # from flags
            keys = tuple(keys)
            object.__setattr__(self, "api_keys", keys)
        if not isinstance(keys, tuple):
            raise ConfigError("ServerConfig.api_keys must be a tuple of texts (not shown)")
        for index, key in enumerate(keys):
            # what a header can carry
            if not isinstance(key, str) or not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError(
                    f"ServerConfig.api_keys[{index}] must be visible ASCII characters without a space (not shown)"
                )
