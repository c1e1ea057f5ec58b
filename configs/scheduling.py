"""SchedulingConfig: whom the scheduler serves first, and how much of the engine each tenant may take."""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass

from configs.checks import check_bool, check_float, check_int, check_int_tuple, fail

_CLASS_NAME = re.compile(r"[a-z0-9_-]{1,32}")
_TENANT = re.compile(r"[ -~]{1,64}")
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
UNLIMITED = 0


@dataclass(frozen=True, kw_only=True)
class SchedulingConfig:
    """Classes, tenants and limits of one scheduler. Raises ConfigError.

    Fields that begin alike are parallel tuples: one entry for each class, or for each tenant named.
    """

    # Classes of requests, best first.
    class_names: tuple[str, ...] = ("default",)
    # Rising. A request is of the last class whose priority is at most its own, of the first where none is.
    class_priorities: tuple[int, ...] = (0,)
    class_ttft_s: tuple[float, ...] = (0.0,)  # seconds to the first token that a class is to keep; 0: no target
    class_tpot_s: tuple[float, ...] = (0.0,)  # seconds for each further token that a class is to keep; 0: no target
    # A waiting request counts as one class better after each so many seconds, and in the first class goes by arrival
    # alone after as many more; 0: never, so that a worse class may wait for ever.
    class_ageing_s: float = 30.0

    # Tenants with settings of their own.
    tenant_names: tuple[str, ...] = ()
    tenant_weights: tuple[float, ...] = ()  # shares of tokens in which tenants of a class are served; none: all 1
    tenant_kv_tokens: tuple[int, ...] = ()  # KV that a tenant may hold while others wait; 0: no budget; none: all 0
    tenant_requests_per_min: tuple[int, ...] = ()  # further requests get 429; 0: no limit; none: all 0
    tenant_tokens_per_min: tuple[int, ...] = ()  # prompt + output; 0: no limit; none: all 0
    # The same of each tenant that is not named.
    default_tenant_weight: float = 1.0
    default_tenant_kv_tokens: int = UNLIMITED
    default_tenant_requests_per_min: int = UNLIMITED
    default_tenant_tokens_per_min: int = UNLIMITED

    # Prompts.
    long_prefill_tokens: int = 0  # longer prompts count as long, and leave room to shorter ones; 0: none is long
    max_long_prefills: int = 1  # long prompts in prefill at once; shorter ones pass those that wait

    # Preemption.
    max_preemptions: int = 4  # of one request; beyond it, only where nothing else can give way

    # Steps are sized, and as many sequences run, as keeps the targets and bounds by prediction. None: where there are any.
    slo_control: bool | None = None
    # Seconds that a forward pass with decoding sequences takes at most for the prompt tokens in it: what users see as a
    # gap between tokens. The smallest bucket is always taken. 0: no bound.
    max_step_s: float = 0.0
    # The same for prompt tokens and sequences of background, the classes behind the last one with a target: what they add
    # to the wait of everybody else. 0: no bound.
    background_step_s: float = 0.0
    # Requests whose target cannot be met by prediction get 429 and the time to come back. None: where a class has a target.
    admission_control: bool | None = None
    max_queue_s: float = 60.0  # of predicted waiting, for admission of a class without a target of the first token

    def __post_init__(self) -> None:
        self._check_classes()
        self._check_tenants()
        check_int(self, "long_prefill_tokens", minimum=0)
        check_int(self, "max_long_prefills", minimum=1)
        check_int(self, "max_preemptions", minimum=0)
        check_bool(self, "slo_control", optional=True)
        for field in ("max_step_s", "background_step_s"):
            check_float(self, field, minimum=0.0)
            if getattr(self, field) and self.slo_control is False:
                fail(self, field, "is kept by prediction, which slo_control=False switches off")
        if self.background_step_s and self.background_priority is None:
            fail(self, "background_step_s", "needs a class with a target, and one without behind it")
        check_bool(self, "admission_control", optional=True)
        check_float(self, "max_queue_s", above=0.0)

    def _check_classes(self) -> None:
        _check_names(self, "class_names", _CLASS_NAME, "1 to 32 lower-case letters, digits, _ and -")
        if not self.class_names:
            fail(self, "class_names", "must name at least one class")
        check_int_tuple(self, "class_priorities", minimum=MIN_PRIORITY)
        for field in ("class_ttft_s", "class_tpot_s"):
            _check_numbers(self, field, minimum=0.0)
        for field in ("class_priorities", "class_ttft_s", "class_tpot_s"):
            # A target that is not given is none.
            if field != "class_priorities" and getattr(self, field) == (0.0,):
                object.__setattr__(self, field, (0.0,) * len(self.class_names))
            _check_length(self, field, "class_names")
        if list(self.class_priorities) != sorted(set(self.class_priorities)):
            fail(self, "class_priorities", "must be rising")
        if self.class_priorities[-1] > MAX_PRIORITY:
            fail(self, "class_priorities", f"must be at most {MAX_PRIORITY}")
        check_float(self, "class_ageing_s", minimum=0.0)

    def _check_tenants(self) -> None:
        _check_names(self, "tenant_names", _TENANT, "1 to 64 printable ASCII characters")
        _check_numbers(self, "tenant_weights", above=0.0)
        for field in ("tenant_kv_tokens", "tenant_requests_per_min", "tenant_tokens_per_min"):
            check_int_tuple(self, field, minimum=0)
            check_int(self, f"default_{field}", minimum=0)
        check_float(self, "default_tenant_weight", above=0.0)
        for field in ("tenant_weights", "tenant_kv_tokens", "tenant_requests_per_min", "tenant_tokens_per_min"):
            if getattr(self, field):
                _check_length(self, field, "tenant_names")

    def class_of(self, priority: int) -> int:
        """Index of the class of a request's priority."""
        return max(bisect.bisect_right(self.class_priorities, priority) - 1, 0)

    def has_target(self, class_index: int) -> bool:
        return self.class_ttft_s[class_index] > 0 or self.class_tpot_s[class_index] > 0

    @property
    def has_targets(self) -> bool:
        return any(map(self.has_target, range(len(self.class_names))))

    @property
    def controls_steps(self) -> bool:
        has_bounds = self.has_targets or self.max_step_s > 0
        return has_bounds if self.slo_control is None else self.slo_control

    @property
    def controls_admission(self) -> bool:
        return self.has_targets if self.admission_control is None else self.admission_control

    @property
    def background_priority(self) -> int | None:
        """From this priority on, no request has a target, and a better class has one; None: there are no such classes."""
        last = max(filter(self.has_target, range(len(self.class_names))), default=None)
        return None if last is None or last + 1 == len(self.class_names) else self.class_priorities[last + 1]

    def weight(self, tenant: str) -> float:
        return float(self._of_tenant(self.tenant_weights, tenant, 1.0, self.default_tenant_weight))

    def kv_tokens(self, tenant: str) -> int | None:
        """The tenant's KV budget, tokens; None: it has none."""
        return int(self._of_tenant(self.tenant_kv_tokens, tenant, 0, self.default_tenant_kv_tokens)) or None

    def requests_per_min(self, tenant: str) -> int | None:
        """None: no limit."""
        limits = self.tenant_requests_per_min
        return int(self._of_tenant(limits, tenant, 0, self.default_tenant_requests_per_min)) or None

    def tokens_per_min(self, tenant: str) -> int | None:
        """None: no limit."""
        return int(self._of_tenant(self.tenant_tokens_per_min, tenant, 0, self.default_tenant_tokens_per_min)) or None

    @property
    def has_rate_limits(self) -> bool:
        return any(
            (
                self.default_tenant_requests_per_min,
                self.default_tenant_tokens_per_min,
                *self.tenant_requests_per_min,
                *self.tenant_tokens_per_min,
            )
        )

    def _of_tenant(self, values: tuple[float, ...], tenant: str, neutral: float, default: float) -> float:
        if tenant not in self.tenant_names:
            return default
        return values[self.tenant_names.index(tenant)] if values else neutral


def _check_names(owner: SchedulingConfig, field: str, form: re.Pattern[str], what: str) -> None:
    names = getattr(owner, field)
    if isinstance(names, list):  # from flags
        names = tuple(names)
        object.__setattr__(owner, field, names)
    if not isinstance(names, tuple) or not all(isinstance(name, str) and form.fullmatch(name) for name in names):
        fail(owner, field, f"must be names of {what}")
    if len(set(names)) < len(names):
        fail(owner, field, "has a name twice")


def _check_numbers(
    owner: SchedulingConfig, field: str, *, minimum: float = -math.inf, above: float = -math.inf
) -> None:
    values = getattr(owner, field)
    if not isinstance(values, tuple) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        fail(owner, field, "must be a tuple of numbers")
    if not all(minimum <= v < math.inf and v > above for v in values):
        bound = f">= {minimum:g}" if minimum > -math.inf else f"> {above:g}"
        fail(owner, field, f"must hold finite numbers {bound}")


def _check_length(owner: SchedulingConfig, field: str, names: str) -> None:
    num_values, num_names = len(getattr(owner, field)), len(getattr(owner, names))
    if num_values != num_names:
        fail(owner, field, f"has {num_values} entries for {num_names} {names}")
